"""A model's parts without numbers: each made once on torch's meta device, to count and run dry.

A family's own class says which parts there are and how one is built; it is made from configs, so
no weights are needed, and torch only once a part is asked for. Read next: `loading.py`, which
fills parts with their weights.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from everyframe.checkpoints.cache_file import CacheFile
from everyframe.core.errors import DamagedError
from everyframe.families.family import Rehearsal

if TYPE_CHECKING:
    from torch import nn


class Empty:
    """Base of what makes a model's parts from its configs."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The components' names."""
        raise NotImplementedError

    def build(self, component: str) -> nn.Module:
        """One part, without weights, wherever torch makes tensors now."""
        raise NotImplementedError

    def outputs(self, component: str) -> tuple[str, ...]:
        """Which of its submodules' results leave for the engine, in float32 at least."""
        raise NotImplementedError

    @cached_property
    def num_elements(self) -> Mapping[str, Mapping[str, int]]:
        """Elements of each tensor of each component.

        Counted once and saved in the cache folder, for building takes a while. Whoever builds a
        part holds it against what was counted.
        """
        file = self._count
        saved = _counted(file.read(), self.parts)
        if saved is not None:
            return saved
        from everyframe.families.loading import count_elements

        found = {name: count_elements(self.empty(name)) for name in self.parts}
        file.write(found)
        return found

    @property
    def _count(self) -> CacheFile:
        return CacheFile("sizes", f"{type(self).__module__}: {self!r}")

    @cached_property
    def _made(self) -> dict[str, nn.Module]:
        return {}

    @cached_property
    def _rehearsed(self) -> set[str]:
        return set()

    def empty(self, component: str) -> nn.Module:
        """One part on meta, the same object at every call, to be looked at and not changed."""
        if component not in self._made:
            self._made[component] = self._built(component)
        return self._made[component]

    def taken(self, component: str) -> nn.Module:
        """One part on meta that is the caller's own, to be filled and changed.

        It is the one that was counted, if no dry run has had it, and built anew else: building
        takes longer than all that a plan asks of it.
        """
        made = self._made.pop(component, None)  # before the question: a dry run may begin now
        if made is None or component in self._rehearsed:
            return self._built(component)
        return made

    def _built(self, component: str) -> nn.Module:
        from everyframe.families.loading import build_on_meta, count_elements

        module = build_on_meta(partial(self.build, component))
        counted: Mapping[str, Mapping[str, int]] = vars(self).get("num_elements", {})
        if counted and counted[component] != count_elements(module):
            file = self._count
            file.remove()
            raise DamagedError(
                f"{file.path} held other sizes than those of this model's {component}, so its plan "
                "is wrong; the file is removed now, do it again"
            )
        return module

    def _for_dry_runs(self, component: str) -> nn.Module:
        """One part that a dry run casts, and may swap layers of; none of it ever gets weights."""
        self._rehearsed.add(component)
        return self.empty(component)

    def rehearsal(
        self,
        stage: str,
        component: str,
        call: Callable[[Any, str], object],
        num_calls: float,
        *told: Hashable,
    ) -> Rehearsal:
        """A call of a component that a stage makes so often for one video; see `Rehearsal`.

        `told` is what it depends on beside the sizes of the parts.
        """
        return Rehearsal(
            stage,
            component,
            partial(self._for_dry_runs, component),
            call,
            num_calls,
            (repr(self), stage, component, *told),
            self.outputs(component),
        )


def _counted(data: Any, parts: Sequence[str]) -> dict[str, dict[str, int]] | None:
    """Elements by component and tensor, if that is what was read."""
    if not isinstance(data, dict) or list(data) != list(parts):
        return None
    for each in data.values():
        if not isinstance(each, dict):
            return None
        if not all(type(number) is int and number >= 0 for number in each.values()):
            return None
    return data
