"""Throughput measurement: time the operations that a plan spends its time on.

A few operations, each cut to some hundredths of a second, and one pass over memory: under a second
in all, once a process. A machine that is not present has a maker's rates instead (`profiles`).
`everyframe.planning.throughput_cache` stores the trials and `everyframe.planning.dry_runs` turns
them into seconds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Hashable, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from everyframe.core.facts import DeviceFacts, OpShape, Throughput
from everyframe.hardware.cpu import cpu_threads
from everyframe.hardware.memory import empty_cache

if TYPE_CHECKING:
    from torch import Tensor

#: Operations of one trial at most.
_CPU_OPERATIONS, _CARD_OPERATIONS = 6e8, 2e11

#: Positions that a convolution is timed on at least: on a few of them it is slow.
_PLACES = 2048

#: Bytes of the tensor in the memory trial. On a CPU the first is below the size from which an
#: allocator asks the system each time, and `_MAPPED_BYTES` above it.
_CPU_BYTES, _CARD_BYTES = 16 << 20, 512 << 20
_MAPPED_BYTES = 64 << 20

#: A trial is repeated until it took so many seconds in all, or so many times.
_ENOUGH, _MOST_RUNS = 0.1, 8

#: Bytes a second from a file in the page cache into place, cast on the way. Measured on a server
#: with local disks; a first read from disk is slower and cannot be predicted.
_LOAD = 1.2e9


#: A trial is sufficient if it waited for a core for at most this share of its time. Otherwise more
#: trials follow, up to this number, and the fastest counts.
_WAITED, ENOUGH_TRIALS = 0.05, 3

Kernels = Callable[[str], AbstractContextManager[None]]
"""Returns a context in which SDPA uses the kernel of that name."""

Saved = MutableMapping[str, list[float]]
"""Name -> number of trials of a device with so many threads, then their results, larger meaning
faster. `ENOUGH_TRIALS` also marks a trial that did not wait.
"""

#: Trials of this process.
_TRIED: dict[Hashable, list[float]] = {}
_MAX_TRIED = 512


def measured_rates(
    products: Sequence[OpShape],
    device: str,
    num_threads: int,
    kernels: Kernels | None = None,
    saved: Saved | None = None,
) -> Throughput:
    """Rates of these operations, and of memory, on a device.

    Args:
        products: operations to time.
        device: torch's device name.
        num_threads: CPU threads.
        kernels: context that selects the attention kernel that a product names.
        saved: earlier trials; sufficient ones are not repeated, and new trials are added.

    Memory of a card is given back, as another process may be the one that computes.
    """
    try:
        return _measured_rates(products, device, num_threads, kernels, saved)
    finally:
        if device != "cpu":
            empty_cache()


def _measured_rates(
    products: Sequence[OpShape],
    device: str,
    num_threads: int,
    kernels: Kernels | None,
    saved: Saved | None,
) -> Throughput:
    saved = {} if saved is None else saved

    def tried(name: str, trial: Callable[[str, int], tuple[float, ...]]) -> list[float]:
        key = (name, device, num_threads, kernels)
        if key not in _TRIED:
            while len(_TRIED) >= _MAX_TRIED:
                del _TRIED[next(iter(_TRIED))]
            _TRIED[key] = _best(name, partial(trial, device, num_threads), saved)
        return _TRIED[key]

    measured = tuple(
        (product, tried(_name(product), partial(_rate, product, kernels))[0])
        for product in products
    )
    by_dtype: dict[str, float] = {}
    for product, rate in measured:
        by_dtype[product.dtype] = min(rate, by_dtype.get(product.dtype, rate))
    memory, launches = tried("memory", _memory)
    return Throughput(
        products=tuple(by_dtype.items()) or (("float32", memory),),
        memory=memory,
        load=_LOAD,
        source="measured here",
        launch=1 / launches,
        measured=measured,
        mapping=tried("mapping", _measure_mapping)[0] if device == "cpu" else None,
    )


def with_fp16_tried(device: DeviceFacts) -> DeviceFacts:
    """CPU facts with the measured slowdown of float16 products relative to float32.

    The CPU present is timed for a tenth of a second, because its flags do not say what torch does
    with them. A profile's slowdown follows from its rates. Other devices are returned unchanged.
    """
    if device.kind != "cpu":
        return device
    if device.rates is not None:
        known = dict(device.rates.products)
        if not {"float32", "float16"} <= known.keys():
            return device
        return replace(device, fp16_slowdown=known["float32"] / known["float16"])
    tried = [[_rate(product(dtype), None, "cpu", 1)[0] for dtype in ("float32", "float16")]
             for product in _OF_BOTH]  # fmt: skip
    return replace(device, fp16_slowdown=max(wide / narrow for wide, narrow in tried))


#: A linear layer and a convolution, of which the slower counts. They are small because some CPUs
#: take hundreds of times as long in float16.
_OF_BOTH: tuple[Callable[[str], OpShape], ...] = (
    lambda dtype: OpShape("product", dtype, ((64, 256), (256, 256))),
    lambda dtype: OpShape(
        "convolution",
        dtype,
        ((1, 32, 16, 16), (32, 32, 3, 3)),
        ((1, 1), (1, 1), (1, 1), False, (0, 0), 1),
    ),
)


def _name(product: OpShape) -> str:
    return json.dumps([product.kind, product.dtype, product.shapes, product.parameters])


def _best(name: str, trial: Callable[[], tuple[float, ...]], saved: Saved) -> list[float]:
    """Best of the saved trials and, if these are insufficient, of one more trial."""
    number, *before = saved.get(name, [0.0])
    if number >= ENOUGH_TRIALS:
        return before
    began, waited = time.perf_counter(), _waited_seconds()
    found = list(trial())
    after = _waited_seconds()
    if before:
        found = [max(pair) for pair in zip(found, before, strict=True)]
    share = (after - waited) / (time.perf_counter() - began) if after and waited else 1.0
    saved[name] = [ENOUGH_TRIALS if share < _WAITED else number + 1, *found]
    return found


def _waited_seconds() -> float | None:
    """Seconds that threads of this process have waited for a core; None if not reported.

    It is the second number of a thread's ``schedstat``, in ns.
    """
    try:
        texts = [each.read_text() for each in Path("/proc/self/task").glob("*/schedstat")]
    except OSError:  # a thread has just ended
        return None
    return sum(int(text.split()[1]) for text in texts) / 1e9 if texts else None


def _rate(product: OpShape, kernels: Kernels | None, device: str, num_threads: int) -> tuple[float]:
    """Operations a second of one operation, which is cut down if large."""
    most = _CPU_OPERATIONS if device == "cpu" else _CARD_OPERATIONS
    with cpu_threads(num_threads):
        run, operations = _TRIALS[product.kind](product, device, most)
        with (
            kernels(product.parameters[-1]) if kernels and _names_kernel(product) else nullcontext()
        ):
            return (operations / _seconds(run, device),)


def _names_kernel(product: OpShape) -> bool:
    return product.kind == "attention" and product.parameters not in ((), ("masked",))


def _measure_mapping(device: str, num_threads: int) -> tuple[float]:
    """Bytes a second at which the system hands out zeroed memory, the time of use subtracted."""
    import torch

    with cpu_threads(num_threads):
        there = torch.empty(_MAPPED_BYTES // 4)
        used = _seconds(lambda: there.fill_(0.5), device)
        fresh = _seconds(lambda: torch.empty(_MAPPED_BYTES // 4).fill_(0.5), device)
    return (_MAPPED_BYTES / max(fresh - used, 1e-7),)


def _memory(device: str, num_threads: int) -> tuple[float, float]:
    """Bytes read and written a second, and launches of tiny operations a second."""
    import torch

    size = _CPU_BYTES if device == "cpu" else _CARD_BYTES
    with cpu_threads(num_threads):
        x = torch.ones(size // 4, device=device)
        few = torch.ones(8, device=device)
        passing = _seconds(lambda: torch.nn.functional.silu(x) + x, device)
        launching = _seconds(lambda: [few + few for _ in range(100)], device)
        return 5 * size / passing, 100 / launching


def _seconds(run: Callable[[], object], device: str) -> float:
    """Fastest of a few runs after a warm-up, which may choose kernels.

    Other load on the machine makes runs slower and never faster, so the minimum counts.
    """
    import torch

    def finished() -> float:
        wait_for_device(device)
        return time.perf_counter()

    taken: list[float] = []
    with torch.inference_mode():
        while len(taken) < 3 or (len(taken) < _MOST_RUNS and sum(taken) < _ENOUGH):
            began = finished()
            run()
            taken.append(finished() - began)
    return max(min(taken[1:]), 1e-7)


def reduced_sizes(product: OpShape, most: float) -> tuple[int, int, int, int]:
    """(batch, rows, inner, columns) of a matrix product, with fewer rows above `most` FLOPs."""
    left, right = product.shapes[-2:]
    *batch, rows, inner = left
    columns = right[-1]
    number = max(1, min(batch[0] if batch else 1, int(most / (2 * rows * inner * columns))))
    return number, max(1, min(rows, int(most / (2 * number * inner * columns)))), inner, columns


def _product(product: OpShape, device: str, most: float) -> tuple[Callable[[], object], float]:
    import torch

    number, rows, inner, columns = reduced_sizes(product, most)
    operations = 2.0 * number * rows * inner * columns
    if len(product.shapes[-2]) > 2:
        a = _operand((number, rows, inner), product, device)
        b = _operand((number, inner, columns), product, device)
        return lambda: torch.bmm(a, b), operations
    x = _operand((rows, inner), product, device)
    # The memory layout of a linear layer's weight.
    weight = _operand((columns, inner), product, device)
    return lambda: torch.nn.functional.linear(x, weight), operations


def _convolution(product: OpShape, device: str, most: float) -> tuple[Callable[[], object], float]:
    import torch
    from torch.utils.flop_counter import conv_flop_count

    given, kernel = list(product.shapes[0]), product.shapes[1]
    each = 2.0 * prod(kernel) * prod(given[2:])
    given[0] = max(1, min(given[0], int(most / each)))
    # Below one sample, rows of the first spatial dimension are dropped.
    if given[0] == 1 and each > most:
        fewer = int(given[2] * most / each)
        given[2], before = max(min(given[2], kernel[2]), min(given[2], fewer)), given[2]
        each *= given[2] / before
    # Then those of the other dimensions alike, for video.
    if each > 2 * most and len(given) > 3:
        share = (max(most, 2.0 * prod(kernel) * _PLACES) / each) ** (1 / len(given[3:]))
        for axis in range(3, len(given)):
            given[axis] = min(given[axis], max(kernel[axis], int(given[axis] * share)))
    x = _operand(given, product, device)
    weight = _operand(kernel, product, device)

    def run() -> Tensor:
        return torch.convolution(x, weight, None, *product.parameters)

    with torch.inference_mode():
        out = run()
    is_transposed = product.parameters[3]
    return run, float(conv_flop_count(given, list(kernel), list(out.shape), is_transposed))


def _attention(product: OpShape, device: str, most: float) -> tuple[Callable[[], object], float]:
    import torch

    (batch, heads, length, size), (_, _, keys, _), (*_, width) = product.shapes
    each = 2.0 * length * keys * (size + width)
    rows = max(1, min(batch * heads, int(most / each)))
    if rows == 1 and each > most:
        length = max(1, int(length * most / each))
    q = _operand((rows, 1, length, size), product, device)
    k = _operand((rows, 1, keys, size), product, device)
    v = _operand((rows, 1, keys, width), product, device)
    mask = _operand((length, keys), product, device) if "masked" in product.parameters else None
    operations = 2.0 * rows * length * keys * (size + width)

    def run() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return run, operations


_TRIALS = {"product": _product, "convolution": _convolution, "attention": _attention}


def _operand(shape: Sequence[int], product: OpShape, device: str) -> Tensor:
    import torch

    return torch.full(tuple(shape), 0.5, dtype=getattr(torch, product.dtype), device=device)


def wait_for_device(device: str) -> None:
    """Wait until a card has computed all that was given to it, before a look at the clock."""
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    elif device == "mps":
        torch.mps.synchronize()
