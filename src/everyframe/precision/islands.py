"""Islands: the parts of a component that stay in float32 at least, by their dotted names.

A pattern is a name with shell wildcards. It matches a module or a parameter by the full dotted
name, and everything inside of what it matches: ``t_embedder`` holds ``t_embedder.mlp.0.weight``,
``*.wo`` holds ``encoder.block.3.layer.1.DenseReluDense.wo.weight``. Works on names alone, so that a
plan can tell the bytes of weights that nobody has read. Read next:
`everyframe.precision.cast_hooks`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import translate
from functools import lru_cache
from itertools import accumulate

from everyframe.core.errors import InputError
from everyframe.core.plan import PLAIN, Precision, Repair
from everyframe.precision.dtypes import island_dtype, num_bytes


def in_island(name: str, islands: Iterable[str]) -> bool:
    """Whether the module or parameter of that dotted name lies in one of the islands."""
    return _is_in(name, tuple(islands))


@lru_cache(maxsize=1 << 15)
def _is_in(name: str, islands: tuple[str, ...]) -> bool:
    """Asked of each parameter by each plan, and at each operation by each dry run."""
    return any(map(_matcher(islands), _names_around(name)))


def _names_around(name: str) -> Iterator[str]:
    """Those of all that it lies in, outermost first, and its own: ``a``, ``a.b``, ``a.b.c``."""
    return accumulate(name.split("."), "{}.{}".format)


@lru_cache(maxsize=1024)
def _matcher(islands: tuple[str, ...]) -> Callable[[str], re.Match[str] | None]:
    """Says whether one of these patterns is one for a name. A plan asks for thousands of names."""
    # No islands hold nothing, where no alternatives would match anything.
    return re.compile("|".join(map(translate, islands)) or r"(?!)").match


def parameter_dtype(name: str, precision: Precision) -> str:
    """The dtype that the parameter of that dotted name has in that precision."""
    if in_island(name, precision.islands):
        return island_dtype(precision.parameters)
    return precision.parameters


def weight_bytes(
    num_elements: Mapping[str, int],
    precision: Precision,
    remedies: Iterable[Repair] = (),
    rows: Mapping[str, int] | None = None,
) -> int:
    """Bytes of all parameters, from the number of elements of each by name.

    `remedies` are those of the component: what they name may be wider. `rows` are the weights that
    are kept in eight bits, each with its number of scales.
    """
    raised = [each for each in remedies if each.to != PLAIN]

    def width(name: str) -> int:
        own = num_bytes(parameter_dtype(name, precision))
        inside = (
            each for each in raised if f"{name}.".startswith(each.module and f"{each.module}.")
        )
        return max([own, *(num_bytes(each.to) for each in inside)])

    scales = rows or {}
    return sum(
        count + scales[name] * width(name) if name in scales else count * width(name)
        for name, count in num_elements.items()
    )


def present(islands: Iterable[str], names: Iterable[str]) -> tuple[str, ...]:
    """Those of the islands that hold any of these names, each once: versions differ in some."""
    around = {each for name in names for each in _names_around(name)}
    return tuple(dict.fromkeys(one for one in islands if any(map(_matcher((one,)), around))))


def check_islands(islands: Iterable[str], names: Iterable[str]) -> None:
    """Refuse a pattern that holds none of those names: an island that isn't there protects nothing.

    Raises:
        InputError: names the pattern.
    """
    patterns, every_name = list(islands), list(names)
    found = present(patterns, every_name)
    for pattern in patterns:
        if pattern not in found:
            raise InputError(
                f"float32 island {pattern!r} matches no part of this module; a pattern is a dotted "
                f"name with wildcards, such as {_example(every_name)!r}"
            )


def _example(names: list[str]) -> str:
    return names[0].rpartition(".")[0] or names[0] if names else "*.norm"
