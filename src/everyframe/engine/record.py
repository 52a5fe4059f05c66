"""What it takes to make a video again: written beside every video and into it, read by ``--from``.

A record holds no path of this machine and no name of its user: models by name and by the hash of
their weights, given pictures by file name and hash. Read next: `media/record.py`, which puts it
into files.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from everyframe import __version__
from everyframe.checkpoints.digest import digest
from everyframe.checkpoints.find import locate
from everyframe.core.errors import InputError
from everyframe.core.options import facts_of
from everyframe.core.plan import Plan, Remedy
from everyframe.core.request import Request
from everyframe.families.registry import all_options
from everyframe.families.remembered import remedy_from
from everyframe.hardware.facts import machine_facts
from everyframe.media.frames import picture_files
from everyframe.media.paths import RECORD_SCHEMA
from everyframe.media.video import Video

_GIVEN = ("image", "last_image", "extend")
#: What is in force is in the plan, and is taken from there.
_OF_THIS_MACHINE = ("report", "forget_repairs", "remedies", "paths", "quantized")
#: Options of which only one, or one set, can be given.
_ALIKE = (
    {"size", "height", "width", "resolution"},
    {"size", "height", "width", "aspect"},
    {"num_frames", "seconds"},
    {"image", "extend"},
)
#: Options with which the recorded fast paths are no longer those that are wanted.
_CHOOSE_ANEW = {"device", "dtype", "attention", "without", "compile", "paths"}
#: What a picture generator has to say of its output (IPTC digital source type).
_SOURCE_TYPE = "http://cv.iptc.org/newscodes/digitalsourcetype/trainedAlgorithmicMedia"


def make_record(plan: Plan, request: Request, weight_files: Sequence[str]) -> dict[str, Any]:
    """The record of a run; complete before the run begins, so it can go into the file's head."""
    shown = plan.to_json()
    settings = shown.pop("settings")
    for transient in ("notes", "to_fetch", "obstacle"):
        shown.pop(transient)
    shown["model"] = _model_name(plan.model)
    shown["device"] = {key: value for key, value in shown["device"].items() if key != "free_memory"}
    return {
        "schema": RECORD_SCHEMA,
        "everyframe": __version__,
        "model": {
            "name": _model_name(plan.model),
            "is_local": _is_local(plan.model),
            # Weights that somebody had in memory are no file's.
            "sha256": digest(weight_files) if weight_files else None,
        },
        "request": _asked(request, plan),
        "settings": settings,
        "plan": shown,
        "versions": machine_facts(request.device).versions,
        "provenance": {"ai_generated": True, "digital_source_type": _SOURCE_TYPE},
    }


def for_seed(record: dict[str, Any], seed: int) -> dict[str, Any]:
    """The record of one video out of several: as if its seed alone had been asked for."""
    request = {key: value for key, value in record["request"].items() if key != "num_videos"}
    settings = {**record["settings"], "seed": seed, "num_videos": 1}
    mine = {**record, "request": {**request, "seed": seed}, "settings": settings}
    repairs = [each for each in record.get("repairs", ()) if each["seed"] in (None, seed)]
    mine.pop("repairs", None)
    return {**mine, "repairs": repairs} if repairs else mine


def _is_local(model: str) -> bool:
    """Whether that model lies in a folder or file of the maker's own.

    A folder that happens to be called as a known model is, as everywhere, not what is meant.
    """
    try:
        return locate(model).kind in ("folder", "file")
    except InputError:  # the class of a pipeline that was given in Python
        return False


def _model_name(model: str) -> str:
    return _public_name(model) if _is_local(model) else model


def _public_name(path_or_name: str) -> str:
    """What exists on this disk without the folders above it, everything else as it is."""
    path = Path(path_or_name).expanduser()
    return path.resolve().name if path.exists() else path_or_name


def _asked(request: Request, plan: Plan) -> dict[str, Any]:
    asked = {
        name: value
        for name, value in request.given().items()
        if name not in (*_GIVEN, *_OF_THIS_MACHINE, "latents", "family_options", "model")
    }
    files = _options_of_files()
    for name, value in request.family_options.items():
        # Some name a folder, of a part of the model.
        asked[name] = _identities(value) if name in files else _public(value)
    asked["seed"] = plan.settings.seed
    if request.model is not None:
        asked["model"] = _model_name(request.model)
    for name in _GIVEN:
        source = getattr(request, name)
        if source is not None:
            asked[name] = _identity(source)
    if request.latents is not None:
        asked["latents"] = {"sha256": hashlib.sha256(_as_bytes(request.latents)).hexdigest()}
    return asked


