"""torch.compile block by block, so that what was compiled can never be stale.

A block is compiled where it stands: its name, parameters and hooks stay. torch guards a graph by
the shapes, dtypes and plain values that it was made for, and takes weights as inputs; hooks it does
not guard unless told, and a hook is how a precision is raised and a kernel chosen, so it is told
here. Compilation needs a C++ compiler and takes minutes: only on demand. Read next: `compiler`,
`tools`, `put_on`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from everyframe.numerics.locate import Fault
from everyframe.numerics.watch import range_of, tensors_in
from everyframe.optimize import compiler

#: A graph is wrong beyond this share of the largest value; rounding in bfloat16 is a tenth of it.
_FAR = 0.1


def run_as_written(module: nn.Module) -> Callable[[], None]:
    """Take compilation off every part of the module; what puts it on again."""
    compiled = [(part, part._compiled_call_impl) for part in module.modules() if is_compiled(part)]
    for part, _ in compiled:
        part._compiled_call_impl = None

    def undo() -> None:
        for part, graph in compiled:
            part._compiled_call_impl = graph

    return undo


def is_compiled(module: nn.Module) -> bool:
    """Whether the module itself is, whatever its parts are."""
    return module._compiled_call_impl is not None


def wrong_graphs(parts: Mapping[str, nn.Module], compute: Callable[[], object]) -> Sequence[Fault]:
    """The compiled blocks of these components that are wrong in `compute`: not finite, or far from
    what the block gives as it is written on the same inputs.

    `compute` goes on with what that gives, so that one call finds them all.
    """
    found: dict[tuple[str, str], Fault] = {}
    undo = []

    def judged(part: str, name: str, block: nn.Module, graph: Callable[..., Any]) -> Any:
        as_written: Any = block._call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            result = graph(*args, **kwargs)
            written = as_written(*args, **kwargs)
            if range_of(written).is_finite and _is_far(result, written):
                given = (args, kwargs)
                dtype = next(tensors_in(result)).dtype
                found[part, name] = Fault(
                    part, name, "a compiled graph", "compiled", dtype, range_of(given),
                    range_of(result), range_of(written),
                )  # fmt: skip
            return written

        return call

    for part, whole in parts.items():
        for name, block in whole.named_modules():
            graph = block._compiled_call_impl
            if graph is not None:
                # Not a hook: one would be a reason to compile the block anew.
                undo.append(run_as_written(block))
                block._compiled_call_impl = judged(part, name, block, graph)
    try:
        if undo:
            compute()
    finally:
        for each in undo:
            each()
    return [*found.values()]


def _is_far(result: Any, written: Any) -> bool:
    if not range_of(result).is_finite:
        return True
    pairs = zip(tensors_in(result), tensors_in(written), strict=True)
    return any(float((a - b).abs().max()) > _FAR * float(b.abs().max()) for a, b in pairs)


def compile_blocks(
    module: nn.Module, names: Iterable[str], backend: str | Callable[..., Any] = "inductor"
) -> None:
    """Compile the parts with these dotted names in place; the first call of each takes long."""
    if backend == "inductor":
        compiler.prepare()
    # torch's switches are made at import, so type checkers see none of them.
    config: Any = torch._dynamo.config
    config.skip_nnmodule_hook_guards = False
    for name in names:
        module.get_submodule(name).compile(backend=backend)
