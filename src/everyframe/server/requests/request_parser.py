"""Request parser: a body's fields become options of a `Request`, with files in the data folder.

It imports no torch. Checks that need the model's config are made by the plan.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from everyframe.core.errors import InputError, did_you_mean
from everyframe.core.option_values import replaced_by
from everyframe.core.options import shown
from everyframe.core.request import Request
from everyframe.server.data_folder import MEDIA
from everyframe.server.errors import ApiError, api_error
from everyframe.server.requests.body import Body
from everyframe.server.requests.client_fields import (
    FORMATS,
    MERGED,
    NOTED,
    OTHER_NAMES,
    PEERS_QUALITIES,
    PIPELINE_FIELDS,
)
from everyframe.server.requests.client_options import client_options, option_owners, refused_fields
from everyframe.server.requests.media_inputs import StoredMedia
from everyframe.server.requests.models import LoraRegistry, ModelRegistry, RegisteredModel
from everyframe.server.settings import Limits

#: Reads what a field says of a picture or video: (field, kind, value) to a stored file.
MediaReader = Callable[[str, str, Any], StoredMedia]

#: Fields for which files are read or written, or which may hold such fields.
_SLOW = frozenset({*MEDIA, *MERGED, "loras"})


@dataclass(frozen=True)
class ParsedBody:
    """A parsed body.

    Attributes:
        options: options of the `Request` by name, as JSON data, files relative to the data folder.
        model: the model that it names, or the default.
        warnings: notes on fields without effect.
        shapes: `StoredMedia.shape` of each picture or video, by option.
    """

    options: dict[str, Any]
    model: RegisteredModel
    warnings: tuple[str, ...] = ()
    shapes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RequestParser:
    """Parse bodies for one server."""

    models: ModelRegistry
    loras: LoraRegistry
    limits: Limits
    read_media: MediaReader

    def is_quick(self, body: Body) -> bool:
        """Whether `parse` uses no files and takes at most a few milliseconds.

        It may then run in the event loop, as a switch to a thread costs as much as the parsing.
        """
        return body.is_small and not any(OTHER_NAMES.get(n, n) in _SLOW for n in body.fields)

    def parse(self, body: Body, base: Mapping[str, Any] | None = None) -> ParsedBody:
        """Parse a body, on top of the options `base` of an earlier request if given.

        Raises:
            ApiError: a field is unknown, refused or wrong.
        """
        values, warnings = self._rename_fields(body)
        _check_format(values.pop("output_format", None))
        shapes: dict[str, str] = {}
        for name in [*MEDIA]:
            if name in values and not _is_word(name, values[name]):
                stored = self.read_media(name, MEDIA[name], values[name])
                values[name], shapes[name] = stored.file, stored.shape
        if "loras" in values:
            values["loras"] = self.loras.parse(values["loras"])
        elif base is not None:
            self.loras.check_served(base.get("loras", ()))
        model = self.models.default
        if "model" in values:
            model = self.models.get(str(values["model"]))
            values["model"] = model.target
        elif base is not None:
            model = self.models.of_request(base)
        _give_to_pipeline(values, model)
        if base is not None:
            gone = replaced_by(values)
            values = {**{k: v for k, v in base.items() if k not in gone}, **values}
        if model is not self.models.default or not model.is_embedded:
            # Without a name the embedded model refuses what it can't draw.
            values["model"] = model.target
        self._check(values)
        return ParsedBody(values, model, tuple(warnings), shapes)

    def _rename_fields(self, body: Body) -> tuple[dict[str, Any], list[str]]:
        """Values by our names, and notes on fields without effect."""
        given: dict[str, Any] = {}
        for name, value in {**body.fields, **body.files}.items():
            if name in MERGED:
                given |= _object(name, value)
            else:
                given[name] = value
        values: dict[str, Any] = {}
        warnings: list[str] = []
        for name, value in given.items():
            own = OTHER_NAMES.get(name, name)
            if name in NOTED and not _is_budget(name, value):
                warnings.append(_note(name, NOTED[name]))
                continue
            _check_name(name, own)
            if isinstance(value, bytes) and own not in MEDIA:
                raise ApiError("invalid_value", f"{name} must be text, and not a file", name)
            if value is None or (value == "" and own in MEDIA):
                continue
            if own in values:
                raise ApiError("invalid_value", f"{name} and {own} are the same; give one", name)
            is_json = own == "option" and isinstance(value, str) and value.startswith("{")
            values[own] = _object(name, value) if is_json else value
        return values, warnings

    def _check(self, values: Mapping[str, Any]) -> None:
        for name in ("prompt", "negative_prompt"):
            text = values.get(name)
            if isinstance(text, str) and len(text) > self.limits.prompt_letters:
                raise ApiError(
                    "invalid_value",
                    f"{name} has {len(text)} letters, at most {self.limits.prompt_letters} are "
                    "read",
                    name,
                )
        if isinstance(values.get("prompt"), str) and not values["prompt"].strip():
            raise ApiError("invalid_value", "prompt is empty; say what the video shows", "prompt")
        _refuse_unstorable(values)
        _refuse_file_names(request_of(values).family_options.get("option"))


def _refuse_unstorable(values: Mapping[str, Any]) -> None:
    """Raise `ApiError` for values that the queue can't store: lone surrogates, NaN, infinity."""
    for name, value in values.items():
        try:
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except UnicodeEncodeError:
            text = f"{name} is not UTF-8 text, got {shown(value)}"
            raise ApiError("invalid_value", text, name) from None
        except ValueError:
            text = f"{name} must have finite numbers, got {shown(value)}"
            raise ApiError("invalid_value", text, name) from None


