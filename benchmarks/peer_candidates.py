"""The candidates of `peers.py`: what prepares each, for the same module with the same weights."""

from __future__ import annotations

import importlib.metadata
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from block_stacks import Call, Stack
from sdcpp import LIBRARY, WEIGHTS, wan
from torch import Tensor, nn

import everyframe
from everyframe.fast_paths.compilation.module_compilation import compiled_blocks
from everyframe.precision.strict_float32 import strict_float32

#: What every ratio is to.
BASE = "diffusers float32"

#: Part of the names of ours with the certified fast paths.
FAST = "fast paths"


class SkippedError(Exception):
    """A candidate can't take part; the text says why."""


def needs(package: str) -> None:
    """Raise `SkippedError` if a package isn't installed."""
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise SkippedError("not installed") from None


def compiled_by_torch(model: nn.Module, stack: Stack) -> nn.Module:
    """Each block compiled, as diffusers' `compile_repeated_blocks` does."""
    for name in stack.blocks:
        for block in getattr(model, name):
            block.compile()
    return model


def diffusers(stack: Stack, dtype: str, *, compiled: bool = False) -> Call:
    model = stack.theirs(getattr(torch, dtype))
    if compiled:
        compiled_by_torch(model, stack)
    return partial(stack.call, model, stack.inputs(getattr(torch, dtype)))


def cache_dit(stack: Stack) -> Call:
    needs("cache-dit")
    import cache_dit as library

    library.set_compile_configs()
    return diffusers(stack, "bfloat16", compiled=True)


def torchao(stack: Stack) -> Call:
    needs("torchao")
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    model = stack.theirs(torch.bfloat16)
    for name in stack.blocks:
        quantize_(getattr(model, name), Int8DynamicActivationInt8WeightConfig())
    compiled_by_torch(model, stack)
    return partial(stack.call, model, stack.inputs(torch.bfloat16))


class _Traced(nn.Module):
    """Takes tensors and returns one, for converters."""

    def __init__(self, stack: Stack, model: nn.Module) -> None:
        super().__init__()
        self.model, self.run = model, stack.call

    def forward(self, *given: Tensor) -> Tensor:
        return self.run(self.model, given)


def openvino(stack: Stack, dtype: str) -> Call:
    needs("openvino")
    import openvino as library

    given = stack.inputs(torch.float32)
    wrapped = _Traced(stack, stack.theirs(torch.float32))
    converted = library.convert_model(
        wrapped, example_input=given, input=[tuple(each.shape) for each in given]
    )
    hint = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    own = {"INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    network = library.compile_model(converted, "CPU", own)
    arrays = [each.numpy() for each in given]
    return lambda: torch.from_numpy(network(arrays)[0])


def onnxruntime(stack: Stack) -> Call:
    needs("onnxruntime")
    needs("onnxscript")
    import onnxruntime as library

    given = stack.inputs(torch.float32)
    wrapped = _Traced(stack, stack.theirs(torch.float32)).eval()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "model.onnx"))
        torch.onnx.export(wrapped, given, path, dynamo=True, external_data=True)
        options = library.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = library.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    arrays = dict(zip(names, (each.numpy() for each in given), strict=True))
    return lambda: torch.from_numpy(session.run(None, arrays)[0])


def sdcpp(stack: Stack, weights: str) -> Call:
    if LIBRARY not in os.environ:
        raise SkippedError(f"{LIBRARY} names no library; benchmarks/sdcpp.py says how to build it")
    if not stack.name.startswith("Wan"):
        raise SkippedError("it has no such model")
    return wan(stack, weights)


def ours(stack: Stack, dtype: str, paths: tuple[str, ...] = (), *, compiled: bool = False) -> Call:
    model = stack.ours(getattr(torch, dtype), paths)
    if compiled:
        everyframe.compile(model)
    run = partial(_strictly, stack, model, stack.inputs(getattr(torch, dtype)))
    if compiled:
        run()
        blocks = compiled_blocks(model).values()
        if not any(block.is_compiled for block in blocks):
            notes = sorted({note for block in blocks for note in block.report.notes})
            raise SkippedError("; ".join(notes) or "no block is called")
    return run


def _strictly(stack: Stack, model: nn.Module, given: tuple[Tensor, ...]) -> Tensor:
    with strict_float32():
        return stack.call(model, given)


@dataclass(frozen=True)
class Entry:
    """A candidate: dtype of its products, and what prepares it.

    `allocates_as_ours`: its process has large pages and keeps freed memory, as ours on a CPU do.
    """

    dtype: str
    make: Callable[[], Call]
    allocates_as_ours: bool = False


def candidates(stack: Stack, kind: str, paths: Mapping[str, tuple[str, ...]]) -> dict[str, Entry]:
    """All candidates by name; `paths` are the certified ones of ours by dtype."""
    found = {BASE: Entry("float32", partial(diffusers, stack, "float32"))}
    if kind == "cpu":
        found[f"{BASE}, memory as ours"] = Entry(
            "float32", found[BASE].make, allocates_as_ours=True
        )
    # A card's time is short, and what it runs in float32 is the base alone.
    dtypes = ("bfloat16", "float32") if kind == "cpu" else ("bfloat16",)
    for dtype in dtypes:
        found |= _quick(stack, kind, dtype, paths.get(dtype, ()))
    for dtype in dtypes:
        found |= _compiled(stack, dtype, paths.get(dtype, ()))
    return found


def _quick(stack: Stack, kind: str, dtype: str, paths: tuple[str, ...]) -> dict[str, Entry]:
    """Candidates that are prepared soon."""
    one = partial(ours, stack, dtype)
    found = {
        f"diffusers {dtype}": Entry(dtype, partial(diffusers, stack, dtype)),
        f"ours {dtype}, exact": Entry(dtype, one, allocates_as_ours=True),
        f"ours {dtype}, {FAST}": Entry(dtype, partial(one, paths), allocates_as_ours=True),
    }
    if kind == "cpu":
        found[f"OpenVINO {dtype}"] = Entry(dtype, partial(openvino, stack, dtype))
    if kind == "cpu" and dtype == "float32":
        found[f"ONNX Runtime {dtype}"] = Entry(dtype, partial(onnxruntime, stack))
        for weights in WEIGHTS:
            name = f"stable-diffusion.cpp, weights in {weights}"
            found[name] = Entry(dtype, partial(sdcpp, stack, weights))
    return found


def _compiled(stack: Stack, dtype: str, paths: tuple[str, ...]) -> dict[str, Entry]:
    """Candidates that compile."""
    found = {
        f"diffusers {dtype} compiled": Entry(
            dtype, partial(diffusers, stack, dtype, compiled=True)
        ),
        f"ours {dtype}, {FAST} and compiled": Entry(
            dtype, partial(ours, stack, dtype, paths, compiled=True), allocates_as_ours=True
        ),
    }
    if dtype == "bfloat16":
        found["torchao int8 dynamic compiled"] = Entry(dtype, partial(torchao, stack))
        found[f"cache-dit {dtype} compiled, no cache"] = Entry(dtype, partial(cache_dit, stack))
    return found
