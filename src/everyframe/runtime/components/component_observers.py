"""Observers of components as they are loaded, of any family: traces and reports add hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import nn

Look = Callable[[str, nn.Module], object]
"""Called with each component's name and module right after loading, before its first call."""

_LOOKS: ContextVar[tuple[Look, ...]] = ContextVar("looks", default=())


@contextmanager
def on_component_loaded(look: Look) -> Iterator[None]:
    """Context: call `look` with every component that is loaded, of any family.

    Traces use it to add their hooks from outside.
    """
    token = _LOOKS.set((*_LOOKS.get(), look))
    try:
        yield
    finally:
        _LOOKS.reset(token)


def is_component_awaited() -> bool:
    """Whether an `on_component_loaded` is active, which adds hooks to what is loaded."""
    return bool(_LOOKS.get())


def notify_loaded(component: str, module: nn.Module) -> None:
    """Pass a loaded component to every active `on_component_loaded` callback."""
    for look in _LOOKS.get():
        look(component, module)
