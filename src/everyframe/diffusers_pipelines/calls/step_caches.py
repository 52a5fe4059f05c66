"""Caches in a loaded pipeline that take results of earlier steps for some that a step computes.

Their owner enabled them: diffusers' by ``enable_cache`` or ``apply_first_block_cache`` and its
like, cache-dit's by patching ``forward``. They stay on. This module names them and empties them;
methods of Everyframe's own are in `lossy_calls.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

from torch import nn

from everyframe.diffusers_pipelines.calls.compiled_calls import is_in_graph
from everyframe.diffusers_pipelines.calls.step_tracking import StepTracker


def describe_cache(module: Any) -> str:
    """The caches of a component, such as ``FirstBlockCacheConfig(threshold=0.2)``; "" if none.

    A cache of diffusers without a config, or of cache-dit, is described by the names of its parts.
    """
    if not isinstance(module, nn.Module):
        return ""
    found = []
    config = getattr(module, "_cache_config", None)
    if config is not None:
        found.append(_written(config))
    else:
        found += sorted({type(hook).__name__ for hook in _stateful_hooks(module)})
    if getattr(module, "_is_cached", False) and hasattr(module, "_context_manager"):
        settings = getattr(module, "_context_kwargs", {}).get("cache_config")
        describe = getattr(settings, "strify", None)
        found.append(f"cache-dit {describe()}" if callable(describe) else "cache-dit")
    return ", ".join(found)


def _written(config: Any) -> str:
    """A config with its plain values: others, such as functions, differ between processes."""
    plain = {
        name: value
        for name, value in sorted(vars(config).items())
        if isinstance(value, (bool, int, float, str, tuple))
    }
    values = ", ".join(f"{name}={value!r}" for name, value in plain.items())
    return f"{type(config).__name__}({values})"


def cache_notes(components: Mapping[str, Any]) -> tuple[str, ...]:
    """A note for each step cache, with the components that have it."""
    owners: dict[str, list[str]] = {}
    for name, part in components.items():
        owners.setdefault(describe_cache(part), []).append(name)
    return tuple(
        f"step cache in {' and '.join(names)}, {cache}: it stays on, so the video is the "
        "pipeline's own and not that of exact steps; its loss is not measured, and a resumed run "
        "begins at the first step"
        for cache, names in owners.items()
        if cache
    )


def hook_registries(module: nn.Module) -> Iterator[Any]:
    """diffusers' registries of hooks, of the module and of its submodules."""
    for each in module.modules():
        registry = getattr(each, "_diffusers_hook", None)
        if registry is not None:
            yield registry


def _stateful_hooks(module: nn.Module) -> Iterator[Any]:
    for registry in hook_registries(module):
        for hook in registry.hooks.values():
            if getattr(hook, "_is_stateful", False):
                yield hook


def clear_cache(module: nn.Module) -> None:
    """Drop what diffusers' caches hold of earlier steps, as diffusers does after each call.

    Unlike there, the guidance branch that the pipeline set for the call in progress stays.
    """
    managers = [
        value
        for hook in _stateful_hooks(module)
        for value in vars(hook).values()
        if hasattr(value, "set_context")
    ]
    contexts = [
        {name: value for name, value in vars(each).items() if name.endswith("context")}
        for each in managers
    ]
    for registry in hook_registries(module):
        registry.reset_stateful_hooks(recurse=False)
    for manager, context in zip(managers, contexts, strict=True):
        vars(manager).update(context)


class EmptyCaches:
    """Context of one pipeline call: its step caches begin empty, and repeated calls are whole.

    diffusers empties them after a call that ends, and not after one that ended early: the next
    call would take results of another video. A call that is repeated for a repair would take what
    the failed one left.

    Attributes:
        modules: the denoisers that have a cache.
    """

    def __init__(self, denoisers: Mapping[str, nn.Module], watch: StepTracker) -> None:
        self.modules = [each for each in denoisers.values() if describe_cache(each)]
        self._watch = watch
        self._on = ExitStack()

    def __enter__(self) -> EmptyCaches:
        for module in self.modules:
            clear_cache(module)
            handle = module.register_forward_pre_hook(self._before, prepend=True)
            self._on.callback(handle.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._on.close()
        for module in self.modules:
            clear_cache(module)

    def _before(self, module: nn.Module, _: Any) -> None:
        if not is_in_graph() and self._watch.is_paused:
            clear_cache(module)
