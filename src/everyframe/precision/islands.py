"""Float32 islands: modules of a component that stay in float32 at least, selected by dotted name.

A pattern is a name with shell wildcards. It matches the full dotted name of a module or parameter,
and everything inside the match: ``t_embedder`` covers ``t_embedder.mlp.0.weight``, ``*.wo`` covers
``encoder.block.3.layer.1.DenseReluDense.wo.weight``. Works on names alone, so a plan can count
bytes of weights that were not read.
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


def is_in_island(name: str, islands: Iterable[str]) -> bool:
    """Whether the module or parameter of that dotted name lies in one of the islands."""
    return _is_in(name, tuple(islands))


@lru_cache(maxsize=1 << 15)
def _is_in(name: str, islands: tuple[str, ...]) -> bool:
    """Cached: every plan asks for each parameter, and every dry run at each operation."""
    return any(map(_matcher(islands), _names_around(name)))


def _names_around(name: str) -> Iterator[str]:
    """Yield a name and its prefixes, outermost first: ``a``, ``a.b``, ``a.b.c``."""
    return accumulate(name.split("."), "{}.{}".format)


@lru_cache(maxsize=1024)
def _matcher(islands: tuple[str, ...]) -> Callable[[str], re.Match[str] | None]:
    """Compile patterns into one matcher. A plan asks for thousands of names."""
    # An empty pattern would match everything.
    return re.compile("|".join(map(translate, islands)) or r"(?!)").match


def parameter_dtype(name: str, precision: Precision) -> str:
    """Dtype of the parameter of that dotted name in that precision."""
    if is_in_island(name, precision.islands):
        return island_dtype(precision.parameters)
    return precision.parameters


#: A component is quantized if its weights shrink to this ratio or less.
WORTH = 0.9


def weight_bytes(
    num_elements: Mapping[str, int],
    precision: Precision,
    repairs: Iterable[Repair] = (),
    rows: Mapping[str, int] | None = None,
) -> int:
    """Bytes of all parameters, given the number of elements of each by name.

    `repairs` are the component's repairs, which may widen the modules that they name. `rows` lists
    the weights stored in eight bits, with the number of scales of each.
    """
    raised = [each for each in repairs if each.to != PLAIN]

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


def num_narrow(num_elements: Mapping[str, int], precision: Precision) -> int:
    """Elements of all parameters outside of the islands, given those of each by name."""
    return sum(
        count for name, count in num_elements.items() if not is_in_island(name, precision.islands)
    )


def present(islands: Iterable[str], names: Iterable[str]) -> tuple[str, ...]:
    """Islands that match at least one of these names, each once; model versions differ in some."""
    around = {each for name in names for each in _names_around(name)}
    return tuple(dict.fromkeys(one for one in islands if any(map(_matcher((one,)), around))))


def outside_of(child: str, names: Iterable[str]) -> tuple[str, ...]:
    """Islands of the outermost modules without a module called `child`, given all tensor names.

    Empty if no module is called so. Tensors beside such a module are not in them: they are tables.
    """
    names = tuple(names)
    inside = [name for name in names if child in name.split(".")[:-1]]
    around = {each for name in inside for each in _names_around(name)}
    outside = (
        next((each for each in _names_around(name) if each not in around), name) for name in names
    )
    return tuple(dict.fromkeys(each for each in outside if each not in names)) if inside else ()


def check_islands(islands: Iterable[str], names: Iterable[str]) -> None:
    """Reject island patterns that match no name, as they would protect nothing.

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
