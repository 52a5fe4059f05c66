"""Nothing is printed: the bars and warnings of diffusers and transformers, while they work for us.

What a person should know of a run is an event of ours. Read next: `stage.py`.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from everyframe.core.errors import InputError
from everyframe.core.events import Event


@contextmanager
def no_progress_bars(pipe: Any) -> Iterator[None]:
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


_NAME = "randn_tensor"
_IS_OURS: ContextVar[bool] = ContextVar("is_ours", default=False)


class _Drawn:
    """diffusers' function, which draws in float32 where the call is ours."""

    def __init__(self, original: Callable[..., Tensor]) -> None:
        self.original = original
        self._signature = inspect.signature(original)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        asked = self._signature.bind(*args, **kwargs).arguments
        dtype = asked.get("dtype")
        if not _IS_OURS.get() or dtype not in (torch.bfloat16, torch.float16):
            return self.original(**asked)
        return self.original(**{**asked, "dtype": torch.float32}).to(dtype)


class _Place:
    """Holds the function in its place while any call of ours is under way, in any thread."""

    def __init__(self) -> None:
        self._lock, self._num_calls = threading.Lock(), 0
        self._drawn: _Drawn | None = None

    def enter(self) -> None:
        from diffusers.utils import torch_utils

        with self._lock:
            self._num_calls += 1
            if self._drawn is None:
                self._drawn = _Drawn(torch_utils.randn_tensor)
                _replace(self._drawn.original, self._drawn)

    def leave(self) -> None:
        with self._lock:
            self._num_calls -= 1
            if not self._num_calls and self._drawn is not None:
                _replace(self._drawn, self._drawn.original)
                self._drawn = None


_PLACE = _Place()


@contextmanager
def float32_noise() -> Iterator[None]:
    """Within, in this thread, noise in bfloat16 and float16 is float32's, rounded."""
    _PLACE.enter()
    token = _IS_OURS.set(True)
    try:
        yield
    finally:
        _IS_OURS.reset(token)
        _PLACE.leave()


def _replace(old: object, new: object) -> None:
    """In every module that has imported it, a pipeline's own outside of diffusers as well."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        if names.get(_NAME) is old:
            names[_NAME] = new


#: Pipelines in memory, and their parts, that are in the middle of a run.
_IN_A_RUN: set[int] = set()
_LOCK = threading.RLock()  # given back also while a forgotten stream is collected


@contextmanager
def restore_after(pipe: Any) -> Iterator[None]:
    """Within, the pipeline may change itself and its small components; afterwards it has not."""
    with attributes_kept([pipe, *filter(_is_small, pipe.components.values())], _copied):
        yield


@contextmanager
def in_one_run(pipe: Any) -> Iterator[None]:
    """Within, nobody else's run may use this pipeline, nor another that shares a part of it.

    Raises:
        InputError: one does already. Their steps would be mixed, as the scheduler is one.
    """
    parts = {id(part) for part in pipe.components.values() if _has_state(part)} | {id(pipe)}
    with _LOCK:
        if parts & _IN_A_RUN:
            raise InputError(
                f"this {type(pipe).__name__}, or a part of it, is in the middle of another run and "
                "does one at a time; read that one to its end or close it, or load the pipeline "
                "once for each thread"
            )
        _IN_A_RUN.update(parts)
    try:
        yield
    finally:
        with _LOCK:
            _IN_A_RUN.difference_update(parts)


def _has_state(part: Any) -> bool:
    return isinstance(part, nn.Module) or _is_small(part)


@contextmanager
def attributes_kept(
    owners: Iterable[object], copied: Callable[[dict[str, Any]], dict[str, Any]] = dict
) -> Iterator[None]:
    """Within, these objects may note things on themselves; afterwards they have what they had."""
    before = [(owner, copied(vars(owner))) for owner in owners]
    try:
        yield
    finally:
        for owner, attributes in before:
            vars(owner).clear()
            vars(owner).update(attributes)


def _is_small(component: Any) -> bool:
    """Schedulers, guiders, processors: state in attributes, and no weights.

    Tokenizers hold theirs in a library of their own; diffusers gives them everything at each call.
    """
    return (
        hasattr(component, "__dict__")
        and hasattr(component, "config")
        and not isinstance(component, nn.Module)
    )


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    """Lists and mappings are copied: schedulers keep the last predictions in a list."""
    return {
        name: value.copy() if type(value) in (list, dict) else value
        for name, value in attributes.items()
    }
