"""Dry-run counters: FLOPs by kind and dtype, bytes moved, live memory, kernel workspace.

FLOPs of products come from torch (`torch.utils.flop_counter`); every other operation costs the
bytes that it reads and writes. `everyframe.hardware.throughput` knows how fast a device is, and
`everyframe.core.bytes` turns both into seconds.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from everyframe.core.facts import DeviceFacts, OpShape
from everyframe.core.plan import Precision
from everyframe.dry_run import rules
from everyframe.dry_run.result import DryRunFinding, DryRunResult, Work
from everyframe.ops.device import operation_repeats
from everyframe.precision.dtypes import dtype_name

#: Operations that compute longer than their bytes take to move, with the factor. Measured on a CPU
#: with AVX-512: GELU of 39 million float32 took 6.4 ns each, moving them 2 ns.
_COSTLY = {"aten::gelu": 3}


#: Larger blocks are mapped by the system each time, as in glibc: new, and zeroed page by page.
MAPPED = 32 << 20


@dataclass(frozen=True)
class OperationCost:
    """What one operation that is not a view costs, by the sizes of its tensors.

    Attributes:
        moved: bytes read and written, weighted by how long they take; 0 for products.
        mapped: bytes of new blocks that the system maps.
        workspace: bytes of the kernel's temporary memory.
        product: its shapes if it is a product or convolution, with `flops`.
        dtypes: of its floating operands, or of its results without any.
        problems: (kind, problem) of what the device can't compute, or not well.
    """

    moved: float
    mapped: int
    workspace: int
    product: OpShape | None
    flops: int
    dtypes: tuple[str, ...]
    problems: tuple[tuple[str, str], ...]

    @classmethod
    def of(
        cls,
        func: Any,
        args: Sequence[Any],
        ins: Sequence[Tensor],
        outs: Sequence[Tensor],
        device: DeviceFacts,
    ) -> OperationCost:
        """The cost of ``func(*args)`` with operands `ins` and results `outs`."""
        name = func._schema.name
        product, flops, moved = None, 0, 0.0
        if (count := flop_registry.get(func._overloadpacket)) is None:
            moved = sum(each.nbytes for each in (*ins, *outs)) * _COSTLY.get(name, 1)
        else:
            product, flops = _product(name, args, ins, outs), count(*args, out_val=outs[0])
        large = 0 if _is_in_place(func) else sum(t.nbytes for t in outs if t.nbytes > MAPPED)
        floating = (each.dtype for each in (ins or outs) if each.is_floating_point())
        return cls(
            moved=moved,
            mapped=large,
            workspace=_workspace(name, ins, outs, device),
            product=product,
            flops=flops,
            dtypes=tuple(map(dtype_name, floating)),
            problems=(
                *rules.check_device(name, ins, outs, device),
                *rules.check_statistics(name, args, ins),
            ),
        )


def _product(
    name: str, args: Sequence[Any], ins: Sequence[Tensor], outs: Sequence[Tensor]
) -> OpShape:
    is_convolution = "convolution" in name
    more = args[3:] if is_convolution else ()
    parameters = tuple(tuple(each) if isinstance(each, (list, tuple)) else each for each in more)
    shapes = tuple(tuple(tensor.shape) for tensor in ins)
    kind = "convolution" if is_convolution else "product"
    return OpShape(kind, dtype_name(outs[0].dtype), shapes, parameters)


class WorkCounter:
    """Accumulate the work of operations; `total` returns it."""

    def __init__(self) -> None:
        self._products: Counter[OpShape] = Counter()
        self._moved = self._kernels = self._mapped = 0.0

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> None:
        """Count one fused attention, (B, heads, Q, D) with (B, heads, L, D)."""
        shapes = (tuple(query.shape), tuple(key.shape), tuple(value.shape))
        parameters = () if mask is None else ("masked",)
        product = OpShape("attention", dtype_name(query.dtype), shapes, parameters)
        count = sdpa_flop_count(*shapes)  # type: ignore[no-untyped-call]
        self._products[product] += int(count * operation_repeats())
        self._kernels += operation_repeats()

    def operation(self, cost: OperationCost) -> None:
        """Count one operation that is not a view."""
        repeats = operation_repeats()
        self._kernels += repeats
        self._mapped += repeats * cost.mapped
        self._moved += repeats * cost.moved
        if cost.product is not None:
            self._products[cost.product] += int(cost.flops * repeats)

    def total(self) -> Work:
        """Work so far."""
        return Work(
            tuple(self._products.items()), int(self._moved), int(self._kernels), int(self._mapped)
        )


@cache
def _is_in_place(func: Any) -> bool:
    return any(each.alias_info is not None for each in func._schema.returns)


class MemoryTracker:
    """Live and peak memory in bytes (`now`, `peak`), and the operation at the peak (`peak_at`)."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self.peak_at = ""
        self._seen: dict[int, weakref.ref[Any]] = {}

    def add_old(self, tensors: Iterable[Tensor]) -> None:
        """Register tensors that existed before; they are not counted."""
        for tensor in tensors:
            self._add(tensor, 0)

    def add_new(self, tensors: Iterable[Tensor], place: str) -> None:
        """Count tensors that an operation at `place` made; views of known tensors count nothing."""
        for tensor in tensors:
            self._add(tensor, tensor.untyped_storage().nbytes())
        self._at_most(self.now, place)

    def workspace(self, num_bytes: int, place: str) -> None:
        """Count a kernel's temporary memory at `place`, beside its operands."""
        self._at_most(self.now + num_bytes, place)

    def take_peak(self) -> tuple[int, str]:
        """Return `peak` and `peak_at`, and reset them."""
        taken = self.peak, self.peak_at
        self.peak, self.peak_at = self.now, ""
        return taken

    def _add(self, tensor: Tensor, size: int) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._seen:
            return
        self.now += size

        def gone(_: object) -> None:
            del self._seen[key]
            self.now -= size

        self._seen[key] = weakref.ref(storage, gone)

    def _at_most(self, num_bytes: int, place: str) -> None:
        if num_bytes > self.peak:
            self.peak, self.peak_at = num_bytes, place


