"""Context managers around a pipeline call: no progress bars, its state restored, one run at a time.

Whatever a person should know of a run is an `Event` instead. What a call changes in the libraries
is in `library_patches.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from everyframe.core.errors import InputError
from everyframe.diffusers_pipelines.calls.step_caches import hook_registries
from everyframe.diffusers_pipelines.library_patches import QUIET_BLOCKS


@contextmanager
def no_progress_bars(pipe: Any) -> Iterator[None]:
    """Context: the pipeline and its blocks draw no progress bars."""
    owners = [pipe, *all_blocks(getattr(pipe, "_blocks", None))]
    name = "_progress_bar_config"
    before = [(owner, vars(owner).get(name)) for owner in owners]
    for owner in owners:
        vars(owner)[name] = {**(vars(owner).get(name) or {}), "disable": True}
    try:
        with QUIET_BLOCKS.used():
            yield
    finally:
        for owner, config in before:
            vars(owner).pop(name, None)
            if config is not None:
                vars(owner)[name] = config


def all_blocks(blocks: Any) -> Iterator[Any]:
    """All blocks of a modular pipeline, recursively; none for a plain pipeline.

    Uses the pipeline's own blocks: its ``blocks`` property returns a copy.
    """
    if blocks is not None:
        yield blocks
        for block in getattr(blocks, "sub_blocks", {}).values():
            yield from all_blocks(block)


#: Ids of in-memory pipelines and components that a run uses now.
_IN_A_RUN: set[int] = set()
_LOCK = threading.RLock()  # given back also while a forgotten stream is collected


@contextmanager
def restore_after(pipe: Any) -> Iterator[None]:
    """Context: restore the attributes of the pipeline and its small components on exit.

    Attention processors are restored too: a pipeline with perturbed-attention guidance puts its own
    in for each call, and leaves them there where the call is interrupted. So are hooks of guiders,
    such as those of skip-layer guidance: they are on the denoiser for some of its calls.
    """
    parts = pipe.components.values()
    before = [(part, part.attn_processors) for part in parts if hasattr(part, "set_attn_processor")]
    try:
        with attributes_kept([pipe, *filter(_is_small, parts)], _copy_attributes):
            yield
    finally:
        _remove_guider_hooks(parts)
        for part, processors in before:
            now = part.attn_processors
            if any(now.get(name) is not each for name, each in processors.items()):
                part.set_attn_processor(dict(processors))


def _remove_guider_hooks(parts: Iterable[Any]) -> None:
    """Remove the hooks that guiders of an interrupted call left: the next call refuses them."""
    guiders = [vars(part) for part in parts if _is_small(part)]
    kept = (names for own in guiders for key, names in own.items() if key.endswith("_hook_names"))
    names = {name for each in kept for name in each}
    modules = [part for part in parts if isinstance(part, nn.Module)] if names else []
    for registry in (found for module in modules for found in hook_registries(module)):
        for name in names & registry.hooks.keys():
            registry.remove_hook(name, recurse=False)


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


def _copy_attributes(attributes: dict[str, Any]) -> dict[str, Any]:
    """Copy attributes, with lists and mappings: schedulers store recent predictions in a list."""
    return {
        name: value.copy() if type(value) in (list, dict) else value
        for name, value in attributes.items()
    }
