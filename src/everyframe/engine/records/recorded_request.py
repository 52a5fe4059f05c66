"""Read records: the request that makes a video again, or what a run takes from a record.

A recorded input file must lie in the working folder with the recorded hash. `record_schema.py`
checks records and says which options may be taken from them.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

from everyframe._version import __version__
from everyframe.checkpoints.digest import digest
from everyframe.core.errors import InputError
from everyframe.core.option_values import replaced_by, with_current_names
from everyframe.core.plan import Repair
from everyframe.core.quality import PRODUCTS, recorded_method
from everyframe.core.request import Request
from everyframe.diffusers_pipelines.inputs.options import SHARED, parameters_by_name
from everyframe.engine.records.file_identity import find_files
from everyframe.engine.records.record_schema import (
    GIVEN,
    accepted_options,
    check_record,
    option_facts,
)
from everyframe.hardware.cpu import num_usable_cores
from everyframe.hardware.facts import machine_facts
from everyframe.media.output_path import RECORD_SCHEMA
from everyframe.media.record import read_record, with_current_fields
from everyframe.media.video import Video
from everyframe.runtime.repair.repair_cache import repair_from

#: Overriding one of these discards the recorded fast paths.
_CHOOSE_ANEW = {"device", "dtype", "attention", "disable", "compile", "compiled", "fast_paths"}
#: Overriding one of these discards the recorded sampling method.
_OF_METHOD = {"quality", "num_inference_steps", "disable"}
#: Maximum number of threads per core taken from the record of a larger machine.
_MOST_ON_A_CORE = 4


def record_in(source: Any) -> Mapping[str, Any]:
    """Read a record from a mapping, a `Video`, a video file or a sidecar file.

    Raises:
        InputError: the source is none of these, or contains no record.
    """
    if isinstance(source, (str, os.PathLike)):
        return read_record(source)
    found = source.record if isinstance(source, Video) else source
    if isinstance(source, Video) and not found:
        raise InputError("that video has no record of what made it")
    if not isinstance(found, Mapping):
        raise InputError(
            f"from_record must be a video, its file, or a record, got {type(source).__name__}"
        )
    return with_current_fields(found)


def request_from(
    record: Mapping[str, Any], overrides: Mapping[str, Any], *, has_model: bool = False
) -> Request:
    """Rebuild the request of a record, with `overrides` replacing recorded options.

    A recorded input file must exist in the working folder with the recorded hash, unless it is
    overridden. A known model is taken from the record unless one is loaded (`has_model`). Options
    that only count when given in person are dropped; `differences` reports them.

    Raises:
        InputError: the record is invalid.
    """
    if record.get("schema") != RECORD_SCHEMA or not isinstance(record.get("request"), dict):
        raise InputError(
            f"this record is of schema {record.get('schema')!r}, expected {RECORD_SCHEMA!r}; "
            "it was not made by everyframe, or by another version of it"
        )
    method = check_record(record).settings.sampling_method()
    overrides = with_current_names(overrides)
    wanted = {name: value for name, value in overrides.items() if value is not None}
    own = parameters_by_name(wanted.pop("option", {}))
    replaced = replaced_by(wanted) | {name for name, each in SHARED.items() if each in own}
    if has_model:
        replaced.add("model")
    elif "model" not in wanted:
        _check_given_in_python(record)
    asked = accepted_options(with_current_names(record["request"]), replaced)
    recorded = asked.get("option")
    if isinstance(recorded, Mapping):  # each parameter of a pipeline is an option of its own
        given = {*own, *(SHARED[name] for name in SHARED.keys() & wanted.keys())}
        asked["option"] = {name: each for name, each in recorded.items() if name not in given}
    for name in asked:
        if name in GIVEN or option_facts(name).get("names_files"):
            asked[name] = find_files(name, asked[name])
    if "loras" in asked:
        asked["loras"] = [{**each, **each["file"]} for each in asked["loras"]]
    if "components" in asked:
        asked["components"] = _find_components(asked["components"])
    asked |= wanted
    if own:
        recorded = asked.get("option")
        asked["option"] = {**recorded, **own} if isinstance(recorded, Mapping) else own
    asked |= _plan_choices(record, wanted, asked)
    if not wanted.keys() & _OF_METHOD:
        asked["method"] = recorded_method(method, asked.get("quantized", {}).values())
    return Request(**asked)


def _plan_choices(
    record: Mapping[str, Any], wanted: Mapping[str, Any], asked: Mapping[str, Any]
) -> dict[str, Any]:
    """What the recorded plan chose and this call leaves open: fast paths, repairs, quantization."""
    found: dict[str, Any] = {"repairs": asked.get("repairs", _recorded_repairs(record))}
    if "quantize" in wanted or "+" in str(wanted.get("quality", "")):
        return found
    if not wanted.keys() & _CHOOSE_ANEW and _was_made_here(record):
        found |= _recorded_paths(record)
    is_of_quality = wanted.keys() & _OF_METHOD and asked.get("quantize", "auto") == "auto"
    found["quantized"] = _recorded_quantization(record, PRODUCTS if is_of_quality else ())
    return found


def _find_components(recorded: Mapping[str, Any]) -> dict[str, str]:
    """The files of a record's components in the working folder.

    Raises:
        InputError: one is not there, or has another hash.
    """
    for component, known in recorded.items():
        file, again = known["file"], f"give it again: --component {component}=FILE"
        if not os.path.isfile(file):
            raise InputError(
                f"the video was made with {file!r} for its {component}, which is not in this "
                f"folder; {again}"
            )
        if digest([file]) != known["sha256"]:
            raise InputError(
                f"{file!r} in this folder is not the file of the {component} that the video was "
                f"made with (its hash differs); {again}"
            )
    return {component: known["file"] for component, known in recorded.items()}


def _was_made_here(record: Mapping[str, Any]) -> bool:
    """Whether its fast paths can reproduce the bits: same device, same versions."""
    here = machine_facts()
    device = record.get("plan", {}).get("device", {}).get("name")
    is_same = record.get("versions") == here.versions and record.get("everyframe") == __version__
    return is_same and device in {each.name for each in here.devices}


def _recorded_repairs(record: Mapping[str, Any]) -> tuple[Repair, ...]:
    """Repairs that the recorded run began with; later ones recur without help.

    Other repairs, such as those cached on this machine, would change the bits.
    """
    parts = record.get("plan", {}).get("components", ())
    try:
        return tuple(repair_from(each) for part in parts for each in part.get("repairs", ()))
    except (TypeError, AttributeError) as error:
        raise InputError(f"the repairs in this record can't be read: {error}") from error


def _recorded_quantization(record: Mapping[str, Any], left_out: Collection[str]) -> dict[str, str]:
    """Recorded weight quantization: chosen for one machine's memory, visible in the frames."""
    found: dict[str, str] = {}
    for part in record.get("plan", {}).get("components", ()):
        precision = part.get("precision") if isinstance(part, Mapping) else None
        if isinstance(precision, Mapping) and precision.get("weight_dtype"):
            found[str(part.get("name"))] = str(precision["weight_dtype"])
    return {name: kind for name, kind in found.items() if kind not in left_out}


