"""A pipeline that belongs to somebody: as it was when the run is over.

A pipeline's call sets schedulers and leaves marks on the pipeline itself. Weights, dtypes, devices,
training flags and hooks are nobody's to change here and are not changed. Read next: `given.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def untouched(pipe: Any) -> Iterator[None]:
    """Within, the pipeline may change itself and its small components; afterwards it has not."""
    with attributes_kept([pipe, *filter(_is_small, pipe.components.values())], _copied):
        yield


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
