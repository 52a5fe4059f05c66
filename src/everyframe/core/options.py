"""How an option is written down: once, as an annotated pydantic field with unit, limits and help.

`Request` holds the options that every family shares; each family adds its own in its `options.py`
by subclassing `FamilyOptions`. Command line, schema and reference page are composed from both.
Not here: which option a model understands (`families/*/options.py`) and what it then means.
"""

from __future__ import annotations

import os
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

#: The headings under which options stand in help and reference, in order.
GROUPS = ("What", "Size and length", "Sampling", "Given frames", "Machine", "Family")

#: So many letters of a wrong value are told.
_SHOWN = 80


def option(
    help_text: str,
    *,
    group: str,
    default: Any = None,
    unit: str | None = None,
    aliases: tuple[str, ...] = (),
    python_only: bool = False,
    names_files: bool = False,
    names_model: bool = False,
    person_only: bool = False,
    **limits: Any,
) -> Any:
    """A pydantic field that is also an option.

    `help_text` is one sentence; `unit` is printed after the value; `aliases` are further flag names
    (``"--steps"``); `python_only` keeps it off the command line; `names_files` says that the value
    is, or may be, a picture or video that a record keeps by name and hash, `names_model` that it is
    a model or a part of one. `person_only` is for what counts only where a person gives it in this
    call, and never because a file says so. `limits` are pydantic's ``ge``, ``gt``, ``le``, ``lt``,
    ``max_length``.
    """
    assert group in GROUPS, group
    extra: dict[str, Any] = {
        "group": group,
        "unit": unit,
        "aliases": list(aliases),
        "python_only": python_only,
        "names_files": names_files,
        "names_model": names_model,
        "person_only": person_only,
    }
    return Field(default=default, description=help_text, json_schema_extra=extra, **limits)


class Options(BaseModel):
    """Base of everything that is made of options: frozen, strict about names, errors for people."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        allow_inf_nan=False,
        validate_default=False,
    )

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise InputError(explain(error, is_flat=True)) from None

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, given: Any, info: ValidationInfo) -> Any:
        """True is 1 in Python; where a number is asked for it is a slip."""
        assert info.field_name is not None
        kinds = _kinds(cls.model_fields[info.field_name].annotation)
        # numpy's own have a dtype.
        name = str(getattr(given, "dtype", type(given).__name__))
        is_truth = name in ("bool", "bytes")
        if is_truth and bool not in kinds and kinds & {int, float}:
            what = "a number" if float in kinds else "a whole number"
            raise InputError(f"{info.field_name} must be {what}, got {given!r}")
        if info.field_name in _FOR_TOKENIZERS and isinstance(given, str) and _is_no_text(given):
            raise InputError(f"{info.field_name} is not UTF-8 text, got {shown(given)}")
        # What is named by its path may be one.
        return os.fspath(given) if isinstance(given, os.PathLike) and str in kinds else given

    def given(self) -> dict[str, Any]:
        """The options that were set explicitly, in the order of the fields."""
        return {
            name: getattr(self, name)
            for name in type(self).model_fields
            if name in self.model_fields_set
        }


class FamilyOptions(Options):
    """A model family's own options. Subclass it in the family's `options.py`."""

    def check_named(self) -> None:
        """Raise `MediaError` for what they name and is not there; opens nothing."""


#: Options whose text is cut into tokens, which only text can be; names of files may be any bytes.
_FOR_TOKENIZERS = ("prompt", "negative_prompt", "camera_motion", "pos_magic")


def _is_no_text(given: str) -> bool:
    """Whether it holds halves of surrogate pairs: bytes of a command line that are no text."""
    return any("\ud800" <= letter <= "\udfff" for letter in given)


def _kinds(annotation: Any) -> set[Any]:
    """The types in an annotation, those of a union each."""
    return {annotation, *(typing.get_args(annotation))}


def facts_of(model: type[Options], name: str) -> Mapping[str, Any]:
    """The group, unit, aliases and ``python_only`` mark that `option` stored for a field."""
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
    """One line for a person out of a pydantic error: option, what is allowed, what was given.

    `is_flat` says that it is of options, of which each is told once, however many forms it has.
    """
    sentences: dict[str, str] = {}
    for problem in error.errors():
        names = [str(part) for part in problem["loc"] if isinstance(part, str)]
        place = ".".join(names[:1] if is_flat else names)
        ctx: Mapping[str, Any] = typing.cast("Mapping[str, Any]", problem.get("ctx", {}))
        if problem["type"] == "value_error":
            told = str(ctx.get("error", problem["msg"]))
            sentences.setdefault(place if is_flat else told, told)
            continue
        say = _WORDS.get(problem["type"])
        words = say(ctx) if say else problem["msg"][:1].lower() + problem["msg"][1:]
        told = f"{place} {words}, got {shown(problem['input'])}"
        sentences.setdefault(place if is_flat else told, told)
    return "; ".join(dict.fromkeys(sentences.values()))


def shown(given: Any) -> str:
    """What was given, as it is told; the beginning of what is long."""
    text = repr(given)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
