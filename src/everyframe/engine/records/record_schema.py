"""Validate records: what they may contain, and which options may be taken from them.

A record is untrusted data and is validated as a whole before use. Options that a person must give
in this call (code to execute, devices, folders, expensive choices) are never taken from it; models
only if they are listed. `provenance.py` makes records, `recorded_request.py` makes requests from
them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from everyframe.checkpoints.folder import is_plain_name
from everyframe.checkpoints.locate import is_listed
from everyframe.core.errors import InputError
from everyframe.core.options import Options, explain, facts_of, flag_of, shown
from everyframe.core.quality import SamplingMethod, parse_method
from everyframe.core.request import Request
from everyframe.diffusers_pipelines.inputs.options import PipelineOptions
from everyframe.families.registry import all_options

_SHA256 = r"^[0-9a-f]{64}$"

#: Integers that a double can represent exactly.
_Count = Annotated[int, Field(ge=-(2**53), le=2**53)]

#: Option of a pipeline that holds its own parameters by name.
OWN_PARAMETERS = "option"

#: Conditioning frames and noise, recorded by hash only.
GIVEN = ("image", "last_image", "extend", "latents")


class _Data(BaseModel):
    """Base model; ignores unknown fields of other versions."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)


class _Model(_Data):
    name: str | None = None
    is_local: bool = False
    sha256: str | None = None


class _Precision(_Data):
    compute: str | None = None
    weight_dtype: str | None = None


class _Component(_Data):
    name: str
    fast_paths: tuple[str, ...] | None = None
    repairs: tuple[dict[str, str], ...] = ()
    precision: _Precision = _Precision()


class _Device(_Data):
    name: str | None = None
    memory: _Count | None = None
    free_memory: _Count | None = None


class _Plan(_Data):
    components: tuple[_Component, ...] = ()
    num_threads: _Count | None = Field(default=None, ge=1)
    device: _Device = _Device()


class _Method(_Data):
    name: str
    num_computed: _Count
    num_warm: _Count = 1
    guided_percent: _Count = 100
    early_percent: _Count = 100
    holds_guidance: bool = False
    limit: float | None = None


