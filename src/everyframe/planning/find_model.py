"""Find the model that a request names, and list known models with their needs.

The data is in `checkpoints/known_models.yaml`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from everyframe.adapters.request_components import with_adapters
from everyframe.checkpoints import shapes_prompts
from everyframe.checkpoints.download import fetch_missing
from everyframe.checkpoints.folder import listing
from everyframe.checkpoints.locate import Location, locate, overview
from everyframe.core.bytes import fits, format_bytes
from everyframe.core.errors import CheckpointError, InputError
from everyframe.core.request import Request
from everyframe.families.registry import family, family_names, family_options, options_of
from everyframe.hardware.facts import machine_facts, pick_device
from everyframe.runtime.interface import ModelSpec

EMBEDDED_MODEL = "shapes"

#: Bytes per parameter by which the memory of a model's largest component is estimated from its size
#: on disk: components are stored in float32 and loaded one at a time.
_BYTES_PER_PARAMETER = {True: 2, False: 4}

#: Models that a refusal names.
_MOST_NAMED = 3


@dataclass(frozen=True)
class ModelRow:
    """One known model.

    Attributes:
        name: name of the model.
        family: its family.
        title: what it is, in a line.
        licence: licence of the weights.
        on_disk: whether its files are on this disk.
        download_bytes: bytes still to fetch; None if unknown, 0 if complete.
        needs_bytes: memory of its largest component.
        fits: whether this machine has that memory.
        note: what else a person should know.
    """

    name: str
    family: str
    title: str
    licence: str
    on_disk: bool
    download_bytes: int | None
    needs_bytes: int
    fits: bool
    note: str


def list_models() -> tuple[ModelRow, ...]:
    """List known models and their state on this machine; nothing is loaded or fetched."""
    device = pick_device(machine_facts(), "auto")
    element = _BYTES_PER_PARAMETER[device.has_fast_bf16]
    rows = []
    for place in overview():
        assert place.known is not None
        needs = _needs_bytes(place, element)
        rows.append(
            ModelRow(
                name=place.known.name,
                family=place.known.family,
                title=place.known.title,
                licence=place.known.licence,
                on_disk=place.is_complete,
                download_bytes=place.bytes_to_fetch,
                needs_bytes=needs,
                fits=fits(needs, device),
                note=place.known.note,
            )
        )
    return tuple(rows)


def _needs_bytes(place: Location, element: int) -> int:
    assert place.known is not None
    largest = max((part.num_parameters or 0 for part in place.known.parts), default=0)
    return largest * element if largest else place.bytes_on_disk


def _in_words(row: ModelRow) -> str:
    where = "on this disk" if row.on_disk else f"{format_bytes(row.download_bytes or 0)} to fetch"
    return f"{row.name} ({format_bytes(row.needs_bytes)} of memory, {where})"


def refuse_if_not_drawable(request: Request) -> None:
    """Check a request without a model name, which uses the embedded model, for what that can draw.

    Raises:
        InputError: says what it can draw and which models would fit this machine.
    """
    read = shapes_prompts.read_prompt(request.prompt or "")
    if not isinstance(read, shapes_prompts.Refusal):
        return
    fitting = [row for row in list_models() if row.fits and row.name != EMBEDDED_MODEL]
    others = listing([*map(_in_words, fitting)], _MOST_NAMED) or "none of the known ones"
    if len(fitting) > _MOST_NAMED:
        others += ", which `everyframe models` lists"
    raise InputError(
        f"the embedded model can't draw this: {read.reason}. It draws {shapes_prompts.CAN_DRAW}. "
        f"Models that fit this machine: {others} (--model NAME); --model shapes tries anyway"
    )


def find_model(request: Request, may_fetch: bool) -> tuple[ModelSpec, str]:
    """The spec of the model that a request names, with its LoRAs, and its family's name.

    Raises:
        InputError: unknown, or has to be fetched first without permission.
    """
    if request.model is None and request.prompt is None:
        raise InputError("give a prompt, or a model that needs none")
    # Before the family is known, as the files to fetch depend on it.
    variant = request.family_options.get("variant")
    replaced = tuple(request.components)
    location = locate(request.model or EMBEDDED_MODEL, variant=variant, without=replaced)
    if location.kind == "embedded" and not location.is_complete:
        raise CheckpointError("the embedded model is not in this installation; install it again")
    if location.kind == "hub" and not location.is_complete:
        if not may_fetch:
            raise InputError(
                f"{location.asked} is not on this disk, and its configs are needed to plan"
                f"{location.hint}; `everyframe generate` fetches it, "
                f"or `hf download {location.asked}`"
            )
        location = fetch_missing(location)
    location = replace(location, components=replaced)
    for name in family_names():
        found = family(name).recognise(location, _tolerant_options(name, request))
        if found is not None:
            family_options(name, request)
            return with_adapters(found, request), name
    raise CheckpointError(_no_family(location))


def _tolerant_options(name: str, request: Request) -> Any:
    """Options of this family; those of other families are reported once the model is known."""
    own = options_of(name)
    given: Mapping[str, Any] = request.family_options
    return own(**{key: value for key, value in given.items() if key in own.model_fields})


def _no_family(location: Location) -> str:
    families = ", ".join(family(name).title for name in family_names())
    return f"{location.asked} is a model of no family that is known here; known are: {families}"