def request_of(values: Mapping[str, Any]) -> Request:
    """The request of JSON data; each option is checked by its own field.

    Raises:
        ApiError: a value is wrong.
    """
    owners = option_owners()
    try:
        request = Request(**values)
        typed = {
            name: getattr(owners[name](**{name: value}), name)
            for name, value in request.family_options.items()
        }
        return request.model_copy(update={"family_options": typed}) if typed else request
    except InputError as error:
        raise api_error(error, owners) from None


@cache
def _known_names() -> Mapping[str, None]:
    """Names of the fields of a body, beside `OTHER_NAMES`."""
    return dict.fromkeys([*client_options(), *PIPELINE_FIELDS, "output_format"])


def _check_name(name: str, own: str) -> None:
    """Raise `ApiError` for a refused or unknown field."""
    refused = refused_fields()
    for each in (name, own):
        if each in refused:
            raise ApiError("not_supported", f"{name} can't be set here: {refused[each]}", name)
    if own not in _known_names():
        hint = did_you_mean(name, [*_known_names(), *OTHER_NAMES])
        raise ApiError("unknown_parameter", f"there is no field {name[:80]!r}{hint}", name[:80])


def _check_format(given: Any) -> None:
    if given is not None and str(given).lower() not in FORMATS:
        text = f"output_format must be {' or '.join(FORMATS)}, got {shown(given)}"
        raise ApiError("not_supported", text, "output_format")


def _give_to_pipeline(values: dict[str, Any], model: RegisteredModel) -> None:
    """Move other servers' fields for pipeline parameters into `option`."""
    for name in PIPELINE_FIELDS:
        if name not in values:
            continue
        if model.family not in (None, "pipeline"):
            text = f"{name} is a parameter of diffusers pipelines; {model.name} has none"
            raise ApiError("not_supported", text, name)
        value = values.pop(name)
        option = values.get("option") or {}
        number = json.loads(value) if isinstance(value, str) and _is_number(value) else value
        values["option"] = {**option, name: number}


def _is_number(text: str) -> bool:
    return re.fullmatch(r"-?\d{1,9}(\.\d{1,9})?", text) is not None


def _is_budget(name: str, value: Any) -> bool:
    """Whether this is a quality budget of ours, not a word of another server."""
    return name == "quality" and str(value).lower() not in PEERS_QUALITIES


def _note(name: str, why: str) -> str:
    return f"{name} changes nothing here" + (f": {why}" if why else "")


def _object(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, (str, bytes)):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ApiError("invalid_value", f"{name} must be a JSON object", name) from None
    if not isinstance(value, dict):
        raise ApiError("invalid_value", f"{name} must be a JSON object", name)
    return value


def _is_word(name: str, value: Any) -> bool:
    """Whether a media field holds a word and no file: a mask's box, a computed control."""
    from everyframe.families.inpaint.options import is_box, is_built_in

    if name == "mask":
        return isinstance(value, str) and is_box(value)
    return name == "control" and is_built_in(value)


def _refuse_file_names(given: Any) -> None:
    """Raise `ApiError` for a text in a pipeline's own parameters that could name a file."""
    if isinstance(given, Mapping):
        for value in given.values():
            _refuse_file_names(value)
    elif isinstance(given, (list, tuple)):
        for value in given:
            _refuse_file_names(value)
    elif isinstance(given, str):
        # Without a separator it could still be a file where the server was started.
        if set("/\\~.") & set(given) or os.path.lexists(given):
            raise ApiError(
                "not_supported",
                f"option: {shown(given)} could name a file; clients do not name paths of the "
                "server",
                "option",
            )
