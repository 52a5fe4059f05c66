"""Attach the component files of a request to a model, before it is planned.

Headers are read here, values when the weights are loaded.
"""

from __future__ import annotations

from pathlib import PurePath

from everyframe.adapters.distilled_models import find_preset, titles_in
from everyframe.adapters.request_loras import with_loras
from everyframe.core.errors import InputError, did_you_mean
from everyframe.core.paths import expand_path
from everyframe.core.request import Request
from everyframe.runtime.components.patchable import ComponentSpec, ReplacedComponents
from everyframe.runtime.interface import ModelSpec
from everyframe.runtime.sampling_preset import PresetSpec


def with_adapters(model: ModelSpec, request: Request) -> ModelSpec:
    """The model with the request's component files, its LoRAs on top of them, and their presets.

    Raises:
        CheckpointError: a file can't be read, or does not fit.
        InputError: the model takes no such files, or has no such component.
    """
    return with_preset(with_loras(with_components(model, request), request), request)


def with_preset(model: ModelSpec, request: Request) -> ModelSpec:
    """The model with the sampling preset of its step-distilled file, if it has a known one."""
    if not isinstance(model, PresetSpec):
        return model
    loras = {lora.name: titles_in(lora.path) for lora in request.loras if lora.strength}
    files = {
        PurePath(file).name: titles_in(expand_path(file, "components"))
        for file in request.components.values()
    }
    known = {**loras, **files, PurePath(model.name).name: ()}
    preset, file = find_preset(known, model.denoiser_classes)
    if preset is None:
        return model
    found: ModelSpec = model.with_preset(preset, file)
    return found


def with_components(model: ModelSpec, request: Request) -> ModelSpec:
    """The model with the request's files in place of its own for these components.

    Raises:
        CheckpointError: a file can't be read or is not of that component.
        InputError: this model takes no component files, or has no component of that name.
    """
    if not request.components:
        return model
    from everyframe.adapters.component_file import match_component

    if not isinstance(model, ComponentSpec):
        raise InputError(f"components have no effect on {model.title}; leave them out")
    names = model.component_names
    for name in request.components:
        if name not in names:
            raise InputError(
                f"components: {model.title} has no component {name!r} with weights"
                f"{did_you_mean(name, names)}; it has {', '.join(names)}"
            )
    found = {
        name: match_component(
            expand_path(file, "components"),
            model.component_table(name),
            f"the {name} of {model.title}",
            model.component_keys(name),
        )
        for name, file in request.components.items()
    }
    notes = [
        note
        for name, each in found.items()
        for note in (f"the {name} is read from {each.tensors.source.name}", *each.notes)
    ]
    tensors = {name: each.tensors for name, each in found.items()}
    replaced: ModelSpec = model.with_components(ReplacedComponents(tensors, tuple(notes)))
    return replaced
