"""The kernels in C against their formulas in float64, of sizes that fill no vector as well."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from everyframe.ops import rope
from everyframe.ops.native import convolutions, kernels, library
from helpers.kernel_numbers import TOLERANCE, check, numbers

pytestmark = [
    pytest.mark.skipif(bool(missing := library.why_not()), reason=str(missing)),
    pytest.mark.usefixtures("inference_mode"),
]


@pytest.fixture(params=TOLERANCE, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    kind: torch.dtype = request.param
    return kind


@pytest.mark.parametrize("is_last", [True, False])
@pytest.mark.parametrize(
    ("shape", "groups"),
    [((2, 32, 5, 7), 8), ((1, 320, 3, 3), 32), ((3, 12, 2, 9), 4), ((2, 64, 3, 33, 41), 32)],
)
def test_group_norm(shape: tuple[int, ...], groups: int, is_last: bool, dtype: torch.dtype) -> None:
    x = numbers(*shape, dtype=dtype, mean=30.0)  # whose squares would cancel
    if is_last:
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    weight, bias = numbers(shape[1]), numbers(shape[1] + 1)[:-1]
    for has_silu in (True, False):
        got = kernels.group_norm(x, groups, weight, bias, 1e-5, has_silu=has_silu)
        want = F.group_norm(x.double(), groups, weight.double(), bias.double(), 1e-5)
        check(got, F.silu(want) if has_silu else want, size=4.0)
        assert got.stride() == x.stride()


@pytest.mark.parametrize("is_last", [True, False])
@pytest.mark.parametrize("has_silu", [True, False])
def test_group_norm_by_a_map(is_last: bool, has_silu: bool, dtype: torch.dtype) -> None:
    """Each place is scaled and shifted by its own of the map, of both samples."""
    x, scale, shift = (numbers(2, 24, *size, dtype=dtype)
                       for size in ((3, 5, 7), (2, 3, 2), (2, 2, 3)))  # fmt: skip
    shift = shift.transpose(-1, -2)
    if is_last:
        x = x.contiguous(memory_format=torch.channels_last_3d)
    weight, bias = numbers(24), numbers(25)[:-1]
    places = torch.randint(12, (3, 5, 7), generator=torch.Generator().manual_seed(0))
    by = kernels.NormMap(scale, shift, places)
    got = kernels.group_norm(x, 4, weight, bias, 1e-5, has_silu=has_silu, by=by)
    want = F.group_norm(x.double(), 4, weight.double(), bias.double(), 1e-5)
    at = [each.double().flatten(2)[:, :, places.flatten()].view(x.shape) for each in (scale, shift)]
    want = want * at[0] + at[1]
    check(got, F.silu(want) if has_silu else want, size=8.0)
    assert kernels.is_channels_last(got)


def test_a_map_that_does_not_fit_is_refused() -> None:
    """C would read beyond its end."""
    x, one, map_ = numbers(2, 8, 3, 3, 3), torch.ones(8), numbers(2, 8, 1, 2, 2)
    places = torch.zeros(3, 3, 3, dtype=torch.int64)
    for by in (
        kernels.NormMap(map_, map_[:1], places),
        kernels.NormMap(map_, map_[..., :1], places),
        kernels.NormMap(map_.bfloat16(), map_.bfloat16(), places),
        kernels.NormMap(map_, map_, places[:2]),
        kernels.NormMap(map_, map_, places.int()),
        kernels.NormMap(map_, map_, places + 4),
        kernels.NormMap(map_, map_, places - 1),
    ):
        with pytest.raises(ValueError, match="needed, got"):
            kernels.group_norm(x, 2, one, one, 1e-5, by=by)


@pytest.mark.parametrize("is_last", [True, False])
def test_one_value_far_from_all_others_costs_no_digits(is_last: bool) -> None:
    """A first pixel 1,000 deviations away; sums of differences from it alone gave NaN or 4 %."""
    x = torch.full((1, 2, 1 << 20, 1), 1.2345)
    x[:, :, 0] = 1000.321
    if is_last:
        x = x.to(memory_format=torch.channels_last)
    weight, bias = torch.ones(2), torch.zeros(2)
    want = F.group_norm(x.double(), 1, weight.double(), bias.double(), 1e-5)
    check(kernels.group_norm(x, 1, weight, bias, 1e-5), want, size=10.0)


@pytest.mark.parametrize(
    ("rows", "depth", "width"),
    [((2, 5, 7), 32, 16), ((1,), 2, 1), ((3, 41), 50, 37), ((115,), 64, 96), ((600,), 18, 32)],
)
def test_gated_linear(rows: tuple[int, ...], depth: int, width: int, dtype: torch.dtype) -> None:
    """Of every rest of rows, columns and lanes, with and without bias, of strided rows too."""
    x = numbers(*rows, 2 * depth, dtype=dtype)[..., ::2]
    weight = (numbers(2 * width, depth) / depth**0.5).to(dtype)
    bias = numbers(2 * width, dtype=dtype)
    if not kernels.supports_products(x, weight):
        pytest.skip(f"no products in {dtype} here")
    for own in (bias, None):
        exact = F.linear(x.double(), weight.double(), None if own is None else own.double())
        value, gate = exact.chunk(2, -1)
        got = kernels.gated_linear(x, weight, own)
        check(got, value * F.gelu(gate), size=4.0 if dtype == torch.float32 else 1.0)


def test_a_row_of_a_gated_linear_depends_on_itself_alone() -> None:
    x, weight = numbers(333, 24), numbers(64, 24)
    whole = kernels.gated_linear(x, weight, None)
    assert torch.equal(kernels.gated_linear(x[100:150], weight, None), whole[100:150])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(kernels.gated_linear(x, weight, None), whole)
    finally:
        torch.set_num_threads(threads)
    x[7, 3] = float("nan")
    seen = kernels.gated_linear(x, weight, None)
    assert seen[7].isnan().all()
    assert torch.equal(seen[8:], whole[8:])


@pytest.mark.parametrize(
    ("sizes", "width"),
    [((2, 3, 37, 300), 72), ((1, 1, 1, 1), 2), ((1, 2, 500, 33), 64), ((3, 1, 14, 600), 130)],
)
def test_attention(sizes: tuple[int, int, int, int], width: int, dtype: torch.dtype) -> None:
    """Of every rest of queries, keys and channels, and of more than one block of each."""
    batch, heads, queries, keys = sizes
    q, k, v = (
        numbers(batch, count, heads * width + own, dtype=dtype)[..., : heads * width]
        .unflatten(-1, (heads, width)).transpose(1, 2)
        for own, count in enumerate((queries, keys, keys))
    )  # fmt: skip
    if not kernels.supports_attention(q, k, v):
        assert dtype == torch.bfloat16  # of odd rows, or without its products
        q, k, v = (each.contiguous() for each in (q, k, v))
    if not kernels.supports_attention(q, k, v):
        pytest.skip(f"no products in {dtype} here")
    q = q * 4  # so that some keys weigh far more than others
    got = kernels.attention(q, k, v, width**-0.5).transpose(1, 2)
    want = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    # Shares are rounded too.
    check(got, want, size=4.0 if dtype == torch.bfloat16 else 2.0)


def test_attention_of_large_scores_is_finite_and_of_nan_is_not() -> None:
    q, k, v = (numbers(1, 2, rows, 32) for rows in (40, 300, 300))
    want = F.scaled_dot_product_attention(3e4 * q.double(), k.double(), v.double())
    check(kernels.attention(3e4 * q, k, v, 32**-0.5).transpose(1, 2), want, size=50.0)
    whole = kernels.attention(q, k, v, 32**-0.5)
    assert torch.equal(kernels.attention(q[:, :, 5:19], k, v, 32**-0.5), whole[:, 5:19])
    q[0, 1, 3, 4] = float("nan")
    seen = kernels.attention(q, k, v, 32**-0.5)
    assert seen[0, 3, 1].isnan().all()
    assert torch.equal(seen[:, :, 0], whole[:, :, 0])
    v[0, 0, 299, 7] = float("inf")
    assert not kernels.attention(q, k, v, 32**-0.5)[0, :, 0, 7].isfinite().any()


def test_odd_depths_are_no_pairs_of_bfloat16() -> None:
    x = numbers(4, 5)
    assert kernels.supports_products(x, x)
    assert not kernels.supports_products(x.bfloat16(), x.bfloat16())
    assert not kernels.supports_products(x, x.bfloat16())


@pytest.mark.parametrize("value", [0.0, 1e6, -3e4 / 7])
def test_equal_values_have_no_variance(value: float) -> None:
    x = torch.full((1, 4, 300, 5), value)
    weight, bias = torch.ones(4), torch.zeros(4)
    for layout in (x, x.contiguous(memory_format=torch.channels_last)):
        got = kernels.group_norm(layout, 2, weight, bias, 1e-5)
        # Rounding of the mean times the largest factor, as torch has it.
        assert got.abs().max() <= abs(value) * 2**-22 / 1e-5**0.5


def test_norms_leave_an_input_that_is_copied_for_them() -> None:
    """The copy is normed where it lies."""
    x = numbers(2, 7, 5, 32).transpose(1, 2)
    before = x.clone()
    check(kernels.layer_norm(x, None, None, 1e-6), F.layer_norm(x.double(), (32,), eps=1e-6))
    x_NCHW = x.permute(0, 3, 2, 1)[..., 1:]
    one, zero = torch.ones(32), torch.zeros(32)
    got = kernels.group_norm(x_NCHW, 8, one, zero, 1e-6)
    check(got, F.group_norm(x_NCHW.double(), 8, eps=1e-6))
    assert torch.equal(x, before)


@pytest.mark.parametrize("width", [1, 16, 32, 37, 64, 128, 256, 1152])
def test_layer_and_rms_norm(width: int, dtype: torch.dtype) -> None:
    x = numbers(2, 3, 5, width, dtype=dtype, mean=3.0)
    weight, bias = numbers(width), numbers(width + 1)[:-1]
    want = F.layer_norm(x.double(), (width,), weight.double(), bias.double(), 1e-6)
    check(kernels.layer_norm(x, weight, bias, 1e-6), want, size=4.0)
    plain = F.layer_norm(x.double(), (width,), eps=1e-6)
    check(kernels.layer_norm(x, None, None, 1e-6), plain, size=4.0)
    rms = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    check(kernels.layer_norm(x, weight, None, 1e-6, is_rms=True), rms)


@pytest.mark.parametrize("width", [1, 16, 37, 512])
def test_activations(width: int, dtype: torch.dtype) -> None:
    x = numbers(7, 2 * width, dtype=dtype) * 3
    value, gate = x.double().chunk(2, dim=-1)
    check(kernels.geglu(x), value * F.gelu(gate), size=4.0)
    for approximate in ("none", "tanh"):
        check(kernels.gelu(x, approximate), F.gelu(x.double(), approximate=approximate))


def test_gated_add(dtype: torch.dtype) -> None:
    x, branch = numbers(2, 3, 5, 37, dtype=dtype), numbers(2, 3, 5, 37)
    for shape in ((2, 3, 1, 37), (2, 1, 1, 37), (1, 1, 1, 37)):
        gate = numbers(*shape)
        check(kernels.gated_add(x, branch, gate), x.double() + branch.double() * gate.double())


def test_modulate(dtype: torch.dtype) -> None:
    x = numbers(2, 3, 5, 37, dtype=dtype)
    for shape in ((2, 3, 1, 37), (2, 1, 1, 37), (1, 1, 1, 37)):
        shift, scale = numbers(*shape), numbers(*shape) + 0.5
        want = x.double() * (1 + scale.double()) + shift.double()
        for made in {dtype, torch.float32}:
            got = kernels.modulate(x, shift, scale, made)
            assert got.dtype == made
            check(got, want, size=4.0)


@pytest.mark.parametrize("shape", [(3, 2, 4, 72), (1, 5, 6), (2, 7, 128), (4, 1, 38)])
def test_rotate(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Of pairs, and of halves on three axes, one of which is narrower than a vector."""
    x = numbers(*shape, dtype=dtype)
    positions, width = shape[-2:]
    pairs = rope.rotary_table(positions, width, dtype=torch.float64)
    check(kernels.rotate(x, pairs.cos, pairs.sin), rope.rotate(x.double(), pairs), size=2.0)
    widths = (2, (width - 2) // 4 * 2, width - 2 - (width - 2) // 4 * 2)
    axes = rope.axes_table((1, positions, 1), widths, dtype=torch.float64)
    got = kernels.rotate(x, axes.cos, axes.sin, widths)
    check(got, rope.rotate_axes(x.double(), axes), size=2.0)


@pytest.mark.parametrize(("frames", "heads", "width"), [(14, 2, 64), (1, 3, 16), (37, 1, 128)])
def test_frame_attention(frames: int, heads: int, width: int, dtype: torch.dtype) -> None:
    qkv = numbers(2, frames, 5, 3 * heads * width, dtype=dtype)
    q, k, v = qkv.chunk(3, dim=-1)
    got = kernels.frame_attention(q, k, v, heads, width**-0.5)

    def rows(x: Tensor) -> Tensor:
        return x.double().transpose(1, 2).unflatten(-1, (heads, -1)).transpose(2, 3)

    want = F.scaled_dot_product_attention(rows(q), rows(k), rows(v))
    check(got, want.transpose(2, 3).flatten(3).transpose(1, 2))


def test_the_number_of_threads_changes_no_bit(dtype: torch.dtype) -> None:
    x = numbers(2, 64, 50, 50, dtype=dtype).contiguous(memory_format=torch.channels_last)
    weight, before = torch.ones(64), torch.get_num_threads()
    made = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            made.append(kernels.group_norm(x, 32, weight, weight, 1e-5, has_silu=True))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*made)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_so(bad: float, dtype: torch.dtype) -> None:
    """The guard looks for it."""
    x = numbers(2, 32, 4, 4, dtype=dtype)
    x[1, 3, 2, 1] = bad
    one = torch.ones(32)
    for layout in (x, x.contiguous(memory_format=torch.channels_last)):
        made = kernels.group_norm(layout, 8, one, one, 1e-5, has_silu=True)
        assert made[0].isfinite().all()
        assert not made[1, 0:4].isfinite().all()
    rows = x.permute(0, 2, 3, 1).contiguous()
    assert not kernels.layer_norm(rows, one, one, 1e-5)[1, 2, 1].isfinite().all()
    assert not kernels.gated_add(rows, rows, one.view(1, 1, 1, -1))[1, 2, 1, 3].isfinite()
    table = one.view(1, 1, 1, -1)
    assert not kernels.modulate(rows, table, table, dtype)[1, 2, 1, 3].isfinite()
    for widths, partner in (((), 2), ((32,), 19)):
        tables = torch.ones(4, 16 if widths else 32)
        turned = kernels.rotate(rows, tables, tables, widths)
        assert {*(~turned.isfinite()).nonzero()[:, -1].tolist()} == {3, partner}
    if bad != float("-inf"):  # of which GELU is zero
        assert not kernels.gelu(rows)[1, 2, 1, 3].isfinite()
        assert not kernels.geglu(rows)[1, 2, 1, 3].isfinite()
    # A pixel's frames see each other, and no other pixel.
    seen = kernels.frame_attention(rows, rows, rows, 2, 0.25)
    assert seen[0].isfinite().all()
    assert not seen[1, :, 1, :16].isfinite().all()