class _Settings(_Data):
    prompt: str | None = None
    negative_prompt: str | None = None
    height: _Count | None = None
    width: _Count | None = None
    num_frames: _Count | None = None
    fps: float | None = None
    num_inference_steps: _Count | None = None
    guidance_scale: float | None = None
    seed: _Count | None = None
    num_videos: _Count | None = None
    chain: _Count | None = None
    edit_strength: float | None = None
    given_frames: tuple[str, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    method: _Method | None = None

    def sampling_method(self) -> SamplingMethod | None:
        """The lossy method, measured on one machine and visible in the frames; None for exact.

        Raises:
            InputError: it is none of ours.
        """
        if self.method is None:
            return None
        found = SamplingMethod(**self.method.model_dump(include={*_Method.model_fields}))
        if parse_method(str(found)).sampling != replace(found, limit=None):
            raise InputError(f"the sampling method in this record, {str(found)!r}, is none")
        return found


class _Repair(_Data):
    stage: str | None = None
    to: str | None = None
    cause: str | None = None
    seed: _Count | None = None


class Record(_Data):
    """Validated record. Known fields have the right form; unknown ones are ignored."""

    everyframe: str | None = None
    model: _Model = _Model()
    request: dict[str, Any] = {}
    settings: _Settings = _Settings()
    plan: _Plan = _Plan()
    versions: dict[str, str | None] = {}
    repairs: tuple[_Repair, ...] = ()


class Identity(BaseModel):
    """Name and hash of an input file; without a name, an input passed from Python."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    sha256: str = Field(pattern=_SHA256)
    file: str | None = None


def check_record(record: Mapping[str, Any]) -> Record:
    """Validate a record as a whole.

    Raises:
        InputError: a value is malformed; one line names it.
    """
    try:
        return Record.model_validate_json(json.dumps(record, allow_nan=False))
    except ValidationError as error:
        raise InputError(f"the record can't be read: {explain(error)}") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"the record holds a value that JSON can't: {error}") from None


def accepted_options(asked: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
    """Options of a recorded request that may be used, beside those `given` in this call.

    Raises:
        InputError: a model or component that is not listed, or a file with a path.
    """
    found = {}
    for name, value in asked.items():
        facts = option_facts(name)
        if name in given or facts.get("person_only"):
            continue
        value = own_parameters(name, value)
        if facts.get("names_model"):
            _check_listed(name, value)
        if name == "loras":
            _check_loras(value)
        if name == "components":
            _check_components(value)
        if name in GIVEN or facts.get("names_files"):
            _check_files(name, value, may_be_words=name not in GIVEN)
        found[name] = value
    return found


def own_parameters(name: str, value: Any) -> Any:
    """The value of an option; a pipeline's own parameters by name, also where a file has texts.

    Its family takes ``NAME=VALUE`` as a command line has it, in which no path would be seen.

    Raises:
        InputError: a text has another form.
    """
    return PipelineOptions(option=value).option if name == OWN_PARAMETERS else value


def rejected_options(asked: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, ...]:
    """Options of a recorded request that are not used, unless the other request has them too."""
    return tuple(
        f"its {name}={shown(value)} is not taken from a record; give it again: {flag_of(name)}"
        for name, value in asked.items()
        if option_facts(name).get("person_only")
        and name not in other
        and value not in (None, "auto")
    )


def option_facts(name: str) -> Mapping[str, Any]:
    """Metadata of an option; empty if no family has it."""
    kinds: tuple[type[Options], ...] = (Request, *all_options().values())
    for options in kinds:
        if name in options.model_fields:
            return facts_of(options, name)
    return {}


def _check_listed(name: str, value: Any) -> None:
    if value is None or (isinstance(value, str) and all(map(is_listed, value.split(",")))):
        return
    raise InputError(
        f"the video was made with the {name.replace('_', ' ')} {shown(value)}, which is none of "
        f"the known ones; a record may not say where a model is, so name it: {flag_of(name)} "
        "FOLDER or OWNER/NAME"
    )


def _check_files(name: str, value: Any, *, may_be_words: bool, key: str = "") -> None:
    """Raise for a file given by path, at any depth; name and hash are looked up here."""
    if isinstance(value, dict) and "sha256" in value:
        _check_identity(name, value)
    elif isinstance(value, dict) and may_be_words:
        for inner, each in value.items():
            _check_files(name, each, may_be_words=True, key=inner)
    elif isinstance(value, list) and may_be_words:
        for each in value:
            _check_files(name, each, may_be_words=True, key=key)
    elif not may_be_words and value is not None:
        raise InputError(
            f"the record has its {name} as {shown(value)}, and not by name and hash; give it "
            f"again: {flag_of(name)} FILE"
        )
    elif isinstance(value, str) and "prompt" not in key:
        # Expanded as by the reader, from the home folder too.
        named = (os.path.expanduser(each.strip()) for each in (value, *value.split(",")))
        if any(map(os.path.exists, named)):
            raise InputError(
                f"the record names {shown(value)} by its path for {key or name}; a file of a "
                f"record has a hash; give it again: {flag_of(name)}"
            )


class _Loras(BaseModel):
    """LoRAs of a record: files by name and hash."""

    loras: tuple[_RecordedLora, ...]


class _RecordedLora(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    file: dict[str, Any]
    strength: float
    component: str


def _check_loras(value: Any) -> None:
    try:
        _Loras(loras=tuple(value) if isinstance(value, list) else value)
    except ValidationError as error:
        raise InputError(f"the record's loras can't be read: {explain(error)}") from None
    for each in value:
        if "file" not in each["file"]:
            raise InputError("the record has a LoRA without its file's name; give it again: --lora")
        _check_identity("lora", each["file"])


def _check_components(value: Any) -> None:
    if not isinstance(value, dict) or not all(
        isinstance(each, dict) and "file" in each for each in value.values()
    ):
        raise InputError(
            f"the record has its components as {shown(value)}, and not by name and hash; give them "
            "again: --component NAME=FILE"
        )
    for each in value.values():
        _check_identity("component", each)


def _check_identity(name: str, value: Mapping[str, Any]) -> None:
    try:
        found = Identity.model_validate(value)
    except ValidationError as error:
        raise InputError(f"the record's {name} can't be read: {explain(error)}") from None
    # The name comes from an untrusted file: no other folder than this one.
    if found.file is not None and not is_plain_name(found.file):
        raise InputError(
            f"the video was made from the file {found.file!r}, which is no name of a file in this "
            f"folder; give it again by {flag_of(name)} FILE"
        )
