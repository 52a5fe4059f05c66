"""Context managers around a pipeline call: quiet libraries, float32 noise, state restored, one run.

Progress bars and warnings of diffusers and transformers are switched off. Whatever a person should
know of a run is an `Event` instead.
"""

from __future__ import annotations

import inspect
import logging
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

#: Where diffusers logs what a block of a modular pipeline raises.
_BLOCK_LOGGER = "diffusers.modular_pipelines.modular_pipeline"


class _NotWhileRaising(logging.Filter):
    """Drop log records about an error that is being raised."""

    def filter(self, record: logging.LogRecord) -> bool:
        return sys.exc_info()[0] is None


@contextmanager
def no_progress_bars(pipe: Any) -> Iterator[None]:
    """Context: the pipeline and its blocks draw no progress bars."""
    owners = [pipe, *_all_blocks(getattr(pipe, "_blocks", None))]
    block_logger, not_raising = logging.getLogger(_BLOCK_LOGGER), _NotWhileRaising()
    block_logger.addFilter(not_raising)
    name = "_progress_bar_config"
    before = [(owner, vars(owner).get(name)) for owner in owners]
    for owner in owners:
        vars(owner)[name] = {**(vars(owner).get(name) or {}), "disable": True}
    try:
        yield
    finally:
        block_logger.removeFilter(not_raising)
        for owner, config in before:
            vars(owner).pop(name, None)
            if config is not None:
                vars(owner)[name] = config


@contextmanager
def quiet_libraries(*, even_errors: bool = False) -> Iterator[None]:
    """Context: diffusers and transformers draw no bars and log errors only.

    With `even_errors` they log critical messages only: for attempts that may fail and whose failure
    is reported in our own words.
    """
    _QUIET.enter(even_errors=even_errors)
    try:
        yield
    finally:
        _QUIET.leave(even_errors=even_errors)


def quietly(events: Iterator[Event]) -> Iterator[Event]:
    """Yield the same events, each produced in `quiet_libraries`; the consumer is not silenced."""
    while True:
        with quiet_libraries():
            event = next(events, None)
        if event is None:
            return
        yield event


class _Quiet:
    """Process-wide log level of the libraries: the first user saves it, the last restores it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entered = {False: 0, True: 0}
        self._before: list[tuple[Any, int, bool]] = []

    def enter(self, *, even_errors: bool) -> None:
        """Lower the log level for one more user."""
        with self._lock:
            if not any(self._entered.values()):
                self._before = [
                    (library, library.get_verbosity(), library.is_progress_bar_enabled())
                    for library in _libraries()
                ]
            self._entered[even_errors] += 1
            self._set()

    def leave(self, *, even_errors: bool) -> None:
        """Remove one user: keep the level that others still need, or restore the original one."""
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
    """All blocks of a modular pipeline, recursively; none for a plain pipeline.

    Uses the pipeline's own blocks: its ``blocks`` property returns a copy.
    """
    if blocks is not None:
        yield blocks
        for block in getattr(blocks, "sub_blocks", {}).values():
            yield from _all_blocks(block)


_NAME = "randn_tensor"
_IS_OURS: ContextVar[bool] = ContextVar("is_ours", default=False)


class _Drawn:
    """Replacement of diffusers' `randn_tensor`: draws in float32 if the call is ours."""

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
    """Installs the replacement while at least one call of ours runs, in any thread."""

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
    """Context, for this thread: bfloat16 and float16 noise is drawn in float32 and rounded."""
    _PLACE.enter()
    token = _IS_OURS.set(True)
    try:
        yield
    finally:
        _IS_OURS.reset(token)
        _PLACE.leave()


def _replace(old: object, new: object) -> None:
    """Replace the function in every module that imported it, also outside diffusers."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        if names.get(_NAME) is old:
            names[_NAME] = new


#: Ids of in-memory pipelines and components that a run uses now.
_IN_A_RUN: set[int] = set()
_LOCK = threading.RLock()  # given back also while a forgotten stream is collected


@contextmanager
def restore_after(pipe: Any) -> Iterator[None]:
    """Context: restore the attributes of the pipeline and its small components on exit."""
    with attributes_kept([pipe, *filter(_is_small, pipe.components.values())], _copied):
        yield


@contextmanager
def in_one_run(pipe: Any) -> Iterator[None]:
    """Context: lock this pipeline, and each component that it shares with others, for one run.

    Raises:
        InputError: another run uses it. The scheduler is shared, so their steps would mix.
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
    """Context: restore the attributes of these objects on exit; `copied` copies each `__dict__`."""
    before = [(owner, copied(vars(owner))) for owner in owners]
    try:
        yield
    finally:
        for owner, attributes in before:
            vars(owner).clear()
            vars(owner).update(attributes)


def _is_small(component: Any) -> bool:
    """Whether it is a scheduler, guider or processor: state in attributes, no weights.

    Tokenizers keep their state in a library of their own, and diffusers passes them everything at
    each call.
    """
    return (
        hasattr(component, "__dict__")
        and hasattr(component, "config")
        and not isinstance(component, nn.Module)
    )


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    """Copy attributes, with lists and mappings: schedulers store recent predictions in a list."""
    return {
        name: value.copy() if type(value) in (list, dict) else value
        for name, value in attributes.items()
    }