def test_the_largest_numbers_do_not_overflow_on_the_way(dtype: torch.dtype) -> None:
    x = torch.tensor([-3e38, -1e30, -200.0, -90.0, -20.0, 0.0, 20.0, 90.0, 200.0, 1e30] * 4)
    x = x.to(dtype)
    for approximate in ("none", "tanh"):
        got = kernels.gelu(x, approximate)
        check(got, F.gelu(x.double(), approximate=approximate))
    gate = torch.tensor([[0.0], [1.0]]).to(dtype)
    got = kernels.gated_linear(x.float()[:, None], gate.float(), torch.tensor([1.0, 0.0]))
    check(got[:, 0], F.gelu(x.double()))
    one = torch.ones(len(x))
    for layout in (x.view(1, -1, 1, 1), x.view(1, -1, 1)):  # normed to zero, then the bias
        got = kernels.group_norm(layout * 0, 4, one, x, 1e-5, has_silu=True)
        check(got, F.silu(x.double()).view_as(layout))


def test_sizes_that_do_not_fit_are_refused() -> None:
    """C would read beyond the end of the weights."""
    x, four = numbers(2, 8, 3, 3), torch.ones(4)
    with pytest.raises(ValueError, match="8 values on the CPU are needed, got 4 on cpu"):
        kernels.group_norm(x, 2, four, four, 1e-5)
    with pytest.raises(ValueError, match="got 8 on meta"):
        kernels.group_norm(x, 2, torch.ones(8), torch.ones(8, device="meta"), 1e-5)
    with pytest.raises(ValueError, match="a table of 4 numbers is not for 48 rows of 3"):
        kernels.layer_norm(x, four, None, 1e-5)
    with pytest.raises(ValueError, match="a table of 15 numbers is not for 48 rows of 3"):
        kernels.gated_add(x, x, torch.ones(5, 3))
    with pytest.raises(ValueError, match="8 values on the CPU are needed, got 4"):
        kernels.modulate(x[..., :1], torch.ones(4), torch.ones(8), torch.float32)
    with pytest.raises(ValueError, match="a table of 4 numbers is not for 48 rows of 3"):
        kernels.modulate(x, four, four, torch.float32)
    with pytest.raises(ValueError, match="got torch\\.float16"):
        kernels.gated_add(x, x.half(), four[:3])
    with pytest.raises(ValueError, match="pairs of channels rotate, got 3"):
        kernels.rotate(x, four, four)
    with pytest.raises(ValueError, match=r"pairs of channels rotate, got 4 as \(1, 3\)"):
        kernels.rotate(four[None], four, four, (1, 3))
    with pytest.raises(ValueError, match="4 values on the CPU are needed, got 2"):
        kernels.rotate(four[None], four[:2], four)
    with pytest.raises(ValueError, match="values and gates"):
        kernels.geglu(x)
    with pytest.raises(ValueError, match="shapes"):
        kernels.gated_add(x, x[:1], torch.ones(3))
    with pytest.raises(
        ValueError, match=r"a weight \(O, 8, 3, 3\) in torch.float32 is needed, got"
    ):
        convolutions.winograd(x, torch.ones(4, 7, 3, 3), None)
    with pytest.raises(ValueError, match=r"a weight \(O, 8, 3, 1, 1\) in torch.float32 is needed"):
        convolutions.winograd_over_time(x.unsqueeze(2), torch.ones(4, 8, 3, 3, 3), None, (1, 1))
    with pytest.raises(ValueError, match="1 frames with a padding of"):
        convolutions.winograd_over_time(x.unsqueeze(2), torch.ones(4, 8, 3, 1, 1), None, (1, 0))
    with pytest.raises(ValueError, match="8 values on the CPU are needed, got 4"):
        convolutions.winograd(x, torch.ones(8, 8, 3, 3), four)
    for frames, side in ((2, 6), (3, 2)):
        with pytest.raises(ValueError, match="frames of"):
            convolutions.winograd_3d(
                torch.ones(1, 8, frames, side, 6),
                torch.ones(4, 8, 3, 3, 3),
                None,
                convolutions.Padding((0, 0), 0),
            )
    with pytest.raises(ValueError, match="heads of"):
        kernels.frame_attention(x, x[:1], x, 1, 1.0)


def test_frames_of_one_pixel_and_of_other_strides_attend_alike() -> None:
    rows = numbers(2, 5, 3, 32)
    for x in (rows.transpose(1, 2).contiguous().transpose(1, 2), rows[:, :, :1], rows[:, ::2]):
        want = kernels.frame_attention(
            *[x.clone(memory_format=torch.contiguous_format)] * 3, 2, 0.25
        )
        assert torch.equal(kernels.frame_attention(x, x, x, 2, 0.25), want)


def test_what_does_not_suit_is_left_to_torch() -> None:
    x = numbers(2, 32)
    assert kernels.supports(x, x.bfloat16())
    assert not kernels.supports(x.half())
    assert not kernels.supports(x.double())
    assert not kernels.supports(x[:0])
    assert not kernels.supports(x.to("meta"))
    with torch.inference_mode(False), torch.enable_grad():
        assert not kernels.supports(torch.ones(2, 32))