#: Most findings stored per component, as a broken module repeats itself.
MAX_FINDINGS = 20


class ComponentTally:
    """Findings, work and peak memory of one component."""

    def __init__(self, precision: Precision | None) -> None:
        self.islands = precision.islands if precision is not None else ()
        self.num_operations = self.num_passes = self.peak = 0
        self.peak_at = ""
        self.work = WorkCounter()
        self.findings: list[DryRunFinding] = []
        self.seen: dict[tuple[str, str, str], None] = {}

    def found(self) -> DryRunResult:
        return DryRunResult(
            num_operations=self.num_operations,
            num_passes=max(self.num_passes, 1),
            findings=tuple(dict.fromkeys(self.findings)),
            working_bytes=self.peak,
            peak_at=self.peak_at,
            work=self.work.total(),
            seen=tuple(self.seen),
        )


#: Below this product of an input's first four sizes PyTorch uses its own 3-D convolution, which
#: materialises every patch, instead of oneDNN's.
_OWN_CONVOLUTION = 20480


def _workspace(
    operation: str, tensors: Sequence[Tensor], results: Sequence[Tensor], device: DeviceFacts
) -> int:
    """Bytes of temporary memory that a kernel needs beside `tensors` and `results`."""
    if operation == "aten::_safe_softmax":  # notes which values are -inf, on every device
        return tensors[0].numel()
    if device.kind != "cpu" or not tensors:
        return 0
    if operation == "aten::native_group_norm":
        return _in_one_piece(tensors[0])
    if operation != "aten::convolution":
        return 0
    given, weight, made = tensors[0], tensors[1], results[0]
    kernel = tuple(weight.shape[2:])
    copies = _in_one_piece(given)
    if prod(kernel) == 1:
        return copies
    small = given.ndim == 5 and prod(given.shape[:4]) <= _OWN_CONVOLUTION
    if small or (len(kernel) == 3 and kernel[1:] == (1, 1)):
        return copies + prod(kernel) * given.nbytes  # patches written out
    return copies + max(given.nbytes, made.nbytes)  # blocks of channels


def _in_one_piece(tensor: Tensor) -> int:
    return 0 if tensor.is_contiguous() else tensor.nbytes
