"""Option declarations: annotated pydantic fields with unit, limits and help, each written once.

`Request` holds the options that all families share. Each family adds its own in its `options.py`,
as a subclass of `FamilyOptions`. Command line, schema and reference page are composed from both.
"""

from __future__ import annotations

import os
import re
import sys
import typing
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from everyframe.core.errors import InputError

#: Headings of options in help and reference, in order.
GROUPS = ("What", "Size and length", "Sampling", "Given frames", "Machine", "Family")

#: Characters of a wrong value that a message shows.
_SHOWN = 80


def option(
    help_text: str,
    *,
    group: str = "Family",
    default: Any = None,
    unit: str | None = None,
    aliases: tuple[str, ...] = (),
    python_only: bool = False,
    names_files: bool = False,
    names_model: bool = False,
    names_path: bool = False,
    person_only: bool = False,
    call_only: bool = False,
    accepts: tuple[str, ...] = (),
    **limits: Any,
) -> Any:
    """Declare a pydantic field that is also an option.

    Args:
        help_text: one sentence.
        group: heading in help and reference, one of `GROUPS`; by default a family's own options.
        default: the field's default.
        unit: printed after the value.
        aliases: further flag names, such as ``"--steps"``.
        python_only: the option has no command line flag.
        names_files: the value is or may be an image or video, recorded by name and hash.
        names_model: the value is a model or a component of one.
        names_path: the value is or may be another path; so are the two kinds above.
        person_only: the option counts only if the user sets it in this call, never if a file does.
        call_only: the option belongs to one call; no configuration sets it.
        accepts: types that Python callers may give beside the field's own, as source text.
        limits: pydantic's ``ge``, ``gt``, ``le``, ``lt``, ``max_length``.
    """
    assert group in GROUPS, group
    extra: dict[str, Any] = {
        "group": group,
        "unit": unit,
        "aliases": list(aliases),
        "python_only": python_only,
        "names_files": names_files,
        "names_model": names_model,
        "names_path": names_path or names_files or names_model or "PathLike[str]" in accepts,
        "person_only": person_only,
        "call_only": call_only,
        "accepts": [*accepts, *(["PathLike[str]"] if names_model else [])],
    }
    return Field(default=default, description=help_text, json_schema_extra=extra, **limits)


class Options(BaseModel):
    """Base of all option models: frozen, unknown names are errors, messages are for users."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        allow_inf_nan=False,
        validate_default=False,
    )

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise InputError(explain(error, is_flat=True)) from None

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, given: Any, info: ValidationInfo) -> Any:
        """Refuse a boolean for a number: True equals 1 in Python, and here it is a slip."""
        assert info.field_name is not None
        annotation = cls.model_fields[info.field_name].annotation
        kinds = {annotation, *typing.get_args(annotation)}
        # numpy's own have a dtype.
        name = str(getattr(given, "dtype", type(given).__name__))
        is_truth = name in ("bool", "bytes")
        if is_truth and bool not in kinds and kinds & {int, float}:
            what = "a number" if float in kinds else "a whole number"
            raise InputError(f"{info.field_name} must be {what}, got {given!r}")
        if info.field_name in _FOR_TOKENIZERS and isinstance(given, str) and _is_no_text(given):
            raise InputError(f"{info.field_name} is not UTF-8 text, got {shown(given)}{_as_read()}")
        # What is named by its path may be one.
        return os.fspath(given) if isinstance(given, os.PathLike) and str in kinds else given

    def given(self) -> dict[str, Any]:
        """Options that were set explicitly, in the order of the fields."""
        return {
            name: getattr(self, name)
            for name in type(self).model_fields
            if name in self.model_fields_set
        }


def _as_read() -> str:
    """What to do where Python reads the words of a command line in another encoding."""
    encoding = sys.getfilesystemencoding()
    if encoding == "utf-8":
        return ""
    return f"; Python reads it as {encoding} here: export PYTHONUTF8=1 first"


class FamilyOptions(Options):
    """Options of one model family. Subclass it in the family's `options.py`."""

    def check_named(self) -> None:
        """Raise `MediaError` for a missing file that an option names; opens nothing."""


#: Options that a tokenizer reads, which must be valid text; file names may hold any bytes.
_FOR_TOKENIZERS = ("prompt", "negative_prompt", "camera_motion", "pos_magic")


def _is_no_text(given: str) -> bool:
    """Whether the string holds unpaired surrogates: command line bytes that are not text."""
    return any("\ud800" <= letter <= "\udfff" for letter in given)


def facts_of(model: type[Options], name: str) -> Mapping[str, Any]:
    """Group, unit, aliases, marks and accepted types that `option` stored for a field."""
    extra = model.model_fields[name].json_schema_extra
    return extra if isinstance(extra, Mapping) else {}


_WORDS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "greater_than": lambda ctx: f"must be more than {ctx['gt']:g}",
    "greater_than_equal": lambda ctx: f"must be at least {ctx['ge']:g}",
    "less_than": lambda ctx: f"must be less than {ctx['lt']:g}",
    "less_than_equal": lambda ctx: f"must be at most {ctx['le']:.16g}",
    "finite_number": lambda ctx: "must be a finite number",
    "int_parsing": lambda ctx: "must be a whole number",
    "int_type": lambda ctx: "must be a whole number",
    "int_from_float": lambda ctx: "must be a whole number",
    "int_parsing_size": lambda ctx: "must be a whole number of fewer digits",
    "bool_type": lambda ctx: "must be true or false",
    "bool_parsing": lambda ctx: "must be true or false",
    "float_parsing": lambda ctx: "must be a number",
    "float_type": lambda ctx: "must be a number",
    "string_type": lambda ctx: "must be text",
    "extra_forbidden": lambda ctx: "is no option",
    "literal_error": lambda ctx: f"must be {ctx['expected']}",
}


def explain(error: ValidationError, *, is_flat: bool = False) -> str:
    """Turn a pydantic error into one line for the user: option, allowed values, given value.

    With `is_flat` the error is about options, and each option appears once, whatever the number of
    its alternatives.
    """
    sentences: dict[str, str] = {}
    for problem in error.errors():
        names = [str(part) for part in problem["loc"] if isinstance(part, str)]
        place = ".".join(names[:1] if is_flat else names)
        ctx: Mapping[str, Any] = typing.cast("Mapping[str, Any]", problem.get("ctx", {}))
        if problem["type"] == "value_error":
            sentence = str(ctx.get("error", problem["msg"]))
            sentences.setdefault(place if is_flat else sentence, sentence)
            continue
        say = _WORDS.get(problem["type"])
        words = say(ctx) if say else problem["msg"][:1].lower() + problem["msg"][1:]
        sentence = f"{place} {words}, got {shown(problem['input'])}"
        sentences.setdefault(place if is_flat else sentence, sentence)
    return "; ".join(dict.fromkeys(sentences.values()))


def flag_of(name: str) -> str:
    """The command line's flag of an option."""
    return f"--{name.replace('_', '-')}"


def shown(given: Any) -> str:
    """A given value for an error message: in one line, as arrays are not, and shortened if long."""
    text = re.sub(r"\s*\n\s*", " ", repr(given))
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
