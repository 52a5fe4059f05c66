"""Compile one block ahead of time: export its call, and let AOTInductor make a library of it.

Weights are inputs of the library, as the block's arguments are, so one package serves all equal
blocks, and other weights (LoRA) need no new one. Sizes of arguments are dynamic where torch's
export allows, with the conditions that it found; otherwise a package has the sizes that it was made
for.
Not here: whether the result is right and fast (`compiled_block`), and where it is stored
(`package_store`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from everyframe.fast_paths.compilation import compiler_cache
from everyframe.fast_paths.compilation.block_state import (
    NotCompilableError,
    copy_with,
    flatten,
    own_tensors,
)
from everyframe.precision.cast_hooks import map_tensors

_log = logging.getLogger(__name__)

#: Memory formats in which arguments reach a package; any other is made contiguous first.
_FORMATS = {
    "contiguous": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
}

#: A condition of an exported program: sizes of its inputs, numbers and arithmetic, nothing else.
_CONDITION = re.compile(
    r"(?:L\['tensors'\]\[\d+\]\.size\(\)\[\d+\]|\b(?:min|max|and|or|not)\b|[\d\s()+\-*/%<>=!,])+"
)
_SIZE = re.compile(r"L\['tensors'\]\[(\d+)\]\.size\(\)\[(\d+)\]")


def format_of(tensor: Tensor) -> str:
    """The memory format in which a package receives this argument."""
    if tensor.is_contiguous():
        return "contiguous"
    if tensor.ndim in (4, 5):
        name = "channels_last" if tensor.ndim == 4 else "channels_last_3d"
        if tensor.is_contiguous(memory_format=_FORMATS[name]):
            return name
    return "contiguous"


def in_format(tensor: Tensor) -> Tensor:
    """The argument as a package receives it, copied only if its strides are of no known format."""
    if tensor.is_contiguous() or format_of(tensor) != "contiguous":
        return tensor
    return tensor.contiguous()


@dataclass(frozen=True)
class CallSizes:
    """Sizes that a package takes.

    Attributes:
        dims: of each input, weights first: a number, or the least and the largest one.
        conditions: on ``s[input][dim]``, all to be true.
    """

    dims: tuple[tuple[int | tuple[int, int | None], ...], ...]
    conditions: tuple[str, ...] = ()

    def fit(self, tensors: Sequence[Tensor]) -> bool:
        """Whether tensors of these sizes are taken."""
        return self.take([tuple(tensor.shape) for tensor in tensors])

    def take(self, sizes: Sequence[tuple[int, ...]]) -> bool:
        """Whether these sizes are taken."""
        if [len(each) for each in sizes] != [len(each) for each in self.dims]:
            return False
        for own, dims in zip(sizes, self.dims, strict=True):
            for size, dim in zip(own, dims, strict=True):
                least, most = (dim, dim) if isinstance(dim, int) else dim
                if size < least or (most is not None and size > most):
                    return False
        return all(_is_true(each, sizes) for each in self.conditions)

    def dynamic(self) -> list[tuple[int, int]]:
        """Input and dimension of each size that may vary."""
        return [
            (number, axis)
            for number, dims in enumerate(self.dims)
            for axis, dim in enumerate(dims)
            if not isinstance(dim, int)
        ]


def _is_true(condition: str, sizes: Sequence[tuple[int, ...]]) -> bool:
    if not _CONDITION.fullmatch(condition):
        raise NotCompilableError(f"a condition on sizes is more than arithmetic: {condition}")
    arithmetic = _SIZE.sub(lambda found: f"s[{found[1]}][{found[2]}]", condition)
    return bool(eval(arithmetic, {"__builtins__": {}, "min": min, "max": max, "s": sizes}))


@dataclass(frozen=True)
class ExportedBlock:
    """A package file, the sizes that it takes, and the structure of its result."""

    library: Path
    sizes: CallSizes
    result: Any


class _Call(nn.Module):
    """A block's call as a function of a list of tensors: its weights, then its arguments."""

    def __init__(
        self,
        block: nn.Module,
        names: Sequence[str],
        given: tuple[Any, Any],
        note: Callable[[Any], None],
    ) -> None:
        super().__init__()
        # Out of torch's sight: the weights are inputs.
        vars(self).update(hidden=(_Forward(block), list(names), given))
        # A call, as torch takes back what a `forward` writes into its module's attributes.
        self.note = note

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        block, names, given = vars(self)["hidden"]
        own = {f"block.{name}": each for name, each in zip(names, tensors, strict=False)}
        rest = iter(tensors[len(names) :])
        args, kwargs = map_tensors(given, lambda _: next(rest))
        result = torch.func.functional_call(block, own, args, kwargs)
        found: list[Tensor] = []
        self.note(encode(flatten(result, found)))
        return found


