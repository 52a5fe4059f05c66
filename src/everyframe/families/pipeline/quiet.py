"""Nothing is printed: the bars and warnings of diffusers and transformers, while they work for us.

What a person should know of a run is an event of ours. Read next: `stages.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from everyframe.core.events import Event


@contextmanager
def silent(pipe: Any) -> Iterator[None]:
    """Within, the pipeline draws no progress bars."""
    owners = [pipe, *_all_blocks(getattr(pipe, "_blocks", None))]
    name = "_progress_bar_config"
    before = [(owner, vars(owner).get(name)) for owner in owners]
    for owner in owners:
        vars(owner)[name] = {**(vars(owner).get(name) or {}), "disable": True}
    try:
        yield
    finally:
        for owner, config in before:
            vars(owner).pop(name, None)
            if config is not None:
                vars(owner)[name] = config


@contextmanager
def quiet_libraries(*, even_errors: bool = False) -> Iterator[None]:
    """Within, diffusers and transformers draw no bars and say nothing short of an error.

    With `even_errors` not that either: for what may fail, and is told in other words then.
    """
    _QUIET.enter(even_errors=even_errors)
    try:
        yield
    finally:
        _QUIET.leave(even_errors=even_errors)


def quietly(events: Iterator[Event]) -> Iterator[Event]:
    """The same events, each made in `quiet_libraries`; whoever reads them hears what is said."""
    while True:
        with quiet_libraries():
            event = next(events, None)
        if event is None:
            return
        yield event


class _Quiet:
    """How much libraries say, for all threads: the first to enter keeps what the last puts back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entered = {False: 0, True: 0}
        self._before: list[tuple[Any, int, bool]] = []

    def enter(self, *, even_errors: bool) -> None:
        """From here on they say no more than that."""
        with self._lock:
            if not any(self._entered.values()):
                self._before = [
                    (library, library.get_verbosity(), library.is_progress_bar_enabled())
                    for library in _libraries()
                ]
            self._entered[even_errors] += 1
            self._set()

    def leave(self, *, even_errors: bool) -> None:
        """As others still want it, or as it was before the first."""
        with self._lock:
            self._entered[even_errors] -= 1
            self._set()

    def _set(self) -> None:
        is_quiet = any(self._entered.values())
        for library, verbosity, has_bars in self._before:
            quiet = library.CRITICAL if self._entered[True] else library.ERROR
            library.set_verbosity(quiet if is_quiet else verbosity)
            if is_quiet:
                library.disable_progress_bar()
            elif has_bars:
                library.enable_progress_bar()


_QUIET = _Quiet()


def _libraries() -> tuple[Any, ...]:
    from diffusers.utils import logging as of_diffusers
    from transformers.utils import logging as of_transformers

    return of_diffusers, of_transformers


def _all_blocks(blocks: Any) -> Iterator[Any]:
    """The blocks of a modular pipeline, all the way down; nothing for a plain one.

    Its own ones: what it shows as ``blocks`` is a copy.
    """
    if blocks is not None:
        yield blocks
        for block in getattr(blocks, "sub_blocks", {}).values():
            yield from _all_blocks(block)
