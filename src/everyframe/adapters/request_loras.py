"""Attach the LoRAs of a request to a model, before it is planned.

Headers are read here, values when the run begins (`WeightPatches.check`) and when the weights are
loaded. torch is imported only for a request with LoRAs.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from everyframe.core.errors import InputError
from everyframe.core.plan import LoraPlan
from everyframe.core.request import Request
from everyframe.runtime.components.patchable import LoraIdentity, PatchableSpec, WeightPatches
from everyframe.runtime.interface import ModelSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from everyframe.adapters.patches import AppliedLora


def with_loras(model: ModelSpec, request: Request) -> ModelSpec:
    """The model with the request's LoRAs; itself if there are none.

    Raises:
        CheckpointError: a file can't be read or is no LoRA for this model.
        InputError: this model takes no LoRAs, or a file is not the recorded one.
    """
    if not request.loras:
        return model
    from everyframe.adapters.patches import match_loras

    if not isinstance(model, PatchableSpec):
        raise InputError(f"loras have no effect on {model.title}; leave them out")
    found = match_loras(request.loras, model.weight_tables(), model.title)
    patched: ModelSpec = model.with_patches(
        WeightPatches(
            patches=found.patches,
            loras=tuple(_lora_plan(each) for each in found.applied),
            notes=tuple(note for each in found.applied for note in each.notes),
            check=partial(_check_values, found.applied),
            known=partial(_identities, found.applied),
        )
    )
    return patched


def _lora_plan(applied: AppliedLora) -> LoraPlan:
    lora = applied.lora
    return LoraPlan(lora.name, lora.strength, tuple(applied.num_tensors.items()))


def _check_values(applied: Sequence[AppliedLora]) -> None:
    for each in applied:
        each.file.check_values()


def _identities(applied: Sequence[AppliedLora]) -> tuple[LoraIdentity, ...] | None:
    from everyframe.adapters.lora_file import known_lora_digest

    found = []
    for each in applied:
        sha256 = known_lora_digest(each.file.path)
        if sha256 is None:
            return None
        found.append((sha256, each.lora.strength, each.lora.component))
    return tuple(found)
