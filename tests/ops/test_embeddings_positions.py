"""Added position embeddings against diffusers' and against upstream's buffers in the goldens."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers.models.embeddings import get_2d_sincos_pos_embed
from safetensors.torch import load_file

from everyframe.ops.embeddings import sincos_1d, sincos_2d

GOLDEN = Path(__file__).parents[1] / "golden" / "opensora_stdit_v1_0" / "weights.safetensors"


def test_equal_upstreams_buffers() -> None:
    buffers = load_file(GOLDEN)
    # space_scale 0.5 and time_scale 1.0; 4 x 4 patches, 16 frames, 64 channels.
    space = sincos_2d([0.0, 2.0, 4.0, 6.0], [0.0, 2.0, 4.0, 6.0], 64)
    time = sincos_1d([float(i) for i in range(16)], 64)
    # Upstream makes them in float64 and rounds once, as we do.
    torch.testing.assert_close(space, buffers["pos_embed"][0], atol=1e-7, rtol=0)
    torch.testing.assert_close(time, buffers["pos_embed_temporal"][0], atol=1e-7, rtol=0)


def test_equal_diffusers_on_an_oblong() -> None:
    theirs = get_2d_sincos_pos_embed(48, (3, 5), base_size=4, output_type="pt").float()
    rows, columns = [i * 4 / 3 for i in range(3)], [j * 4 / 5 for j in range(5)]
    ours = sincos_2d(rows, columns, 48)
    # diffusers has the positions, up to 3.2, in float32.
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


def test_columns_come_before_rows() -> None:
    out = sincos_2d([0.0, 1.0], [0.0, 1.0, 2.0], 16).view(2, 3, 16)
    assert out[0, 2, :8].equal(out[1, 2, :8])
    assert out[1, 0, 8:].equal(out[1, 2, 8:])
    assert not out[0, 2, :8].equal(out[0, 1, :8])


def test_half_precision_is_widened() -> None:
    assert sincos_1d([0.0, 300.5], 8, dtype=torch.bfloat16).dtype == torch.float32
    assert sincos_1d([0.0, 300.5], 8, dtype=torch.float64).dtype == torch.float64
