"""Make and read records: everything needed to reproduce a video, stored in it and beside it.

``--from`` reads a record. It contains no path of this machine and no user name: models are
identified by name and the hash of their weights, input files by name and hash. `media/record.py`
embeds records in files.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from everyframe._version import __version__
from everyframe.adapters.lora_file import lora_digest
from everyframe.checkpoints.digest import digest
from everyframe.checkpoints.locate import locate
from everyframe.core.errors import InputError
from everyframe.core.lora import Lora
from everyframe.core.option_values import replaced_by, with_current_names
from everyframe.core.options import facts_of
from everyframe.core.plan import Plan, Repair
from everyframe.core.quality import PRODUCTS, recorded_method
from everyframe.core.request import Request
from everyframe.engine.records.file_identity import (
    as_bytes,
    file_identities,
    find_files,
    identity,
    model_names,
    plain,
    public_name,
)
from everyframe.engine.records.record_schema import (
    GIVEN,
    accepted_options,
    check_record,
    rejected_options,
)
from everyframe.families.registry import all_options
from everyframe.hardware.cpu import num_usable_cores
from everyframe.hardware.facts import machine_facts
from everyframe.media.output_path import RECORD_SCHEMA
from everyframe.media.record import read_record, with_current_fields
from everyframe.media.video import Video
from everyframe.runtime.components.patchable import LoraIdentity
from everyframe.runtime.repair.repair_cache import repair_from

#: Left out of the recorded request: the values in force are in the recorded plan.
_OF_THIS_MACHINE = (
    "compiled", "report", "forget_repairs", "repairs", "fast_paths", "quantized", "method",
    "preview", "preview_decoder",
)  # fmt: skip
#: Overriding one of these discards the recorded fast paths.
_CHOOSE_ANEW = {"device", "dtype", "attention", "disable", "compile", "compiled", "fast_paths"}
#: Maximum number of threads per core taken from the record of a larger machine.
_MOST_ON_A_CORE = 4
#: IPTC digital source type that generators must declare.
_SOURCE_TYPE = "http://cv.iptc.org/newscodes/digitalsourcetype/trainedAlgorithmicMedia"


def make_record(plan: Plan, request: Request, weight_files: Sequence[str]) -> dict[str, Any]:
    """Build the record of a run, complete before the run so that it fits into the file header."""
    shown = plan.to_json()
    settings = shown.pop("settings")
    for transient in ("notes", "downloads", "infeasible", "preview", "batch"):
        shown.pop(transient)
    shown["model"] = _model_name(plan.model)
    shown["device"] = {key: value for key, value in shown["device"].items() if key != "free_memory"}
    return {
        "schema": RECORD_SCHEMA,
        "everyframe": __version__,
        "model": {
            "name": _model_name(plan.model),
            "is_local": _is_local(plan.model),
            # None for weights that were given in memory.
            "sha256": digest(weight_files) if weight_files else None,
        },
        "request": _describe_request(request, plan),
        "settings": settings,
        "plan": shown,
        "versions": machine_facts(request.device).versions,
        "provenance": {"ai_generated": True, "digital_source_type": _SOURCE_TYPE},
    }


def for_seed(record: dict[str, Any], seed: int) -> dict[str, Any]:
    """The record of one video of several, as if only its seed had been requested."""
    request = {key: value for key, value in record["request"].items() if key != "num_videos"}
    settings = {**record["settings"], "seed": seed, "num_videos": 1}
    mine = {**record, "request": {**request, "seed": seed}, "settings": settings}
    if isinstance((request.get("option") or {}).get("generator"), str):
        # A generator given in Python has its own state, which no seed reproduces.
        mine["request"]["seed"] = settings["seed"] = None
    repairs = [each for each in record.get("repairs", ()) if each["seed"] in (None, seed)]
    mine.pop("repairs", None)
    return {**mine, "repairs": repairs} if repairs else mine


def _is_local(model: str) -> bool:
    """Whether the model is the user's own folder or file.

    A known model's name always means that model, even if a folder of that name exists.
    """
    try:
        return locate(model).kind in ("folder", "file")
    except InputError:  # the class of a pipeline that was given in Python
        return False


def _model_name(model: str) -> str:
    return public_name(model) if _is_local(model) else model


def _describe_request(request: Request, plan: Plan) -> dict[str, Any]:
    asked = {
        name: value
        for name, value in request.given().items()
        if name not in (*GIVEN, *_OF_THIS_MACHINE, "family_options", "model")
    }
    files, models = _options_that("names_files"), _options_that("names_model")
    for name, value in request.family_options.items():
        if name in files:
            asked[name] = file_identities(value)
        else:
            asked[name] = model_names(value) if name in models else plain(value)
    if request.loras:
        asked["loras"] = [_lora(each) for each in request.loras]
    if request.components:
        asked["components"] = {
            name: _file(Path(file).expanduser()) for name, file in request.components.items()
        }
    asked["seed"] = plan.settings.seed
    if request.model is not None:
        asked["model"] = _model_name(request.model)
    for name in GIVEN[:-1]:
        source = getattr(request, name)
        if source is not None:
            asked[name] = identity(source)
    if request.latents is not None:
        asked["latents"] = {"sha256": hashlib.sha256(as_bytes(request.latents)).hexdigest()}
    return asked


def _lora(lora: Lora) -> dict[str, Any]:
    """A LoRA by the name and hash of its file."""
    file = {"file": lora.name, "sha256": lora_digest(lora.path)}
    return {"file": file, "strength": lora.strength, "component": lora.component}


def _file(path: Path) -> dict[str, str]:
    return {"file": path.name, "sha256": digest([path])}


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


def recorded_loras(record: Mapping[str, Any]) -> tuple[LoraIdentity, ...]:
    """Identities of the LoRAs of a record that `make_record` made."""
    listed = record["request"].get("loras", ())
    return tuple((each["file"]["sha256"], each["strength"], each["component"]) for each in listed)


def _options_that(fact: str) -> set[str]:
    """Names of family options with that property; see `everyframe.core.options.option`."""
    return {
        name
        for options in all_options().values()
        for name in options.model_fields
        if facts_of(options, name).get(fact)
    }


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
    checked = check_record(record)
    overrides = with_current_names(overrides)
    wanted = {name: value for name, value in overrides.items() if value is not None}
    own = wanted.pop("option", None)
    replaced = replaced_by(wanted)
    if has_model:
        replaced.add("model")
    elif "model" not in wanted:
        _check_given_in_python(record)
    asked = accepted_options(with_current_names(record["request"]), replaced)
    for name in (*GIVEN, *_options_that("names_files")):
        asked |= {name: find_files(name, asked[name])} if name in asked else {}
    if "loras" in asked:
        asked["loras"] = [{**each, **each["file"]} for each in asked["loras"]]
    if "components" in asked:
        asked["components"] = _find_components(asked["components"])
    asked |= wanted
    if own is not None:  # each parameter of a pipeline is an option of its own
        recorded = asked.get("option")
        asked["option"] = {**recorded, **own} if isinstance(recorded, Mapping) else own
    names_products = "quantize" in wanted or "+" in str(wanted.get("quality", ""))
    if not names_products and not wanted.keys() & _CHOOSE_ANEW and _was_made_here(record):
        asked |= _recorded_paths(record)
    asked.setdefault("repairs", _recorded_repairs(record))
    is_anew = bool(wanted.keys() & {"quality", "num_inference_steps", "disable"})
    if not names_products:
        is_of_quality = is_anew and asked.get("quantize", "auto") == "auto"
        asked |= {"quantized": _recorded_quantization(record, PRODUCTS if is_of_quality else ())}
    if not is_anew:
        kinds = asked.get("quantized", {}).values()
        asked["method"] = recorded_method(checked.settings.sampling_method(), kinds)
    return Request(**asked)


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


def recorded_threads(record: Mapping[str, Any]) -> int | None:
    """CPU threads of the recorded run; another number changes the last bits."""
    threads = record.get("plan", {}).get("num_threads")
    is_number = isinstance(threads, int) and not isinstance(threads, bool)
    return threads if is_number and threads > 0 else None


def threads_to_repeat(record: Mapping[str, Any]) -> int | None:
    """CPU threads to take from a record; None if the number is too high for this machine.

    A few threads per core are slow but reproduce the bits; thousands would kill the process.
    """
    threads = recorded_threads(record)
    most = num_usable_cores() * _MOST_ON_A_CORE
    return threads if threads is not None and threads <= most else None


def differences(
    record: Mapping[str, Any], other: Mapping[str, Any], *, is_same_run: bool = False
) -> tuple[str, ...]:
    """List what differs between two records and prevents equal bits, one line each.

    Includes options of the first record that are never taken from a record, unless `is_same_run`.

    Raises:
        InputError: not a valid record.
    """
    check_record(record)
    found = [] if is_same_run else [*_not_taken(record, other)]
    if record.get("model", {}).get("sha256") != other["model"]["sha256"]:
        found.append("the model's weights are not those that made the video")
    if record.get("everyframe") != other["everyframe"]:
        found.append(f"everyframe was {record.get('everyframe')}, is {other['everyframe']}")
    for name, version in record.get("versions", {}).items():
        if other["versions"].get(name) != version:
            found.append(f"{name} was {version}, is {other['versions'].get(name)}")
    device = record.get("plan", {}).get("device", {}).get("name")
    if device != other["plan"]["device"]["name"]:
        found.append(f"the device was {device}, is {other['plan']['device']['name']}")
    found += _other_switches(record, other)
    found += [
        f"it ran out of memory in {repair.get('stage')} and went on otherwise: {repair.get('to')}"
        for repair in record.get("repairs", ())
        if repair.get("cause") == "memory"
    ]
    if record.get("request") == other["request"]:
        # The request is the same, so a setting that differs has a new default.
        was, now = (_flat(each.get("settings", {})) for each in (record, other))
        found += [
            f"the default of {name} was {was[name]!r}, is {now[name]!r}"
            for name in was
            if name in now and was[name] != now[name]
        ]
    return tuple(found)


def _not_taken(record: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    """Recorded options that were not applied again."""
    yield from rejected_options(record.get("request", {}), other["request"])
    threads = record.get("plan", {}).get("num_threads")
    if threads not in (None, other["plan"]["num_threads"]):
        yield f"it was computed with {threads} threads, and is with {other['plan']['num_threads']}"
    now = {part["name"]: set(part["fast_paths"] or ()) for part in other["plan"]["components"]}
    for part in record.get("plan", {}).get("components", ()):
        less = sorted(set(part.get("fast_paths") or ()) - now.get(part["name"], set()))
        if less:
            yield f"{part['name']} ran by {', '.join(less)}, and does not here"


def _other_switches(record: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    """Torch switches that differ between runs of in-memory pipelines; their owner sets them."""
    plans = json.loads(json.dumps([record.get("plan"), other["plan"]]))
    was, now = (each.get("switches") if isinstance(each, Mapping) else None for each in plans)
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        for name in now:
            if name in was and was[name] != now[name]:
                setting = name.replace("_", " ")
                yield f"torch's {setting} was {was[name]!r}, is {now[name]!r}"


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings and family options by name, in JSON types."""
    plain = json.loads(json.dumps(settings))
    options = {str(name): value for name, value in plain.pop("options", ())}
    return {**plain, **options}
