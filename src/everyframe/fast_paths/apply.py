"""Apply fast paths to a plain module from outside: swap children, hook calls, compile blocks.

Swaps come before weights and cast hooks, as those hooks sit on the children
(`everyframe.precision.cast_hooks`). Everything else comes after. The `precision` group of paths is
not handled here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from functools import partial
from importlib import import_module
from typing import Any

from torch import nn

from everyframe.fast_paths.compilation.module_compilation import compile_blocks
from everyframe.fast_paths.modules import cpu_modules, gated_linear, residual_blocks
from everyframe.fast_paths.modules.constant_results import can_cache
from everyframe.fast_paths.modules.fast_modules import embedders, fuse, keep, pairs
from everyframe.fast_paths.registry import kernel_of
from everyframe.ops.attention import PLAIN, attend_by


def block_names(module: nn.Module) -> tuple[str, ...]:
    """Names of the items in the outermost module lists: the repeated blocks of a model."""
    return tuple(_blocks(module, ""))


def _blocks(module: nn.Module, name: str) -> Iterator[str]:
    for key, child in module.named_children():
        place = f"{name}.{key}" if name else key
        if isinstance(child, nn.ModuleList):
            yield from (f"{place}.{number}" for number, _ in child.named_children())
        else:
            yield from _blocks(child, place)


def applies_to(name: str, module: nn.Module) -> bool:
    """Whether the module contains anything that this fast path can replace.

    Only for paths that are recognised by their modules; for others the trial decides.
    """
    return name not in _PLACES or bool(_PLACES[name](module))


def places_of(name: str, module: nn.Module) -> Sequence[str]:
    """Names of the submodules that a path of single modules replaces."""
    found: Sequence[str] = _PLACES[name](module)  # type: ignore[assignment]
    return found


def swap_modules(module: nn.Module, paths: Sequence[str] | None) -> None:
    """Swap children for those of these fast paths; parameters keep their names."""
    # In one order, as attention in C is made of an attention that rotates in C.
    for name, swap in _SWAPS.items():
        if name in (paths or ()):
            swap(module, block_names(module))


def apply_fast_paths(
    module: nn.Module,
    paths: Sequence[str] | None,
    called: Sequence[str] = ("",),
    plain: Sequence[str] = (),
    *,
    compiles: bool = False,
) -> None:
    """Apply these fast paths to a module that has its weights and precision.

    Without an attention path, attention runs the plain kernel; with `paths` None torch chooses
    freely.

    Args:
        module: the component.
        paths: names of fast paths, or None.
        called: dotted names of the submodules that are really called; ``""`` is the module.
        plain: dotted names of submodules that stay uncompiled.
        compiles: compile what is not yet; runs use what their trial has compiled.
    """
    if paths is None:
        return
    kernels = [kernel for kernel in map(kernel_of, paths) if kernel]
    attend_by(module, *(kernels or [PLAIN]), parts=called)
    if "compile" in paths:
        blocks = (block for block in block_names(module) if not _is_in(block, plain))
        compile_blocks(module, blocks, compiles=compiles, warns=False)


def _is_in(name: str, parts: Sequence[str]) -> bool:
    return any(not part or f"{name}.".startswith(f"{part}.") for part in parts)


def _swap_norms(module: nn.Module, blocks: Sequence[str]) -> None:
    cpu_modules.swapper("native-norm")(module, tuple(blocks))
    residual_blocks.fuse(module)


#: Finds what a path can replace, for paths that are recognised by their modules.
_PLACES: Mapping[str, Callable[[nn.Module], Sized]] = {
    "linear-gelu": lambda module: pairs(module, block_names(module)),
    "kept-embeddings": embedders,
    # The call of a pipeline applies it, for each video.
    "cached-constants": lambda module: [module] if can_cache(module) else [],
    "native-gated-linear": gated_linear.places,
    **{name: partial(cpu_modules.places, name) for name in cpu_modules.PATHS},
}
_SWAPS: Mapping[str, Callable[[nn.Module, tuple[str, ...]], Any]] = {
    "linear-gelu": fuse,
    "kept-embeddings": lambda module, blocks: keep(module, embedders(module)),
    "native-gated-linear": gated_linear.fuse,
    **{name: cpu_modules.swapper(name) for name in cpu_modules.PATHS},
    "native-norm": _swap_norms,
}


def import_function(place: str) -> Callable[..., Any]:
    """Import the function at ``module:name``."""
    module, _, name = place.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), name)
    return found
