"""Rates are measured on the products and the kernels that a plan names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from everyframe.core.facts import Product
from everyframe.hardware.rates import measured_rates

SHAPES = ((1, 2, 16, 8),) * 3


def test_attention_is_tried_by_its_kernel_and_with_its_mask() -> None:
    asked: list[str] = []

    @contextmanager
    def kernels(name: str) -> Iterator[None]:
        asked.append(name)
        yield

    products = [
        Product("attention", "float32", SHAPES, told)
        for told in ((), ("masked",), ("masked", "math"))
    ]
    rates = measured_rates(products, "cpu", 1, kernels)
    assert asked == ["math"]
    assert [product for product, _ in rates.measured] == products
    assert all(rate > 0 for _, rate in rates.measured)
    # A system hands out memory more slowly than nothing, and not a thousand times as slowly.
    assert rates.mapping is not None
    assert rates.memory / 1000 < rates.mapping
