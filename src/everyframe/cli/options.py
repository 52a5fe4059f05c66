"""Build command line flags from the annotated fields of `Request` and the families' options.

Flags that only the command line has (``--output``, ``--json``, …) are defined here. Values are
passed as text; the fields convert and validate them, so Python and the command line give the same
error messages. `everyframe.core.options` defines options.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter

from everyframe.core.options import GROUPS, Options, facts_of
from everyframe.core.request import Request
from everyframe.families.registry import all_options

#: Flags that don't affect the video: output location and reporting.
RUN_FLAGS: Mapping[str, tuple[str, type, str]] = {
    "output": (
        "-o",
        Path,
        "Output: .mp4, .gif, .webp, .png, or a folder of frames; by default a new name here.",
    ),
    "from_record": (
        "--from",
        Path,
        "Make a video again from its record: the video or its sidecar.",
    ),
    "json": ("", bool, "Events as lines of JSON on standard output."),
    "dry_run": ("", bool, "Show the plan, and stop."),
    "as_profile": (
        "--as",
        str,
        "Plan for a machine that is not here: a profile's name, or a file of facts.",
    ),
    "run_dir": (
        "",
        Path,
        "Save the run in this folder for `everyframe resume`; off saves nothing.",
    ),
    "log_level": ("", str, "debug, info, warning or error; also EVERYFRAME_LOG."),
}

_RUN = Group("Output and run", sort_key=len(GROUPS) + 100)


def make_command(
    function: Callable[..., int],
    flags: Sequence[str],
    help_text: str,
    own: Sequence[inspect.Parameter] = (),
    *,
    without: Sequence[str] = (),
) -> Callable[..., int]:
    """Turn `function` into a command with every option of a request and `flags` of `RUN_FLAGS`.

    `own` are its additional parameters, and `without` names options that it does not take.
    """
    asked = [each for each in _request_parameters() if each.name not in without]
    if any(each.kind is inspect.Parameter.POSITIONAL_ONLY for each in own):
        # Their place is that of the prompt, which has its flag.
        asked = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in asked]
    parameters = sorted([*asked, *own], key=lambda each: each.kind)
    parameters += [run_flag(name) for name in flags]
    return command(function, parameters, help_text)


def command(
    function: Callable[..., int], parameters: Sequence[inspect.Parameter], help_text: str
) -> Callable[..., int]:
    """Turn `function` into a command with these parameters; it receives the given ones by name."""

    def call(**given: Any) -> int:
        return function(**given)

    described: Any = call
    described.__doc__ = help_text
    described.__signature__ = inspect.Signature(list(parameters))
    described.is_command = True
    return call


def flag(
    name: str,
    kind: type,
    help_text: str,
    *,
    alias: str = "",
    group: Group | None = None,
    word: str | None = None,
) -> inspect.Parameter:
    """A flag of the command line only. An `alias` with two dashes replaces the name.

    `word` stands for its value in help.
    """
    is_name = alias.startswith("--")
    aliases = (alias,) if alias and not is_name else ()
    written = alias if is_name else None
    return _parameter(name, kind, None, help_text, aliases, group or _RUN, written, word)


def positional(name: str, help_text: str) -> inspect.Parameter:
    """A required positional argument."""
    annotation = typing.cast(Any, Annotated)[str, Parameter(help=help_text)]
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY, annotation=annotation)


def optional(name: str, help_text: str) -> inspect.Parameter:
    """An optional positional argument."""
    annotation = typing.cast(Any, Annotated)[str | None, Parameter(help=help_text)]
    kind = inspect.Parameter.POSITIONAL_ONLY
    return inspect.Parameter(name, kind, default=None, annotation=annotation)


def several(name: str, help_text: str) -> inspect.Parameter:
    """Any number of positional arguments, which a command takes as one sequence."""
    annotation = typing.cast(Any, Annotated)[str, Parameter(help=help_text)]
    return inspect.Parameter(name, inspect.Parameter.VAR_POSITIONAL, annotation=annotation)


def request_flag(name: str) -> inspect.Parameter:
    """The flag of one request option, for commands that take few of them."""
    return _from_field(Request, name, _RUN)


def run_flag(name: str) -> inspect.Parameter:
    """One of `RUN_FLAGS`."""
    alias, kind, help_text = RUN_FLAGS[name]
    return flag(name, kind, help_text, alias=alias)


def _request_parameters() -> typing.Iterator[inspect.Parameter]:
    groups = {name: Group(name, sort_key=place) for place, name in enumerate(GROUPS)}
    for name in Request.model_fields:
        if not facts_of(Request, name)["python_only"]:
            yield _from_field(Request, name, groups[facts_of(Request, name)["group"]])
    seen = set(Request.model_fields)
    for place, (family, options) in enumerate(all_options().items()):
        group = Group(f"Only {family} models", sort_key=len(GROUPS) + place)
        for name in options.model_fields:
            # Two families may know the same option; it is one flag.
            if name not in seen and not facts_of(options, name)["python_only"]:
                yield _from_field(options, name, group)
            seen.add(name)


def _from_field(options: type[Options], name: str, group: Group) -> inspect.Parameter:
    field, facts = options.model_fields[name], facts_of(options, name)
    text = (field.description or "").rstrip(".")
    if facts["unit"]:
        text += f", in {facts['unit']}"
    kinds = [kind for kind in typing.get_args(field.annotation) if kind is not type(None)]
    kind: Any = kinds[0] if kinds else field.annotation
    if typing.get_origin(field.annotation) in (dict, tuple):
        kind = list  # several times
    word = None
    if typing.get_origin(field.annotation) is tuple:
        word = "NAME" if kinds[0] is str else "FILE"
    if facts["names_model"]:
        word = "MODEL"
    # What Python takes as a path, an array, a picture or a model is a file here.
    kind = Path if kind is Any or facts["names_model"] else kind
    return _parameter(
        name, kind, field.default, f"{text}.", tuple(facts["aliases"]), group, word=word
    )


def _parameter(
    name: str,
    kind: Any,
    default: Any,
    help_text: str,
    aliases: tuple[str, ...],
    group: Group,
    written: str | None = None,
    word: str | None = None,
) -> inspect.Parameter:
    # Text, whatever the option's type: its own field converts it and words the error. A path is one
    # for the completion of shells alone.
    taken: Any = {bool: bool, list: list[str] | None, Path: Path | None}.get(kind, str | None)
    how = Parameter(
        name=written,
        help=help_text,
        alias=aliases,
        group=group,
        converter=_text_of if kind is Path else None,
        show_default=default is not None and kind not in (bool, list),
        **_help_placeholder(kind, word, is_on=default is True),
    )
    is_prompt = name == "prompt"
    place = inspect.Parameter.POSITIONAL_OR_KEYWORD if is_prompt else inspect.Parameter.KEYWORD_ONLY
    annotation = typing.cast(Any, Annotated)[taken, how]
    if kind is list:
        default = None
    elif default is not None or kind is bool:
        default = bool(default) if kind is bool else str(default)
    return inspect.Parameter(name, place, default=default, annotation=annotation)


def _text_of(_: Any, tokens: Sequence[Any]) -> str:
    """The value as it was typed."""
    return str(tokens[0].value)


def _help_placeholder(kind: Any, word: str | None, *, is_on: bool) -> dict[str, Any]:
    """Placeholder of the value in help, if cyclopts supports it; ``--no-`` for what is on alone."""
    opposites: dict[str, Any] = {"negative": ()} if kind in (bool, list) and not is_on else {}
    words = {int: "N", float: "X", Path: "FILE", list: "NAME=VALUE"}
    known = kind is not bool and "metavar" in inspect.signature(Parameter).parameters
    return {**opposites, **({"metavar": word or words.get(kind, "TEXT")} if known else {})}
