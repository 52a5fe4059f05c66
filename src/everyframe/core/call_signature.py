"""Signatures of Python functions with options: each option with its type and default.

`inspect.signature`, `help` and notebooks read them. `docs/generate.py` writes the same signatures
to `everyframe/__init__.pyi`, for editors and type checkers.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, get_args

from everyframe.core.options import Options, facts_of

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

#: Type of a field -> what a caller may pass: any container for a collecting option.
_WIDER = (
    (re.compile(r"tuple\[(\w+), \.\.\.\]"), r"Sequence[\1]"),
    (re.compile(r"\bdict\["), "Mapping["),
)


def with_options(
    models: Iterable[type[Options]],
    *,
    only: Iterable[str] | None = None,
    is_open: bool = False,
    **types: str,
) -> Callable[[FunctionT], FunctionT]:
    """Decorator: give a function's signature the options of `models` in place of its ``**options``.

    Args:
        models: an option that several have appears once; one that the function declares, never.
        only: the names of the options; by default all.
        is_open: whether the function accepts other names too, and so keeps its ``**options``.
        types: types of single options, where this function accepts others.
    """

    def decorate(function: FunctionT) -> FunctionT:
        own = inspect.signature(function)
        *declared, rest = own.parameters.values()
        taken = {each.name for each in declared} | {"family_options"}
        for model in models:
            for name, field in model.model_fields.items():
                if name not in taken and (only is None or name in only):
                    taken.add(name)
                    kind, text = inspect.Parameter.KEYWORD_ONLY, types.get(name)
                    text = text or accepted_type(model, name)
                    declared.append(
                        inspect.Parameter(name, kind, default=field.default, annotation=text)
                    )
        described: Any = function
        described.__signature__ = own.replace(parameters=[*declared, *([rest] if is_open else [])])
        return function

    return decorate


def accepted_type(model: type[Options], name: str) -> str:
    """Type of the values that Python callers may give for an option, as source text."""
    annotation = model.model_fields[name].annotation
    if annotation is Any:
        return "Any"
    text = str(annotation)
    # Python 3.10 counts `tuple[str, ...]` as a type.
    if isinstance(annotation, type) and not get_args(annotation):
        text = annotation.__name__
    text = re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", text)
    for pattern, wider in _WIDER:
        text = pattern.sub(wider, text)
    own = text.removesuffix(" | None")
    return " | ".join([own, *facts_of(model, name)["accepts"]]) + text[len(own) :]
