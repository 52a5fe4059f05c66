"""Make records: everything needed to reproduce a video, stored in it and beside it.

A record contains no path of this machine and no user name: models are identified by name and the
hash of their weights, input files by name and hash. `recorded_request.py` makes a request of a
record (``--from``), `media/record.py` embeds records in files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from everyframe._version import __version__
from everyframe.adapters.lora_file import lora_digest
from everyframe.checkpoints.digest import digest
from everyframe.checkpoints.locate import locate
from everyframe.core.errors import InputError
from everyframe.core.lora import Lora
from everyframe.core.plan import Plan
from everyframe.core.request import Request
from everyframe.engine.records.file_identity import (
    as_bytes,
    file_identities,
    identity,
    model_names,
    plain,
    public_name,
)
from everyframe.engine.records.record_schema import GIVEN, option_facts
from everyframe.hardware.facts import machine_facts
from everyframe.media.output_path import RECORD_SCHEMA
from everyframe.runtime.components.patchable import LoraIdentity

#: Left out of the recorded request: the values in force are in the recorded plan.
_OF_THIS_MACHINE = (
    "compiled", "report", "forget_repairs", "repairs", "fast_paths", "quantized", "method",
    "preview", "preview_decoder",
)  # fmt: skip
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


def recorded_loras(record: Mapping[str, Any]) -> tuple[LoraIdentity, ...]:
    """Identities of the LoRAs of a record that `make_record` made."""
    listed = record["request"].get("loras", ())
    return tuple((each["file"]["sha256"], each["strength"], each["component"]) for each in listed)


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
    for name, value in request.family_options.items():
        facts = option_facts(name)
        if facts.get("names_files"):
            asked[name] = file_identities(value)
        else:
            asked[name] = model_names(value) if facts.get("names_model") else plain(value)
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
