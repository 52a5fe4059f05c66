"""A pipeline that belongs to somebody: as it was when the run is over.

A pipeline's call sets schedulers and leaves marks on the pipeline itself. Weights, dtypes, devices,
training flags and hooks are nobody's to change here and are not changed. Read next: `given.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from everyframe.core.errors import InputError

#: Pipelines in memory, and their parts, that are in the middle of a run.
_IN_A_RUN: set[int] = set()
_LOCK = threading.RLock()  # given back also while a forgotten stream is collected


@contextmanager
def untouched(pipe: Any) -> Iterator[None]:
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
