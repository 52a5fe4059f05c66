"""Convolutions by Winograd's algorithm in C against torch's in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from everyframe.ops.native import convolutions, kernels, library
from everyframe.ops.native.convolutions import Padding
from helpers.kernel_numbers import TOLERANCE, check, numbers

pytestmark = [
    pytest.mark.skipif(bool(missing := library.why_not()), reason=str(missing)),
    pytest.mark.usefixtures("inference_mode"),
]


@pytest.fixture(params=TOLERANCE, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    kind: torch.dtype = request.param
    return kind


@pytest.mark.parametrize(
    ("shape", "outputs"),
    [((1, 3, 1, 1), 5), ((2, 32, 8, 12), 32), ((1, 40, 7, 9), 70), ((3, 5, 2, 17), 16),
     ((5, 64, 33, 6), 33), ((2, 700, 5, 4), 300)],
)  # fmt: skip
def test_winograd(shape: tuple[int, ...], outputs: int, dtype: torch.dtype) -> None:
    """Of every rest of tiles, rows and lanes, and of more than one block of weights."""
    x, bias = numbers(*shape, dtype=dtype), numbers(outputs, dtype=dtype)
    weight = (numbers(outputs, shape[1], 3, 3) / (9 * shape[1]) ** 0.5).to(dtype)
    want = F.conv2d(x.double(), weight.double(), bias.double(), padding=1)
    got = convolutions.winograd(x, weight, bias)
    check(got, want, size=8.0)  # intermediate numbers are larger than the result
    assert kernels.is_channels_last(got)
    last = torch.channels_last
    again = convolutions.winograd(
        x.contiguous(memory_format=last), weight.to(memory_format=last), bias
    )
    assert torch.equal(got, again)
    without = convolutions.winograd(x, weight, None)
    check(without, want - bias.double()[:, None, None], size=8.0)


@pytest.mark.parametrize(
    ("shape", "outputs", "taps", "frame_padding", "pad"),
    [((2, 5, 3, 9, 7), 16, 3, (1, 1), 1), ((1, 40, 4, 10, 12), 33, 3, (2, 0), 1),
     ((2, 32, 5, 8, 11), 70, 3, (0, 0), 0), ((3, 48, 2, 3, 6), 32, 2, (1, 0), 0),
     ((1, 17, 1, 5, 5), 16, 3, (2, 0), 1), ((1, 300, 2, 6, 5), 200, 3, (1, 1), 1)],
)  # fmt: skip
def test_winograd_over_frames(
    shape: tuple[int, ...], outputs: int, taps: int, frame_padding: tuple[int, int], pad: int,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """Samples apart, frames of zeros in front and behind, pixels of zeros around or not."""
    x, bias = numbers(*shape, dtype=dtype), numbers(outputs, dtype=dtype)
    weight = numbers(outputs, shape[1], taps, 3, 3) / (9 * taps * shape[1]) ** 0.5
    weight = weight.to(dtype)
    padded = F.pad(x.double(), (pad, pad, pad, pad, *frame_padding))
    want = F.conv3d(padded, weight.double(), bias.double())
    got = convolutions.winograd_3d(x, weight, bias, Padding(frame_padding, pad))
    check(got, want, size=8.0)
    assert kernels.is_channels_last(got)
    last = torch.channels_last_3d
    x, weight = x.contiguous(memory_format=last), weight.to(memory_format=last)
    assert torch.equal(convolutions.winograd_3d(x, weight, bias, Padding(frame_padding, pad)), got)


@pytest.mark.parametrize(
    ("shape", "outputs", "frame_padding"),
    [((2, 5, 3, 9, 7), 16, (1, 1)), ((1, 40, 14, 5, 3), 33, (1, 1)), ((3, 32, 8, 1, 1), 70, (2, 0)),
     ((1, 300, 5, 6, 5), 200, (0, 0)), ((1, 17, 1, 2, 2), 16, (1, 3))],
)  # fmt: skip
def test_winograd_over_time(
    shape: tuple[int, ...], outputs: int, frame_padding: tuple[int, int], dtype: torch.dtype
) -> None:
    """Of every rest of tiles, rows and lanes; frames of zeros in front and behind."""
    x, bias = numbers(*shape, dtype=dtype), numbers(outputs, dtype=dtype)
    weight = (numbers(outputs, shape[1], 3, 1, 1) / (3 * shape[1]) ** 0.5).to(dtype)
    padded = F.pad(x.double(), (0, 0, 0, 0, *frame_padding))
    want = F.conv3d(padded, weight.double(), bias.double())
    got = convolutions.winograd_over_time(x, weight, bias, frame_padding)
    check(got, want, size=8.0)  # intermediate numbers are larger than the result
    assert kernels.is_channels_last(got)
    x = x.contiguous(memory_format=torch.channels_last_3d)
    assert torch.equal(convolutions.winograd_over_time(x, weight, bias, frame_padding), got)
    without = convolutions.winograd_over_time(x, weight, None, frame_padding)
    check(without, want - bias.double()[:, None, None, None], size=8.0)


def test_a_tile_of_winograd_depends_on_itself_alone() -> None:
    x, weight = numbers(9, 48, 10, 21), numbers(40, 48, 3, 3)
    whole = convolutions.winograd(x, weight, None)
    assert torch.equal(convolutions.winograd(x[4:5], weight, None), whole[4:5])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(convolutions.winograd(x, weight, None), whole)
    finally:
        torch.set_num_threads(threads)
    x[3, 7, 0, 0] = float("nan")
    seen = convolutions.winograd(x, weight, None)
    assert not seen[3, :, :2, :2].isfinite().any()
    assert torch.equal(seen[:3], whole[:3])
    assert torch.equal(seen[3, :, 4:], whole[3, :, 4:])


def test_a_frame_reaches_those_that_its_taps_reach() -> None:
    x, weight = numbers(2, 33, 6, 8, 8), numbers(32, 33, 3, 3, 3)
    whole = convolutions.winograd_3d(x, weight, None, Padding((2, 0), 1))
    x[1, 5, 2] = float("nan")
    seen = convolutions.winograd_3d(x, weight, None, Padding((2, 0), 1))
    assert torch.equal(seen[0], whole[0])
    assert not seen[1, :, 2:5].isfinite().any()
    for rest in (slice(0, 2), slice(5, 6)):
        assert torch.equal(seen[1, :, rest], whole[1, :, rest])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        found = convolutions.winograd_3d(x[:1], weight, None, Padding((2, 0), 1))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found, whole[:1])


def test_a_tile_over_time_depends_on_itself_alone() -> None:
    x, weight = numbers(3, 48, 10, 5, 7), numbers(40, 48, 3, 1, 1)
    whole = convolutions.winograd_over_time(x, weight, None, (1, 1))
    assert torch.equal(convolutions.winograd_over_time(x[1:2], weight, None, (1, 1)), whole[1:2])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(convolutions.winograd_over_time(x, weight, None, (1, 1)), whole)
    finally:
        torch.set_num_threads(threads)
    x[1, 7, 0, 2, 3] = float("nan")
    seen = convolutions.winograd_over_time(x, weight, None, (1, 1))
    assert not seen[1, :, :2, 2, 3].isfinite().any()
    whole[1, :, :4, 2, 3] = seen[1, :, :4, 2, 3] = 0
    assert torch.equal(seen, whole)
