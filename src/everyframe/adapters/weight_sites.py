"""Modules of one component by every name that LoRA files use for them.

`WeightSites` expands the templates of `name_maps` against the parameters that the component has:
diffusers' names, original names, and both with underscores for dots.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from everyframe.adapters.name_maps import NAME_MAPS, Rename
from everyframe.adapters.unet_names import unet_renames
from everyframe.core.errors import closest_names
from everyframe.runtime.components.patchable import WeightTable

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Rows:
    """Rows of an original module that one module of the model holds.

    Attributes:
        pieces: (first, end) of each run of rows, in the module's order.
        total: number of rows of the original module.
    """

    pieces: tuple[tuple[int, int], ...]
    total: int


@dataclass(frozen=True)
class Target:
    """A module of the model, and its rows of the original module; None for all of them in order."""

    module: str
    rows: Rows | None = None


class WeightSites:
    """Finds the modules of a component by the names in a LoRA file.

    Attributes:
        names: modules by dotted name.
    """

    def __init__(
        self,
        table: WeightTable,
        renames: Callable[[Collection[str]], Iterable[Rename]] | None = None,
    ) -> None:
        """With `renames`, only that layout is used; its names win over the module's own."""
        self.table, self._renames = table, renames
        self._parameters: dict[str, dict[str, str]] = {}
        for name in table.shapes:
            module, _, own = name.rpartition(".")
            if own in ("weight", "bias") and module:
                self._parameters.setdefault(module, {})[own] = name
            else:
                self._parameters.setdefault(name, {})[""] = name
        self.names = dict(self._names())
        self._flat: dict[str, set[tuple[Target, ...]]] = {}
        for name, targets in self.names.items():
            self._flat.setdefault(name.replace(".", "_"), set()).add(targets)

    def find(self, name: str, *, is_flat: bool = False) -> tuple[Target, ...] | None:
        """The modules of a name; None if there are none.

        With `is_flat` its dots are underscores. An ambiguous flat name has no modules.
        """
        if not is_flat:
            return self.names.get(name)
        found = self._flat.get(name, set())
        return next(iter(found)) if len(found) == 1 else None

    def parameter(self, module: str, kind: str) -> tuple[str, Shape] | None:
        """Name and shape of a module's ``weight`` or ``bias``; a bare parameter is a weight."""
        own = self._parameters[module]
        name = own.get(kind) or (own.get("") if kind == "weight" else None)
        return None if name is None else (name, self.table.shapes[name])

    def has_like(self, pattern: str) -> bool:
        """Whether a name of any module matches that regular expression."""
        return any(re.fullmatch(pattern, name) for name in self.names)

    def closest(self, name: str) -> str:
        """The module name closest to an unknown one; empty if none is close."""
        close = closest_names(name, self.names)
        return close[0] if close else ""

    def parameters(self, name: str) -> tuple[tuple[str, Shape, Rows | None], ...] | None:
        """Parameters that a tensor of that name holds; None if there are none.

        Each is (name, shape, its rows of the tensor).
        """
        module, _, kind = name.rpartition(".")
        targets = self.names.get(module) if kind in ("weight", "bias") else None
        is_bare = targets is None
        found = []
        for target in self.names.get(name, ()) if targets is None else targets:
            parameter = self.parameter(target.module, "weight" if is_bare else kind)
            if parameter is None or is_bare != (parameter[0] == target.module):
                return None
            found.append((*parameter, target.rows))
        return tuple(found) or None

    def _names(self) -> Iterator[tuple[str, tuple[Target, ...]]]:
        if self._renames is not None:
            for module in self._parameters:
                yield module, (Target(module),)
            for rename in self._renames(self._parameters):
                yield from self._expand(rename)
            return
        own = NAME_MAPS.get(self.table.class_name)
        for rename in own or unet_renames(self._parameters):
            yield from self._expand(rename)
        for module in self._parameters:
            if module.endswith(".to_out.0"):
                yield module.removesuffix(".0"), (Target(module),)
        for module in self._parameters:  # last: a name that the model itself has is that module
            yield module, (Target(module),)

    def _expand(self, rename: Rename) -> Iterator[tuple[str, tuple[Target, ...]]]:
        first = _pattern(rename.targets[0])
        is_one = "*" not in rename.targets[0]
        for module in [rename.targets[0]] if is_one else self._parameters:
            match = first.fullmatch(module)
            if match is None or module not in self._parameters:
                continue
            modules = [_fill(target, match.groups()) for target in rename.targets]
            if all(each in self._parameters for each in modules):
                yield _fill(rename.original, match.groups()), self._targets(modules, rename)

    def _targets(self, modules: list[str], rename: Rename) -> tuple[Target, ...]:
        if len(modules) == 1 and not rename.chunks:
            return (Target(modules[0]),)
        sizes = [self._num_rows(module) for module in modules]
        total = sum(sizes)
        if not rename.chunks:
            ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
            pieces = [((end - size, end),) for size, end in zip(sizes, ends, strict=True)]
            return tuple(
                Target(module, Rows(own, total))
                for module, own in zip(modules, pieces, strict=True)
            )
        step = total // rename.num_chunks
        return tuple(
            Target(module, Rows(tuple((i * step, (i + 1) * step) for i in indices), total))
            for module, indices in zip(modules, rename.chunks, strict=True)
        )

    def _num_rows(self, module: str) -> int:
        found = self.parameter(module, "weight") or self.parameter(module, "bias")
        assert found is not None
        return found[1][0]


def _pattern(template: str) -> re.Pattern[str]:
    text = re.escape(template).replace(r"\*\*", "(.+)").replace(r"\*", r"([^.]+)")
    return re.compile(text)


def _fill(template: str, parts: tuple[str, ...]) -> str:
    left = iter(parts)
    return re.sub(r"\*\*?", lambda _: next(left), template)
