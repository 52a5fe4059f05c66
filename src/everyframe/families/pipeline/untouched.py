"""A pipeline that belongs to somebody: as it was when the run is over. And one that prints nothing.

A pipeline's call sets schedulers, leaves marks on the pipeline itself and draws bars. Weights,
dtypes, devices, training flags and hooks are nobody's to change here and are not changed.
Read next: `given.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def untouched(pipe: Any) -> Iterator[None]:
    """Within, the pipeline may change itself and its small components; afterwards it has not."""
    owners = [pipe, *filter(_is_small, pipe.components.values())]
    before = [(owner, _copied(vars(owner))) for owner in owners]
    try:
        yield
    finally:
        for owner, attributes in before:
            vars(owner).clear()
            vars(owner).update(attributes)


@contextmanager
def silent(pipe: Any) -> Iterator[None]:
    """Within, the pipeline draws no progress bars."""
    owners = [pipe, *_all_blocks(getattr(pipe, "blocks", None))]
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
def quiet_imports() -> Iterator[None]:
    """Within, diffusers and transformers draw no bars while they read weights."""
    from diffusers.utils import logging as of_diffusers
    from transformers.utils import logging as of_transformers

    libraries: tuple[Any, ...] = (of_diffusers, of_transformers)
    active = [library for library in libraries if library.is_progress_bar_enabled()]
    for library in active:
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library in active:
            library.enable_progress_bar()


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


def _all_blocks(blocks: Any) -> Iterator[Any]:
    """The blocks of a modular pipeline, all the way down; nothing for a plain one."""
    if blocks is not None:
        yield blocks
        for block in getattr(blocks, "sub_blocks", {}).values():
            yield from _all_blocks(block)