def _options_of_files() -> set[str]:
    """Families' options that are given as pictures and videos."""
    return {
        name
        for options in all_options().values()
        for name in options.model_fields
        if facts_of(options, name).get("names_files")
    }


def _public(value: Any) -> Any:
    """An option's value without folders; several may be given, in a list or with commas."""
    if isinstance(value, Mapping):
        return {str(key): _public(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_public(each) for each in value]
    if not isinstance(value, (str, Path, int, float, bool, type(None))):
        # An object given in Python; a picture is one whichever file it was read from.
        kind = Image.Image if isinstance(value, Image.Image) else type(value)
        return f"<{kind.__name__}>"
    if isinstance(value, Path):
        return _public_name(os.fspath(value))
    if isinstance(value, str) and not Path(value).expanduser().exists():
        return ",".join(_public_name(part) for part in value.split(","))
    return _public_name(value) if isinstance(value, str) else value


def _identities(value: Any) -> Any:
    """What was given as a picture or video: by name and hash; words that are no files as they are.

    Several may be given, in a list or with commas, or by name among other values.
    """
    if isinstance(value, Mapping):
        return {str(key): _with_files(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)) and not all(isinstance(v, (int, float)) for v in value):
        return [_identities(each) for each in value]
    if isinstance(value, (str, Path)):
        if Path(value).exists():
            return _identity(value)
        parts = [part.strip() for part in os.fspath(value).split(",")]
        are_files = any(Path(part).exists() for part in parts)
        return _identities(parts) if are_files else os.fspath(value)
    return list(value) if isinstance(value, (list, tuple)) else _identity(value)


def _with_files(value: Any) -> Any:
    """A value in which files may be named, however deep; whatever else it holds as it is."""
    if isinstance(value, Mapping):
        return {str(key): _with_files(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_files(each) for each in value]
    is_file = isinstance(value, (str, Path)) and Path(value).exists()
    return _identity(value) if is_file else _public(value)


def _identity(source: Any) -> Any:
    if isinstance(source, (list, tuple)):
        return [_identity(each) for each in source]
    if isinstance(source, (str, Path)):
        path = Path(source)
        return {"file": path.name, "sha256": _content_hash(path)}
    return {"sha256": hashlib.sha256(_as_bytes(source)).hexdigest()}


def _content_hash(path: Path) -> str:
    """sha256 of a file; of a folder, that of the names and hashes of its pictures."""
    if path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    hasher = hashlib.sha256()
    for picture in picture_files(path):
        hasher.update(os.fsencode(f"{picture.name}\n{_content_hash(picture)}\n"))
    return hasher.hexdigest()


def _as_bytes(value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        # NumPy has no bfloat16 and sees no other device's memory.
        value = value.detach().to("cpu", torch.float32)
    if isinstance(value, Video):
        value = value.frames
    return np.ascontiguousarray(np.asarray(value)).tobytes()


def request_from(record: Mapping[str, Any], overrides: Mapping[str, Any]) -> Request:
    """The request that a record was made from, with `overrides` in place of what it says.

    A given picture or video is looked for under its name in the working folder and must have the
    recorded hash, unless it is given again. Raises `InputError` if the record is no such thing.
    """
    if record.get("schema") != RECORD_SCHEMA or not isinstance(record.get("request"), dict):
        raise InputError(
            f"this record is of schema {record.get('schema')!r}, expected {RECORD_SCHEMA!r}; "
            "it was not made by everyframe, or by another version of it"
        )
    wanted = {name: value for name, value in overrides.items() if value is not None}
    # What says the same in other words gives way as well: seconds to num_frames, for one.
    replaced = {name for group in _ALIKE if wanted.keys() & group for name in group}
    asked = {name: value for name, value in record["request"].items() if name not in replaced}
    asked |= wanted
    if not wanted.keys() & _CHOOSE_ANEW:
        asked |= _recorded_paths(record)
    if "model" not in wanted:
        _check_local_model(record)
    asked.setdefault("remedies", _remedies(record))
    if "quantize" not in wanted:
        asked |= {"quantized": _quantized(record)}
    for name in (*_GIVEN, "latents", *_options_of_files()):
        asked |= {name: _found(name, asked[name])} if name in asked else {}
    return Request(**asked)


def _remedies(record: Mapping[str, Any]) -> tuple[Remedy, ...]:
    """The repairs that the recorded run began with; those that it needed later come by themselves.

    Without them, and with others that this machine remembers, the bits would be different ones.
    """
    parts = record.get("plan", {}).get("components", ())
    try:
        return tuple(remedy_from(each) for part in parts for each in part.get("remedies", ()))
    except (TypeError, AttributeError) as error:
        raise InputError(f"the repairs in this record can't be read: {error}") from error


def _quantized(record: Mapping[str, Any]) -> dict[str, str]:
    """What weights were kept in: chosen for the memory of one machine, and seen in the picture."""
    found: dict[str, str] = {}
    for part in record.get("plan", {}).get("components", ()):
        precision = part.get("precision") if isinstance(part, Mapping) else None
        if isinstance(precision, Mapping) and precision.get("weights"):
            found[str(part.get("name"))] = str(precision["weights"])
    return found


def _found(name: str, given: Any) -> Any:
    """Files by their recorded names in the working folder; anything else as it is."""
    if isinstance(given, list):
        return [_found(name, each) for each in given]
    if isinstance(given, dict) and "sha256" not in given:
        return {key: _found(name, each) for key, each in given.items()}
    return _find_given(name, given) if isinstance(given, dict) else given


def _check_local_model(record: Mapping[str, Any]) -> None:
    """A model that lay in a folder is recorded without it, and has to be shown again."""
    model = record.get("model", {})
    name = str(model.get("name"))
    if "sha256" in model and model["sha256"] is None:
        raise InputError(
            f"the video was made with a {name} that was given in Python; load that again and call "
            "everyframe.run(pipe, from_record=...)"
        )
    if model.get("is_local") and not Path(name).exists():
        raise InputError(
            f"the video was made with a model on the maker's own disk, {name!r}, which is not in "
            "this folder; say where it lies: --model FOLDER"
        )


def _find_given(name: str, identity: Mapping[str, str]) -> str:
    file = identity.get("file")
    flag = f"--{name.replace('_', '-')}"
    if file is None:
        raise InputError(f"the video was made from {name} given in Python; give it again ({name}=)")
    # The name comes from a file that anybody may have made: no folders, only this one.
    path = Path(Path(file).name)
    if not path.exists():
        raise InputError(f"the video was made from the file {file!r}; give it again by {flag} FILE")
    if _content_hash(path) != identity.get("sha256"):
        raise InputError(
            f"{file!r} in this folder is not the file that the video was made from "
            f"(its hash differs); give the right one by {flag} FILE"
        )
    return str(path)


def _recorded_paths(record: Mapping[str, Any]) -> dict[str, Any]:
    """The fast paths of the recorded run: others give other last bits."""
    parts = record.get("plan", {}).get("components", ())
    known = {
        str(part["name"]): tuple(map(str, part["paths"]))
        for part in parts
        if isinstance(part, Mapping) and isinstance(part.get("paths"), (list, tuple))
    }
    return {"paths": known} if known else {}


def recorded_threads(record: Mapping[str, Any]) -> int | None:
    """The number of CPU threads of the recorded run: other numbers give other last bits."""
    threads = record.get("plan", {}).get("num_threads")
    return threads if isinstance(threads, int) and threads > 0 else None


def differences(record: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, ...]:
    """What differs between two records so that the same bits can't be promised, a line each."""
    found = []
    if record.get("model", {}).get("sha256") != other["model"]["sha256"]:
        found.append("the model's weights are not those that made the video")
    if record.get("everyframe") != other["everyframe"]:
        found.append(f"everyframe was {record.get('everyframe')}, is {other['everyframe']}")
    for name, version in record.get("versions", {}).items():
        now = other["versions"].get(name)
        if now != version:
            found.append(f"{name} was {version}, is {now}")
    device = record.get("plan", {}).get("device", {}).get("name")
    if device != other["plan"]["device"]["name"]:
        found.append(f"the device was {device}, is {other['plan']['device']['name']}")
    found += [
        f"it ran out of memory in {repair.get('stage')} and went on otherwise: {repair.get('to')}"
        for repair in record.get("repairs", ())
        if repair.get("cause") == "memory"
    ]
    if record.get("request") == other["request"]:
        # What was asked is the same, so a setting that is not has another default now.
        was, now = (_flat(each.get("settings", {})) for each in (record, other))
        found += [
            f"the default of {name} was {was[name]!r}, is {now[name]!r}"
            for name in was
            if name in now and was[name] != now[name]
        ]
    return tuple(found)


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by name, the family's own options among them, as they come out of JSON."""
    plain = json.loads(json.dumps(settings))
    options = {str(name): value for name, value in plain.pop("options", ())}
    return {**plain, **options}
