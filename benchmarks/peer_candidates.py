"""The candidates of `peers.py`: what prepares each, for the same module with the same weights."""

from __future__ import annotations

import importlib.metadata
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from block_stacks import Call, Stack
from torch import Tensor, nn

import everyframe
from everyframe.core.facts import DeviceFacts
from everyframe.fast_paths.apply import applies_to
from everyframe.fast_paths.compilation import compiled_blocks
from everyframe.fast_paths.registry import for_device, switched_off
from everyframe.precision.strict_float32 import strict_float32

#: What every ratio is to.
BASE = "diffusers float32"


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


def paths_of(stack: Stack, device: DeviceFacts) -> tuple[str, ...]:
    """Exact and rounding paths that the model has a place for, but half precision and compiling.

    ``EVERYFRAME_DISABLE`` names those that a trial refuses on this machine.
    """
    off = switched_off(())
    kinds = [
        path
        for path in for_device(device)
        if path.group not in ("precision", "compile") and path.closeness != "lossy"
        and path.name not in off
    ]  # fmt: skip
    first = next((path.name for path in kinds if path.group == "attention"), None)
    others = [path.name for path in kinds if path.group != "attention"]
    probe = stack.ours(torch.float32, ())
    found = [name for name in others if applies_to(name, probe)]
    return tuple(name for name in (first, *found) if name)


def ours(stack: Stack, dtype: str, device: DeviceFacts, *, fast: bool, compiled: bool) -> Call:
    paths = paths_of(stack, device) if fast else ()
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


def candidates(stack: Stack, device: DeviceFacts) -> dict[str, tuple[str, Callable[[], Call]]]:
    """Name -> dtype of its products, and what prepares it."""
    half, one = "bfloat16", partial(ours, stack, device=device)
    found: dict[str, tuple[str, Callable[[], Call]]] = {
        BASE: ("float32", partial(diffusers, stack, "float32")),
        f"diffusers {half}": (half, partial(diffusers, stack, half)),
        f"ours {half}, exact": (half, partial(one, half, fast=False, compiled=False)),
        f"ours {half}, fast paths": (half, partial(one, half, fast=True, compiled=False)),
    }
    if device.kind == "cpu":
        own = "float32"
        found |= {
            f"ours {own}, exact": (own, partial(one, own, fast=False, compiled=False)),
            f"ours {own}, fast paths": (own, partial(one, own, fast=True, compiled=False)),
            f"OpenVINO {own}": (own, partial(openvino, stack, own)),
            f"OpenVINO {half}": (half, partial(openvino, stack, half)),
            f"ONNX Runtime {own}": (own, partial(onnxruntime, stack)),
        }
    found |= {
        f"diffusers {half} compiled": (half, partial(diffusers, stack, half, compiled=True)),
        f"ours {half}, fast paths and compiled": (
            half,
            partial(one, half, fast=True, compiled=True),
        ),
        "torchao int8 dynamic compiled": (half, partial(torchao, stack)),
        f"cache-dit {half} compiled, no cache": (half, partial(cache_dit, stack)),
    }
    if device.kind == "cpu":
        found |= {
            f"diffusers {own} compiled": (own, partial(diffusers, stack, own, compiled=True)),
            f"ours {own}, fast paths and compiled": (
                own,
                partial(one, own, fast=True, compiled=True),
            ),
        }
    return found
