"""Override the calls of one module, for the time of a context."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(eq=False)
class ModuleCall:
    """An intercepted call of a module; `base` is the module's own class."""

    module: nn.Module
    base: type[nn.Module]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def compute(self) -> Any:
        """Run the module itself."""
        return self.base.__call__(self.module, *self.args, **self.kwargs)


@contextmanager
def override_call(
    module: nn.Module,
    answer: Callable[[ModuleCall], Any],
    members: Mapping[str, Any] | None = None,
) -> Iterator[None]:
    """Context: calls of that module return what `answer` returns for them.

    A hook can't skip a module's computation, so the module gets a temporary subclass, with
    `members` in place of its own. Its original class is not changed.
    """
    base = type(module)

    def call(own: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return answer(ModuleCall(own, base, args, kwargs))

    given = {"__call__": call, "__module__": base.__module__, **(members or {})}
    kind = type(base.__name__, (base,), given)
    module.__class__ = kind
    try:
        yield
    finally:
        module.__class__ = base
