"""Compile the blocks of a module in place: a package each, or torch.compile where none fits.

Names, parameters and hooks of a block stay, and its call computes what it would as written,
whatever changes: weights, sizes, numbers, hooks. Not here: how a package is made (`block_export`),
stored (`package_store`) and called (`compiled_block`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from everyframe.fast_paths.compilation import compiler_cache
from everyframe.fast_paths.compilation.compiled_block import CompiledBlock
from everyframe.numerics.fault import Fault
from everyframe.numerics.tensor_stats import iter_tensors, value_range

#: Largest difference of a correct graph, as a share of the largest value; bfloat16 rounding is a
#: tenth of it.
_FAR = 0.1


def disable_compiled(module: nn.Module) -> Callable[[], None]:
    """Disable compilation in every submodule; returns a function that enables it again."""
    compiled = [(part, part._compiled_call_impl) for part in module.modules() if is_compiled(part)]
    for part, _ in compiled:
        part._compiled_call_impl = None

    def undo() -> None:
        for part, graph in compiled:
            part._compiled_call_impl = graph

    return undo


def is_compiled(module: nn.Module) -> bool:
    """Whether the module itself is compiled, whatever its submodules are."""
    return module._compiled_call_impl is not None


def find_wrong_graphs(
    parts: Mapping[str, nn.Module], compute: Callable[[], object]
) -> Sequence[Fault]:
    """Find compiled blocks whose result in `compute` is not finite, or far from the eager result.

    Both run on the same inputs, and `compute` continues with the eager result, so one call finds
    all wrong graphs.
    """
    found: dict[tuple[str, str], Fault] = {}
    undo = []

    def judged(part: str, name: str, block: nn.Module, graph: Callable[..., Any]) -> Any:
        as_written: Any = block._call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            result = graph(*args, **kwargs)
            written = as_written(*args, **kwargs)
            if value_range(written).is_finite and _is_far(result, written):
                given = (args, kwargs)
                dtype = next(iter_tensors(result)).dtype
                found[part, name] = Fault(
                    part, name, "a compiled graph", "compiled", dtype, value_range(given),
                    value_range(result), value_range(written),
                )  # fmt: skip
            return written

        return call

    for part, whole in parts.items():
        for name, block in whole.named_modules():
            graph = block._compiled_call_impl
            if graph is not None:
                # Not a hook: one would be a reason to compile the block again.
                undo.append(disable_compiled(block))
                block._compiled_call_impl = judged(part, name, block, graph)
    try:
        if undo:
            compute()
    finally:
        for each in undo:
            each()
    return [*found.values()]


def _is_far(result: Any, written: Any) -> bool:
    if not value_range(result).is_finite:
        return True
    pairs = zip(iter_tensors(result), iter_tensors(written), strict=True)
    return any(float((a - b).abs().max()) > _FAR * float(b.abs().max()) for a, b in pairs)


def compile_blocks(
    module: nn.Module,
    names: Iterable[str],
    backend: str | Callable[..., Any] | None = None,
    *,
    dynamic: bool = True,
    compiles: bool = True,
    warns: bool = True,
) -> None:
    """Compile the submodules with these names in place; the first call of each kind is slow.

    Args:
        module: their model.
        names: dotted names.
        backend: of torch.compile, for all calls; by default that is for what has no package.
        dynamic: a package takes varying sizes where it can.
        compiles: make missing packages; otherwise those calls run as written.
        warns: log why calls run as written.
    """
    for name in names:
        block = module.get_submodule(name)
        if backend is not None:
            block._compiled_call_impl = _graphs(block._call_impl, backend)
            continue
        block._compiled_call_impl = CompiledBlock(
            block, dynamic=dynamic, compiles=compiles, warns=warns,
            fallback=partial(_graphs, backend="inductor"),
        )  # fmt: skip


def compiled_blocks(module: nn.Module) -> dict[str, CompiledBlock]:
    """Blocks with packages, by name."""
    found = {name: part._compiled_call_impl for name, part in module.named_modules()}
    return {name: each for name, each in found.items() if isinstance(each, CompiledBlock)}


class WrittenCalls:
    """Finds out why compiled blocks run as written, from its making on.

    Args:
        parts: components by name, whose blocks are compiled by now.
    """

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        self._reports = [
            (name, block.report)
            for name, part in parts.items()
            for block in compiled_blocks(part).values()
        ]
        self._since, self._reported = self._count(), set[tuple[str, str]]()

    def new_reasons(self) -> list[str]:
        """A text for each component and reason that no earlier call has given."""
        found = [
            key
            for key, number in self._count().items()
            if number > self._since[key] and key not in self._reported
        ]
        self._reported.update(found)
        return [f"{name}: compiled blocks run as written: {why}" for name, why in found]

    def _count(self) -> Counter[tuple[str, str]]:
        """Calls by component and reason."""
        counted: Counter[tuple[str, str]] = Counter()
        for name, report in self._reports:
            counted.update({(name, why): number for why, number in report.notes.items()})
        return counted


def _graphs(call: Callable[..., Any], backend: str | Callable[..., Any]) -> Callable[..., Any]:
    """The call by torch.compile.

    Torch guards a graph by shapes, dtypes and plain values, and takes weights as inputs. It guards
    hooks only on request; repairs and kernel choices are hooks.
    """
    if backend == "inductor":
        compiler_cache.prepare()
    # torch's switches are made at import, so type checkers see none of them.
    config: Any = torch._dynamo.config
    config.skip_nnmodule_hook_guards = False
    compiled: Callable[..., Any] = torch.compile(call, backend=backend)
    return compiled