def _check_given_in_python(record: Mapping[str, Any]) -> None:
    """Raise if the model was in memory, since no file can be named for it."""
    model = record.get("model", {})
    if "sha256" in model and model["sha256"] is None:
        raise InputError(
            f"the video was made with a {model.get('name')} that was given in Python; load that "
            "again and call everyframe.run(pipe, from_record=...)"
        )


def _recorded_paths(record: Mapping[str, Any]) -> dict[str, Any]:
    known = {
        str(part["name"]): tuple(map(str, part["fast_paths"]))
        for part in record.get("plan", {}).get("components", ())
        if isinstance(part, Mapping) and isinstance(part.get("fast_paths"), (list, tuple))
    }
    return {"fast_paths": known} if known else {}


def threads_to_repeat(record: Mapping[str, Any]) -> int | None:
    """CPU threads to take from a record; None if the number is too high for this machine.

    A few threads per core are slow but reproduce the bits; thousands would kill the process.
    """
    threads = recorded_threads(record)
    most = num_usable_cores() * _MOST_ON_A_CORE
    return threads if threads is not None and threads <= most else None


def recorded_threads(record: Mapping[str, Any]) -> int | None:
    """CPU threads of the recorded run; another number changes the last bits."""
    threads = record.get("plan", {}).get("num_threads")
    is_number = isinstance(threads, int) and not isinstance(threads, bool)
    return threads if is_number and threads > 0 else None
