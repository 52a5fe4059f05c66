"""Modulation, gates and rotations by kernels in C: numbers and dtypes stay, the rest is torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.resnet import AlphaBlender
from torch import nn

from everyframe.fast_paths.apply import swap_modules
from everyframe.fast_paths.benchmark import relative_error
from everyframe.fast_paths.modules.diffusers_modules import LerpAlphaBlender
from everyframe.fast_paths.modules.modulation_modules import (
    NativeGatedAdd,
    NativeModulate,
    NativeRotate,
    NativeRotateAxes,
)
from everyframe.ops.modulation import GatedAdd, Modulate
from everyframe.ops.native import kernels, library
from everyframe.ops.rope import RotaryTable, Rotate, RotateAxes, axes_table, rotary_table

pytestmark = [
    pytest.mark.usefixtures("no_grad"),
    pytest.mark.skipif(bool(missing := library.why_not()), reason=str(missing)),
]

#: float32 differs by fused multiplications, bfloat16 by torch's roundings on the way.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 5e-3}


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(name: str, *given: Any, **named: Any) -> None:
        pytest.fail(f"the kernel {name} was called")

    monkeypatch.setattr(kernels, "call", forbidden)


@pytest.mark.parametrize(
    ("path", "kinds"),
    [
        ("native-gate", {GatedAdd: NativeGatedAdd, Modulate: NativeModulate}),
        ("native-rope", {Rotate: NativeRotate, RotateAxes: NativeRotateAxes}),
    ],
)
def test_the_path_replaces_its_modules(path: str, kinds: dict[type, type]) -> None:
    model = nn.Sequential(*(kind() for kind in kinds))
    swap_modules(model, (path,))
    assert [type(part) for part in model] == [*kinds.values()]


@pytest.mark.parametrize("gate", [(2, 1, 1, 16), (2, 3, 1, 16), (1, 1, 1, 16)])
@pytest.mark.parametrize("branch", [torch.float32, torch.bfloat16])
def test_gated_branches(gate: tuple[int, ...], branch: torch.dtype) -> None:
    torch.manual_seed(0)
    x, y, g = torch.randn(2, 3, 5, 16), torch.randn(2, 3, 5, 16).to(branch), torch.randn(gate)
    native = NativeGatedAdd()
    assert relative_error(native(x, y, g), GatedAdd()(x, y, g)) < 1e-6


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [(2, 8, 3, 5, 5), (6, 9, 8)])
@pytest.mark.parametrize("is_switched", [False, True])
@pytest.mark.parametrize("strategy", AlphaBlender.strategies)
def test_mixed_branches(
    strategy: str, is_switched: bool, size: tuple[int, ...], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(AlphaBlender(0.3, strategy, is_switched))
    swap_modules(model, ("native-gate",))
    x, y, is_image = torch.randn(size), torch.randn(size), torch.tensor([[0, 1, 0], [0, 0, 0]])
    x, y = x.to(dtype), y.to(dtype)
    truth = AlphaBlender(0.3, strategy, is_switched)(x.double(), y.double(), is_image)
    assert type(model[0]) is LerpAlphaBlender
    assert relative_error(model[0](x, y, is_image), truth) < TOLERANCE[dtype]
    # Over two layouts torch's formula is the faster one.
    y = y.transpose(-1, -2).contiguous().transpose(-1, -2)
    plain = AlphaBlender(0.3, strategy, is_switched)(x, y, is_image)
    assert torch.equal(model[0](x, y, is_image), plain)


@pytest.mark.parametrize("gate", [(1, 3, 1, 16), (2, 1, 5, 16)])
@pytest.mark.usefixtures("no_kernels")
def test_a_gate_that_is_no_table_of_rows_is_computed_plainly(gate: tuple[int, ...]) -> None:
    x, y, g = torch.randn(2, 3, 5, 16), torch.randn(2, 3, 5, 16), torch.randn(gate)
    assert torch.equal(NativeGatedAdd()(x, y, g), GatedAdd()(x, y, g))


@pytest.mark.parametrize("table", [(2, 1, 1, 18), (2, 3, 1, 18), (1, 1, 1, 18)])
@pytest.mark.parametrize("narrow", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tables", [torch.float32, torch.bfloat16])
def test_modulation_is_as_wide_as_torchs(
    table: tuple[int, ...], narrow: torch.dtype, tables: torch.dtype
) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, 18).to(narrow)
    shift, scale = (torch.randn(table).to(tables) for _ in range(2))
    found, wanted = NativeModulate()(x, shift, scale), Modulate()(x, shift, scale)
    assert found.dtype == wanted.dtype
    # torch adds 1 to the scale in the tables' dtype.
    both = {wanted.dtype, tables}
    assert relative_error(found, wanted) < max(TOLERANCE[dtype] for dtype in both)


@pytest.mark.usefixtures("no_kernels")
def test_modulation_of_other_tables_and_dtypes_is_torchs() -> None:
    x, table = torch.randn(2, 3, 5, 16), torch.randn(2, 1, 5, 16)
    assert torch.equal(NativeModulate()(x, table, table), Modulate()(x, table, table))
    wide = torch.randn(2, 1, 1, 16).double()
    assert torch.equal(NativeModulate()(x, wide, wide), Modulate()(x, wide, wide))
    shift, scale = torch.randn(2, 1, 1, 16), torch.randn(1, 1, 1, 16)
    assert torch.equal(NativeModulate()(x, shift, scale), Modulate()(x, shift, scale))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotations(dtype: torch.dtype) -> None:
    """Of contiguous tokens, and of heads that lie side by side."""
    x = torch.randn(2, 6, 3, 24, generator=torch.Generator().manual_seed(0)).to(dtype)
    for each in (x.transpose(1, 2).contiguous(), x.transpose(1, 2)):
        pairs, axes = rotary_table(6, 24), axes_table((2, 3, 1), (12, 8, 4))
        for found, wanted in (
            (NativeRotate()(each, pairs), Rotate()(each, pairs)),
            (NativeRotateAxes()(each, axes), RotateAxes()(each, axes)),
        ):
            assert found.dtype == dtype
            assert found.shape == each.shape
            assert relative_error(found, wanted) < TOLERANCE[dtype]


@pytest.mark.usefixtures("no_kernels")
def test_tables_in_float64_or_of_their_own_for_each_sample_are_left_to_torch() -> None:
    x = torch.randn(2, 3, 6, 24)
    wide = rotary_table(6, 24, dtype=torch.float64)
    assert torch.equal(NativeRotate()(x, wide), Rotate()(x, wide))
    own = RotaryTable(*(torch.randn(2, 1, 6, 24) for _ in range(2)))
    assert torch.equal(NativeRotate()(x, own), Rotate()(x, own))
