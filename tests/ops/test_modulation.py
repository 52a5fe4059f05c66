"""Modulation against its formulas; above all, what stays in float32."""

from __future__ import annotations

import torch

from everyframe.ops.modulation import (
    Add,
    GatedAdd,
    Modulate,
    ModulationTables,
    gated_add,
    modulate,
    modulation_tables,
)


def test_tables_are_per_sample_and_frame() -> None:
    table, t = torch.randn(6, 8), torch.randn(2, 3, 6, 8)
    parts = modulation_tables(table, t)
    assert len(parts) == 6
    for k, part in enumerate(parts):
        assert part.shape == (2, 3, 1, 8)
        assert part[1, 2, 0].equal(table[k] + t[1, 2, k])


def test_half_tables_are_added_in_float32() -> None:
    table, t = torch.full((1, 4), 256.0).bfloat16(), torch.ones(1, 1, 1, 4).bfloat16()
    (part,) = ModulationTables()(table, t)
    assert part.dtype == torch.float32
    assert part.flatten().tolist() == [257.0] * 4  # bfloat16 has no 257


def test_modulate_and_gated_add_equal_their_formulas() -> None:
    x, branch = torch.randn(2, 2, 3, 5, 8, dtype=torch.float64)
    shift, scale = torch.randn(2, 2, 3, 1, 8, dtype=torch.float64)
    torch.testing.assert_close(modulate(x, shift, scale), x * (1 + scale) + shift)
    torch.testing.assert_close(gated_add(x, branch, scale), x + scale * branch)


def test_a_float32_stream_keeps_small_updates_of_a_narrow_branch() -> None:
    stream, branch = torch.full((1, 1, 1, 4), 256.0), torch.full((1, 1, 1, 4), 0.5).bfloat16()
    for out in (GatedAdd()(stream, branch, torch.ones(1, 1, 1, 4)), Add()(stream, branch)):
        assert out.dtype == torch.float32
        assert out.flatten().tolist() == [256.5] * 4  # lost in a bfloat16 stream


def test_modulating_a_narrow_tensor_widens_it() -> None:
    one = torch.ones(1, 1, 1, 4)
    assert Modulate()(one.bfloat16(), one, one).dtype == torch.float32