class _Forward(nn.Module):
    """Calls a block without its own hooks, which run outside of the package."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.block.forward(*args, **kwargs)


def compile_block(
    block: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    folder: Path,
    *,
    dynamic: bool,
) -> ExportedBlock:
    """Compile a block's call with arguments of these sizes into a package in `folder`.

    Takes seconds to minutes. Neither the block nor its arguments are changed or computed with.

    Raises:
        NotCompilableError: it can't be exported or compiled; says why.
    """
    compiler_cache.prepare()
    with torch.inference_mode(False), torch.no_grad():
        results: list[Any] = []
        names, call, tensors = _stand_in(block, args, kwargs, results.append)
        program, sizes = _export_dynamic(call, len(names), tensors, dynamic=dynamic)
        try:
            path = torch._inductor.aoti_compile_and_package(
                program, package_path=str(folder / "block.pt2")
            )
        except Exception as error:  # whatever the compiler says
            raise NotCompilableError(f"the compiler failed: {first_line(error)}") from error
    return ExportedBlock(Path(str(path)), sizes, results[-1])


def _stand_in(
    block: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    note: Callable[[Any], None],
) -> tuple[list[str], _Call, list[Tensor]]:
    """A copy of the block with tensors of the same layout, so that the real one is left alone."""

    def like(tensor: Tensor) -> Tensor:
        made = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
        return made.zero_()

    copied = copy_with(block, like)
    own = own_tensors(copied)
    given = map_tensors((args, dict(kwargs)), lambda tensor: like(in_format(tensor)))
    inputs = list(own.values())
    flatten(given, inputs)
    return list(own), _Call(copied, list(own), given, note), inputs


def _export_dynamic(
    call: _Call, num_weights: int, tensors: list[Tensor], *, dynamic: bool
) -> tuple[Any, CallSizes]:
    """The exported program, with as many dynamic sizes as torch can tell the conditions of."""
    free = {
        (number, axis)
        for number, tensor in enumerate(tensors)
        for axis, size in enumerate(tensor.shape)
        if dynamic and number >= num_weights and size > 1
    }
    while free:
        try:
            program, sizes = _export(call, tensors, free)
        except NotCompilableError as error:
            _log.info("its sizes are not dynamic: %s", error)
            break
        fixed = free - _find_varying(sizes, [tuple(each.shape) for each in tensors])
        if not fixed:
            return program, sizes
        free -= fixed  # code for sizes that can't vary anyway is faster
    return _export(call, tensors, set())


def _find_varying(sizes: CallSizes, now: list[tuple[int, ...]]) -> set[tuple[int, int]]:
    """Dynamic sizes of which another value is taken, alone or with all that equal it."""
    found = set()
    for number, axis in sizes.dynamic():
        size = now[number][axis]
        alike = {place for place in sizes.dynamic() if now[place[0]][place[1]] == size}
        for places in ({(number, axis)}, alike):
            for other in (size + 2, 2 * size, 4 * size, 3 * size):
                changed = [
                    tuple(other if (i, j) in places else each for j, each in enumerate(own))
                    for i, own in enumerate(now)
                ]
                if sizes.take(changed):
                    found.add((number, axis))
    return found


def _export(
    call: _Call, tensors: list[Tensor], free: set[tuple[int, int]]
) -> tuple[Any, CallSizes]:
    marks = [
        {axis: torch.export.Dim.AUTO for axis in range(tensor.ndim) if (number, axis) in free}
        for number, tensor in enumerate(tensors)
    ]
    try:
        program = torch.export.export(call, (tensors,), dynamic_shapes=[marks], strict=False)
    except NotCompilableError:
        raise
    except Exception as error:  # torch has no one class for what it can't export
        raise NotCompilableError(f"it can't be exported: {first_line(error)}") from error
    if free and getattr(program, "_guards_code", None) is None:
        raise NotCompilableError("this torch doesn't tell the conditions on sizes")
    inputs = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
    if len(inputs) != len(tensors):
        raise NotCompilableError("it holds tensors that are neither weights nor arguments")
    sizes = CallSizes(
        tuple(tuple(_dims(value.shape, program.range_constraints)) for value in inputs),
        tuple(program._guards_code) if free else (),
    )
    if not sizes.fit(tensors):
        raise NotCompilableError("its own sizes are not among those that it takes")
    return program, sizes


def _dims(
    shape: Sequence[Any], ranges: Mapping[Any, Any]
) -> Iterator[int | tuple[int, int | None]]:
    for size in shape:
        if isinstance(size, int):
            yield size
            continue
        found = ranges.get(size.node.expr)
        if size.node.expr.is_number:
            yield int(size.node.expr)
            continue
        if found is None:
            raise NotCompilableError(f"a size depends on others: {size}")
        # torch's own infinities are many kinds of numbers; no tensor has so many elements.
        is_bounded = bool(found.upper < 2**48)
        yield (max(2, int(found.lower)), int(found.upper) if is_bounded else None)


def first_line(error: Exception) -> str:
    """What an error says first, in one line of 200 characters at most."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return " ".join((lines[0] if lines else type(error).__name__).split())[:200]


#: Structures of results, by their names in JSON.
_KINDS = {"tuple": tuple, "list": list}


def encode(structure: Any) -> Any:
    """The structure of a result (`block_state.flatten`) as JSON values.

    Raises:
        NotCompilableError: a result of another kind.
    """
    if structure is Tensor:
        return "tensor"
    kind, *items = structure
    if kind is dict and all(isinstance(key, str) for key, _ in items):
        return {"dict": [[key, encode(each)] for key, each in items]}
    for name, known in _KINDS.items():
        if kind is known:
            return {name: [encode(each) for each in items]}
    if kind in (bool, int, float, str, type(None)):
        return {"value": items[0]}
    raise NotCompilableError(f"its result is a {getattr(kind, '__name__', kind)}")


def decode(encoded: Any, tensors: Iterator[Tensor]) -> Any:
    """The result whose structure is `encoded`, with the next ones of these tensors."""
    if encoded == "tensor":
        return next(tensors)
    ((kind, held),) = encoded.items()
    if kind == "value":
        return held
    if kind == "dict":
        return {key: decode(each, tensors) for key, each in held}
    return _KINDS[kind](decode(each, tensors) for each in held)
