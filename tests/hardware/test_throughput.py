"""Rates are measured on the products and the kernels that a plan names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from everyframe.core.facts import DeviceFacts, OpShape, Throughput
from everyframe.hardware.throughput import _convolution, measured_rates, with_fp16_tried

SHAPES = ((1, 2, 16, 8),) * 3


def test_attention_is_tried_by_its_kernel_and_with_its_mask() -> None:
    asked: list[str] = []

    @contextmanager
    def kernels(name: str) -> Iterator[None]:
        asked.append(name)
        yield

    products = [
        OpShape("attention", "float32", SHAPES, options)
        for options in ((), ("masked",), ("masked", "math"))
    ]
    rates = measured_rates(products, "cpu", 1, kernels)
    assert asked == ["math"]
    assert [product for product, _ in rates.measured] == products
    assert all(rate > 0 for _, rate in rates.measured)
    # A system hands out memory more slowly than nothing, and not a thousand times as slowly.
    assert rates.mapping is not None
    assert rates.memory / 1000 < rates.mapping


def test_fp16_on_a_cpu_is_tried_here_and_read_of_one_that_is_not() -> None:
    here = DeviceFacts("a processor", "cpu", None, 1, 1)
    slowdown = with_fp16_tried(here).fp16_slowdown
    assert slowdown is not None
    assert slowdown > 0
    made_up = Throughput((("float32", 8e11), ("float16", 4e9)), memory=1e10, load=1e9, source="")
    assert with_fp16_tried(replace(here, rates=made_up)).fp16_slowdown == 200
    unknown = replace(here, rates=replace(made_up, products=(("float32", 8e11),)))
    assert with_fp16_tried(unknown) is unknown
    card = replace(here, kind="cuda")
    assert with_fp16_tried(card) is card


def test_a_trial_is_short_however_large_the_convolution() -> None:
    """One of an autoencoder of video is seconds at its own size, for each of its frames.

    Three frames can't be fewer under a kernel of three, so rows and columns are.
    """
    most = 6e8
    for sides, kernel in (((3, 544, 992), (3, 3, 3)), ((544, 992), (3, 3))):
        options = (*((number,) * len(sides) for number in (1, 0, 1)), False, (0,) * len(sides), 1)
        product = OpShape(
            "convolution", "float32", ((2, 512, *sides), (512, 512, *kernel)), options
        )
        run, operations = _convolution(product, "cpu", most)
        out = run()
        assert isinstance(out, torch.Tensor)
        assert operations == 2 * out.numel() * 512 * prod(kernel)
        # Its weights are large: enough places for them to be worth their reading.
        assert most < operations < 2 * 2048 * 512 * 512 * prod(kernel)
        assert out[0, 0].numel() > 128


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_convolution_is_counted_as_torch_counts_it(is_transposed: bool, groups: int) -> None:
    """A dry run counts as torch does: a transposed one seemed 4 times as fast, at a stride of 2."""
    pairs = ((2, 2), (1, 1), (1, 1))
    options = (*pairs, is_transposed, (0, 0), groups)
    product = OpShape("convolution", "float32", ((2, 8, 9, 7), (8, 8 // groups, 4, 4)), options)
    run, operations = _convolution(product, "cpu", 1e9)
    with FlopCounterMode(display=False) as counter:
        run()
    assert operations == counter.get_total_flops()
