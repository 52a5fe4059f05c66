"""Counts the work of a dry run: operations of products by kind and dtype, bytes that pass by.

Operation counts of products are torch's own (`torch.utils.flop_counter`); everything else is taken
to cost the bytes that it reads and writes. Not here: how fast a device is
(`everyframe.hardware.rates`) and the seconds that follow (`everyframe.planning.forecast`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from everyframe.core.facts import Product
from everyframe.ops.device import times
from everyframe.precision.dry_run_result import Work
from everyframe.precision.dtypes import dtype_name

#: Operations that compute longer than their bytes take to pass, and how many times as long.
#: Measured on a CPU with AVX-512: GELU of 39 million float32 took 6.4 ns each, passing 2 ns.
_COSTLY = {"aten::gelu": 3}


#: Blocks beyond this are the system's own, as glibc hands them out: new, and zeroed page by page.
MAPPED = 32 << 20


class WorkCounter:
    """Adds up operations as they are seen; `total` gives them as a value."""

    def __init__(self) -> None:
        self._products: Counter[Product] = Counter()
        self._moved = self._kernels = self._mapped = 0.0

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> None:
        """One fused attention, (B, heads, Q, D) with (B, heads, L, D)."""
        shapes = (tuple(query.shape), tuple(key.shape), tuple(value.shape))
        told = () if mask is None else ("masked",)
        product = Product("attention", dtype_name(query.dtype), shapes, told)
        count = sdpa_flop_count(*shapes)  # type: ignore[no-untyped-call]
        self._products[product] += int(count * times())
        self._kernels += times()

    def operation(
        self, func: Any, args: Sequence[Any], ins: Sequence[Tensor], outs: Sequence[Tensor]
    ) -> None:
        """One operation that is no view, with its tensors."""
        self._kernels += times()
        self._mapped += times() * sum(
            size for size in map(_bytes, outs) if size > MAPPED and not _in_place(func)
        )
        count = flop_registry.get(func._overloadpacket)
        if count is None:
            passing = sum(map(_bytes, (*ins, *outs))) * times()
            self._moved += passing * _COSTLY.get(func._schema.name, 1)
            return
        is_convolution = "convolution" in func._schema.name
        kind = "convolution" if is_convolution else "product"
        told = tuple(_plain(each) for each in args[3:]) if is_convolution else ()
        shapes = tuple(tuple(tensor.shape) for tensor in ins)
        product = Product(kind, dtype_name(outs[0].dtype), shapes, told)
        self._products[product] += int(count(*args, out_val=outs[0]) * times())

    def total(self) -> Work:
        """Everything so far."""
        return Work(
            tuple(self._products.items()), int(self._moved), int(self._kernels), int(self._mapped)
        )


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _in_place(func: Any) -> bool:
    return any(each.alias_info is not None for each in func._schema.returns)


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, (list, tuple)) else value
