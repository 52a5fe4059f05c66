"""Trials of fast paths: comparisons on a component's own sizes, run in a separate process.

`certify` starts the process, so a crashing kernel ends nothing else. The sizes come from the dry
run: attentions and products, with fewer rows where they are large, and whole blocks.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from everyframe.core.facts import OpShape
from everyframe.fast_paths.apply import applies_to, import_function, places_of, swap_modules
from everyframe.fast_paths.benchmark import (
    Comparison,
    OutOfTimeError,
    measure_seconds,
    run_comparisons,
)
from everyframe.fast_paths.certification.extract_blocks import BlockInputs, BlockLocation, blocks_of
from everyframe.fast_paths.certification.target import CertificationTarget
from everyframe.fast_paths.compilation.compiled_block import FAILS, CompiledBlock
from everyframe.fast_paths.compilation.module_compilation import compiled_blocks
from everyframe.fast_paths.compilation.package_store import Package, files_of
from everyframe.fast_paths.modules import residual_blocks
from everyframe.fast_paths.modules.convolution_modules import saves_products
from everyframe.fast_paths.modules.fast_modules import embedders, forget, keep
from everyframe.fast_paths.registry import FastPath
from everyframe.hardware.device_loss import parse_device_loss
from everyframe.hardware.isolation import ends_after
from everyframe.hardware.memory import is_out_of_memory, keep_freed_memory
from everyframe.hardware.throughput import reduced_sizes
from everyframe.ops.native import library
from everyframe.precision.dtypes import torch_dtype
from everyframe.precision.quantization import layers
from everyframe.precision.strict_float32 import strict_float32

#: Compiled code that the path on trial used.
_PACKAGES: list[Package] = []

#: FLOPs to which one attention or product of a trial is cut.
_CPU_OPERATIONS, _CARD_OPERATIONS = 4e8, 2e11

#: Number of different attentions or products that are tried per component, the most expensive.
_MOST = 4

#: Number of different modules that are tried per component, and of an input's elements.
_MOST_MODULES, _MOST_ELEMENTS = 8, 2**22

#: The same of residual blocks, whose convolutions take longer.
_MOST_BLOCKS, _FEW_ELEMENTS = 2, 2**18

#: Allowed error of a half precision product against float32: some roundings of operands and result.
#: Blocks of models in bfloat16 were measured at 0.3 to 2 %; 5 % is a defect. Products in eight bits
#: were measured at 0.7 to 3 %.
ALLOWED = {"bfloat16": 2e-2, "float16": 3e-3, "int8-dynamic": 5e-2, "fp8-scaled": 5e-2}

#: Timed calls by which one of two implementations of a convolution is chosen; the first is slower.
_CALLS = 4

#: Steps of a simulated run, in which some numbers repeat.
_STEPS = 20


class CompilerFailedError(Exception):
    """No block could be compiled, as the compiler failed."""


def precision(subject: CertificationTarget, path: FastPath) -> Iterator[Comparison]:
    """Compare the most expensive products and convolutions in half precision with float32.

    These are the layers; operations between them stay as wide as the islands demand. Convolutions
    are computed as a run on a CPU does in either dtype, by Winograd's algorithm where it is faster.
    That needs more places than wide convolutions over frames have here. These are compared by
    torch's kernels, which runs have that are too short for trials of others.
    """
    for product, weight in (*heaviest(subject, "product"), *heaviest(subject, "convolution")):
        if product.dtype not in ALLOWED:
            continue
        dtype = torch_dtype(product.dtype)
        multiply: Callable[..., Tensor]
        if product.kind == "convolution":
            x, y, cut = _filters(product, subject)
            multiply = partial(_convolve, product.parameters)
        else:
            x, y, cut = _factors(product, subject)
            multiply = F.linear if len(product.shapes[-2]) == 2 else torch.bmm
        in_float32, in_half = (x, y), (x.to(dtype), y.to(dtype))
        wide, narrow = (partial(multiply, *factors) for factors in (in_float32, in_half))
        plain: Callable[[], Tensor] = wide
        fast: Callable[[], Tensor] = narrow
        if product.kind == "convolution" and subject.device.kind == "cpu":
            plain = _faster(wide, _by_winograd(product, *in_float32))
            fast = _faster(narrow, _by_winograd(product, *in_half))
        name = f"{product.kind} of {sizes_of(product)} in {product.dtype}"
        compare = partial(Comparison, name, wide, plain, allowed=ALLOWED[product.dtype])
        if fast is not narrow:  # which a run without that path computes
            yield compare(narrow, weight=0.0)
        yield compare(fast, weight=weight * cut)


def block(subject: CertificationTarget, path: FastPath) -> Iterator[Comparison]:
    """Compare each kind of block with the fast path applied to the block without it."""
    for each in blocks_of(subject):
        if applies_to(path.name, BlockLocation(each.module)):
            yield each.compare(each.alone(()), each.alone((path.name,)))


def compiled(subject: CertificationTarget, path: FastPath) -> Iterator[Comparison]:
    """Compare each kind of block compiled with the block as written.

    The packages that were used or made stay in the store, for the run.

    Raises:
        CompilerFailedError: the compiler fails, which says nothing about the blocks.
        RuntimeError: no block can be compiled, or none is faster; says why.
    """
    made: list[CompiledBlock] = []
    for each in blocks_of(subject):
        fast = each.alone((*subject.paths, path.name))
        yield each.compare(each.alone(subject.paths), fast)
        made += compiled_blocks(fast).values()
    if made and not any(block.is_compiled for block in made):
        notes = sorted({note for block in made for note in block.report.notes})
        has_failed = any(note.startswith(FAILS) for note in notes)
        raise (CompilerFailedError if has_failed else RuntimeError)("; ".join(notes))
    # Those alone that load at once: torch.compile's code is no reason to compile a short run.
    _PACKAGES.extend(package for block in made for package in block.report.packages.values())


def modules(subject: CertificationTarget, path: FastPath) -> Iterator[Comparison]:
    """Compare the heaviest kinds of modules that the path replaces, one by one, on fewer rows."""
    names: Callable[[nn.Module], Iterable[str]] = partial(places_of, path.name)
    if path.closeness == "lossy":
        names = partial(layers, precision=replace(subject.precision, weight_dtype=path.name))
    for each in blocks_of(subject, names, most=_MOST_MODULES, most_elements=_MOST_ELEMENTS):
        part, fast = each, each.alone((*path.rivals, path.name))
        if omitted := getattr(fast.blocks[0], "unchanged", ()):
            part = replace(each, omitted=omitted)
            fast = part.alone((*path.rivals, path.name))
        yield part.compare(part.alone(path.rivals), fast, kind="", allowed=ALLOWED.get(path.name))


def norms(subject: CertificationTarget, path: FastPath) -> Iterator[Comparison]:
    """Compare norms as `modules`, and the blocks in which they apply SiLU for their error alone."""
    yield from modules(subject, path)
    for each in blocks_of(
        subject, residual_blocks.places, most=_MOST_BLOCKS, most_elements=_FEW_ELEMENTS
    ):
        fused = each.compare(each.alone(()), each.alone((path.name,)))
        yield replace(fused, weight=0.0)


def embeddings(subject: CertificationTarget, path: FastPath) -> Iterator[Comparison]:
    """Compare scalar embeddings over all steps of a run, with and without the cache."""
    steps: dict[str, bool] = {}
    for call in subject.calls:
        steps |= embedders(call.module())
    # Equal parts stand for each other, and here it matters which number comes again.
    for name, is_new in steps.items():
        for each in blocks_of(subject, lambda module, name=name: {name} & {*embedders(module)}):  # type: ignore[misc]
            cached = each.alone(())
            keep(cached, ("blocks.0",))
            yield Comparison(
                f"{name} in {_STEPS} steps",
                truth=partial(
                    _run_steps, each.alone((), in_float32=True), each.wide, is_new=is_new
                ),
                plain=partial(_run_steps, each.alone(()), each.given, is_new=is_new),
                fast=partial(_run_steps, cached, each.given, is_new=is_new),
            )


def _run_steps(module: BlockLocation, given: BlockInputs, *, is_new: bool) -> list[Tensor]:
    """Results of a module over `_STEPS` steps; its number changes at each step if `is_new`."""
    forget(module)
    number, *rest = given.args
    return [
        module(number + step if is_new else number, *rest, **given.kwargs) for step in range(_STEPS)
    ]


def heaviest(subject: CertificationTarget, kind: str) -> list[tuple[OpShape, float]]:
    """The most expensive products of that kind; products that differ only in rows are merged."""
    alike: dict[Any, tuple[OpShape, float]] = {}
    for product, operations in subject.products:
        if product.kind == kind:
            key = (product.dtype, product.parameters, *_unlike(product))
            first, before = alike.get(key, (product, 0.0))
            alike[key] = (first, before + operations)
    return sorted(alike.values(), key=lambda pair: pair[1], reverse=True)[:_MOST]


def _unlike(product: OpShape) -> list[tuple[int, ...]]:
    """Sizes that distinguish two products of a kind."""
    if product.kind == "convolution":
        return [product.shapes[0][1:2], product.shapes[1]]
    return [shape[-2:] if product.kind == "attention" else shape[-1:] for shape in product.shapes]


def operations_of_a_trial(subject: CertificationTarget) -> float:
    """FLOPs to which one attention or product of a trial is cut."""
    return _CPU_OPERATIONS if subject.device.kind == "cpu" else _CARD_OPERATIONS


def _factors(product: OpShape, subject: CertificationTarget) -> tuple[Tensor, Tensor, float]:
    """Two float32 factors with fewer rows, and the inverse of the trial's FLOPs."""
    number, rows, inner, columns = reduced_sizes(product, operations_of_a_trial(subject))
    generator = torch.Generator().manual_seed(0)

    def filled(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(subject.device.torch_name)

    one = 1 / (2 * number * rows * inner * columns)
    if len(product.shapes[-2]) > 2:
        return filled(number, rows, inner), filled(number, inner, columns), one
    # As the weight of a linear layer lies in memory.
    return filled(rows, inner), filled(columns, inner) / inner**0.5, one


def _filters(product: OpShape, subject: CertificationTarget) -> tuple[Tensor, Tensor, float]:
    """A convolution's reduced float32 input, its weight, and the inverse of the trial's FLOPs."""
    (batch, channels, *sides), weight = product.shapes[:2]
    least = [2 * side for side in weight[2:]]
    inner = weight[0] * prod(weight[1:])
    while batch * prod(sides) * 2 * inner > operations_of_a_trial(subject):
        if batch > 1:
            batch = (batch + 1) // 2
            continue
        longest = max(range(len(sides)), key=lambda axis: sides[axis] / least[axis])
        if sides[longest] <= least[longest]:
            break
        sides[longest] = max(least[longest], sides[longest] // 2)
    generator = torch.Generator().manual_seed(0)
    device = subject.device.torch_name
    x = torch.randn((batch, channels, *sides), generator=generator).to(device)
    y = torch.randn(weight, generator=generator).to(device) / prod(weight[1:]) ** 0.5
    return x, y, 1 / (2 * batch * prod(sides) * inner)


def _convolve(parameters: tuple[Any, ...], x: Tensor, weight: Tensor) -> Tensor:
    return torch.convolution(x, weight, None, *parameters)


def _by_winograd(product: OpShape, x: Tensor, weight: Tensor) -> Callable[[], Tensor] | None:
    """The convolution by the path ``winograd``; None if that has no place, or too few places."""
    stride, padding, dilation, is_transposed, _, groups = product.parameters
    if is_transposed or weight.ndim not in (4, 5):
        return None
    outputs, inputs, *kernel = weight.shape
    kind: Any = nn.Conv2d if weight.ndim == 4 else nn.Conv3d
    conv: Any = kind(
        inputs * groups, outputs, tuple(kernel), tuple(stride), tuple(padding), tuple(dilation),
        groups, bias=False, device="meta",
    )  # fmt: skip
    model = nn.Sequential(conv)
    if not applies_to("winograd", model):
        return None
    conv.weight = nn.Parameter(weight, requires_grad=False)
    *frames, height, width = (
        side + 2 * pad + 1 - taps
        for side, pad, taps in zip(x.shape[2:], padding, kernel, strict=True)
    )
    if not saves_products(conv, len(x) * prod(frames), height, width):
        return None  # it would compute as torch does
    swap_modules(model, ("winograd",))
    return partial(model, x)


def _faster(
    usual: Callable[[], Tensor], other: Callable[[], Tensor] | None
) -> Callable[[], Tensor]:
    """The one whose fastest call on a CPU takes less time."""
    if other is None:
        return usual
    least = [min(measure_seconds(each, "cpu") for _ in range(_CALLS)) for each in (usual, other)]
    return other if least[1] < least[0] else usual


def sizes_of(product: OpShape) -> str:
    """The operands' last sizes, for a message."""
    return " by ".join("x".join(map(str, shape)) for shape in product.shapes[-3:][:2])


@dataclass(frozen=True)
class TrialRequest:
    """Work order of a trial process.

    A trial that runs `grace` seconds past its deadline counts as hung and ends the process. Time
    counts once the kernels in C are loaded, which the first process on a machine compiles.

    Attributes:
        subject: the component.
        paths: fast paths to try, in order.
        log: file that receives one line of JSON per event.
        seconds: time limit.
        grace: seconds.
    """

    subject: CertificationTarget
    paths: tuple[FastPath, ...]
    log: str
    seconds: float
    grace: float

    @property
    def uses_kernels(self) -> bool:
        """Whether trials call our kernels in C; convolutions in a precision are tried by them."""
        needed = any(path.needs_c or path.group == "precision" for path in self.paths)
        return needed and self.subject.device.kind == "cpu"


def run(orders: TrialRequest) -> None:
    """Try the paths one after the other, in this process."""
    no_kernels = _load_kernels() if orders.uses_kernels else ""
    began = time.monotonic()
    device = orders.subject.device.torch_name
    torch.set_num_threads(orders.subject.num_threads)
    keep_freed_memory(device == "cpu")  # as a run on a CPU does
    with open(orders.log, "a", encoding="utf-8") as file:
        file.write(json.dumps({"ready": time.time()}) + "\n")

        def log(path: FastPath, **values: Any) -> None:
            file.write(json.dumps({"path": path.name, **values}) + "\n")
            file.flush()
            os.fsync(file.fileno())

        for path in orders.paths:
            left = began + orders.seconds - time.monotonic()
            if left <= 0:
                break
            if path.needs_c and no_kernels:
                log(path, not_made=no_kernels)
                continue
            log(path, began=True)
            with ends_after(left + orders.grace), strict_float32(), torch.inference_mode():
                values = _try(path, orders.subject, device, began + orders.seconds)
            is_over = values.pop("is_over", False)
            log(path, **values)
            if is_over:
                break


def _load_kernels() -> str:
    """Compile and load the kernels in C; why there are none, or an empty text."""
    try:
        library.load()
    except library.NoLibraryError as error:
        return str(error)
    return ""


def _try(
    path: FastPath, subject: CertificationTarget, device: str, deadline: float
) -> dict[str, Any]:
    try:
        contests = import_function(path.trial)(subject, path)
        outcome = run_comparisons(contests, device, deadline, is_exact=path.closeness == "exact")
    except OutOfTimeError:
        return {"out_of_time": True}
    except CompilerFailedError as error:
        return {"not_made": str(error)}
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the verdict
        message = " ".join((str(error) or type(error).__name__).split())[:200]
        if is_out_of_memory(error):
            return {"out_of_memory": message}
        loss = parse_device_loss(error)
        if loss is None:
            return {"error_text": message}
        # Whatever this process tried next would fail too, without being to blame.
        return {"lost" if loss.is_of_the_card else "error_text": message, "is_over": True}
    values = {
        "error": outcome.error, "limit": outcome.limit, "gain": outcome.gain,
        "worst": outcome.worst,
    }  # fmt: skip
    files = sorted({file for package in _PACKAGES for file in files_of(package)})
    _PACKAGES.clear()
    return {**values, "packages": files}
