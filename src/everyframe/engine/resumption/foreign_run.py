"""Resume a run that this user's Everyframe did not write: what it asks for must be named again.

The maker of a run folder chose the paths in it. Files inside the folder are used. Files outside
(inputs, LoRAs, local models, output, report) must be named again: the person who resumes may have
access that the maker lacks. `everyframe.runs.signature` tells whose a folder is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import wraps
from types import NoneType
from typing import Any, Concatenate, ParamSpec

from everyframe.checkpoints.locate import is_listed
from everyframe.core.errors import CorruptRunError, EveryframeError, InputError
from everyframe.core.events import Events
from everyframe.core.field_types import mistyped
from everyframe.core.lora import Lora
from everyframe.core.options import Options, shown
from everyframe.core.paths import split_paths
from everyframe.core.plan import Plan
from everyframe.core.request import Request
from everyframe.core.serialization import from_jsonable
from everyframe.engine.records.record_schema import (
    GIVEN,
    OWN_PARAMETERS,
    check_record,
    option_facts,
    own_parameters,
)
from everyframe.engine.records.recorded_request import threads_to_repeat
from everyframe.runs.checksummed_json import UNREADABLE
from everyframe.runs.folder import RunFolder

_Given = ParamSpec("_Given")

#: Types of what is written beside request and plan.
_KINDS: Mapping[str, Any] = {
    "place": str, "output": (str, NoneType), "as_uint8": bool, "given": (dict, NoneType),
    "record": dict,
}  # fmt: skip


def check_named(folder: RunFolder, named: Collection[str], output: str | None = None) -> bool:
    """Check what a run asks for outside of its folder; return whether it is this user's own.

    `named` are options that the person gives again; `output` is the output that the run asks for.

    Raises:
        InputError: another's run asks for what was not named again, or for too many threads.
        CorruptRunError: it can't be read.
    """
    if folder.is_own():
        return True
    request, plan = _read(folder)
    asked = {**({} if output is None else {"output": output}), **asked_outside(request)}
    missing = [_flag(name, value) for name, value in asked.items() if name not in named]
    if missing:
        raise InputError(
            f"the run {folder.name} was made by somebody else, on another machine, or changed "
            "since: what it asks for outside of its folder is used once you name it again (in "
            "Python as image=FILE): " + ", ".join(missing)
        )
    if threads_to_repeat({"plan": {"num_threads": plan.num_threads}}) is None:
        raise InputError(
            f"the run {folder.name} is by somebody else and asks for {shown(plan.num_threads)} CPU "
            "threads, which this machine can't bear"
        )
    return False


def _read(folder: RunFolder) -> tuple[Request, Plan]:
    """Request and plan, after a check of the types of all that a run folder says.

    Raises:
        CorruptRunError: a value is missing or of another type.
        InputError: the record is malformed.
    """
    written = folder.run()
    wrong = [name for name, kinds in _KINDS.items() if not isinstance(written.get(name), kinds)]
    try:
        request, plan = (from_jsonable(written.get(n), lambda _: None) for n in ("request", "plan"))
        wrong += [] if isinstance(request, Request) else ["request"]
        wrong += mistyped(plan, "plan") if isinstance(plan, Plan) else ["plan"]
    except UNREADABLE as error:
        raise CorruptRunError(f"{folder.path} can't be read: {error!r}") from error
    if wrong:
        raise CorruptRunError(f"{folder.path} is no run: its {wrong[0]} is missing or wrong")
    check_record(written["record"])
    return request, plan


def explain_errors(
    resumed: Callable[Concatenate[RunFolder, _Given], Events],
) -> Callable[Concatenate[RunFolder, _Given], Events]:
    """Decorator: what a stranger's values break, wherever they get to, is its folder's error."""

    @wraps(resumed)
    def explained(folder: RunFolder, /, *args: _Given.args, **kwargs: _Given.kwargs) -> Events:
        try:
            yield from resumed(folder, *args, **kwargs)
        except UNREADABLE as error:
            began_here = kwargs.get("named", ()) is None
            if isinstance(error, EveryframeError) or began_here or folder.is_own():
                raise
            raise CorruptRunError(
                f"the run {folder.name} was made by somebody else and cannot be resumed: "
                f"{type(error).__name__}: {' '.join(str(error).split())}"
            ) from error

    return explained


def asked_outside(request: Request) -> dict[str, Any]:
    """What a request asks for by its place on this machine, by option name."""
    found = {name: getattr(request, name) for name in GIVEN if _is_file(getattr(request, name))}
    if request.report is not None:
        found["report"] = request.report
    if request.loras:
        found["loras"] = [str(lora) for lora in request.loras]
    if request.components:
        found["components"] = dict(request.components)
    for name, value in {"model": request.model, **request.family_options}.items():
        facts = option_facts(name)
        if name == OWN_PARAMETERS:
            own = own_parameters(name, value)
            found |= {key: each for key, each in own.items() if any(map(_exists, _texts(each)))}
        elif facts.get("names_model"):
            names = [each for text in _texts(value) for each in text.split(",")]
            found |= {} if all(map(is_listed, names)) else {name: value}
        elif any(map(_exists, _texts(value))):
            found[name] = value
    return found


def with_named(request: Request, named: Mapping[str, Any]) -> Request:
    """The request with options that were named again.

    Raises:
        InputError: the run has no such option.
    """
    if not named:
        return request
    values, own = dict(request.given()), dict(request.family_options)
    parameters = dict(own_parameters(OWN_PARAMETERS, own.get(OWN_PARAMETERS, {})))
    for name, value in named.items():
        place = next((each for each in (values, own, parameters) if name in each), None)
        if place is None:
            can = sorted(asked_outside(request)) or ["no file"]
            raise InputError(f"the run names {', '.join(can)} outside of its folder, and no {name}")
        place[name] = value
    own |= {OWN_PARAMETERS: parameters} if parameters else {}
    return Request(**{**values, "family_options": own})


def find_here(named: Mapping[str, Any]) -> dict[str, Any]:
    """Named options with absolute paths of what exists in this folder: a run works where it began.

    Raises:
        InputError: a value is of another kind than the option takes.
    """
    ours = Request(**{k: v for k, v in named.items() if k in Request.model_fields}).given()
    return {
        name: value if "prompt" in name else _absolute(value)
        for name, value in {**named, **ours}.items()
    }


def _absolute(value: Any) -> Any:
    """The value with absolute paths, at any depth; several may stand with commas between."""
    if isinstance(value, Mapping):
        return {key: _absolute(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_absolute(each) for each in value)
    if isinstance(value, Lora):
        return replace(value, file=os.path.abspath(value.path)) if value.path.exists() else value
    if not isinstance(value, (str, os.PathLike)):
        return value
    parts = [os.path.expanduser(each) for each in split_paths(os.fspath(value))]
    if any(map(is_listed, parts)) or not all(map(os.path.exists, parts)):
        return value
    return ",".join(map(os.path.abspath, parts))


def without_decoder(request: Request, plan: Plan) -> tuple[Request, Plan]:
    """A request and plan without the decoder of previews: a file that only a person names.

    The video is the same; a run whose previews it made has none.
    """
    if plan.preview is not None and plan.preview.decoder is not None:
        plan = replace(plan, preview=None)
    given = request.given()
    return Request(**{k: v for k, v in given.items() if k != "preview_decoder"}), plan


def _flag(name: str, value: Any) -> str:
    """How that option is named again, and what it was."""
    flags = {
        "output": "--output PLACE", "model": "--model FOLDER",
        "loras": '--option loras=\'["FILE:STRENGTH"]\'',
        "components": '--option components=\'{"NAME": "FILE"}\'',
    }  # fmt: skip
    return f"{flags.get(name, f'--option {name}=FILE')} (it was {shown(value)})"


def _is_file(value: Any) -> bool:
    """Whether a given picture or video is named by its file, or holds the name of one."""
    if isinstance(value, (list, tuple)):
        return any(map(_is_file, value))
    return isinstance(value, (str, os.PathLike)) or any(map(_exists, _texts(value)))


def _exists(text: str) -> bool:
    """Whether the text names something on this machine, alone or among several with commas."""
    return any(
        os.path.exists(os.path.expanduser(each.strip())) for each in (text, *text.split(","))
    )


def _texts(value: Any) -> Iterator[str]:
    """All text and paths in a value, at any depth."""
    if isinstance(value, (str, os.PathLike)):
        yield os.fspath(value)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, Options):
        yield from _texts(value.given())
    elif is_dataclass(value):
        for field in fields(value):
            yield from _texts(getattr(value, field.name))
