"""The sinusoid of timesteps against diffusers' and against float64."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.embeddings import get_timestep_embedding

from everyframe.ops.embeddings import TimestepEmbedding, timestep_embedding

TIMESTEPS = [0.0, 0.5, 24.0, 499.25, 988.49, 999.0, 1000.0]


def test_equals_diffusers() -> None:
    t = torch.tensor(TIMESTEPS)
    expected = get_timestep_embedding(t, 256, flip_sin_to_cos=True, downscale_freq_shift=0)
    # Frequencies differ in their last bit at most, and t is up to 1000.
    torch.testing.assert_close(timestep_embedding(t, 256), expected, atol=1.3e-4, rtol=0)


def test_float64_stays_float64() -> None:
    t = torch.tensor(TIMESTEPS, dtype=torch.float64)
    exact = timestep_embedding(t, 256)
    assert exact.dtype == torch.float64
    torch.testing.assert_close(
        timestep_embedding(t.float(), 256).double(), exact, atol=1.3e-4, rtol=0
    )


@pytest.mark.parametrize("t", [torch.tensor([7]), torch.tensor([7.0]).half()])
def test_narrow_numbers_are_embedded_in_float32(t: torch.Tensor) -> None:
    out = TimestepEmbedding(32)(t)
    assert out.dtype == torch.float32
    assert out.equal(timestep_embedding(torch.tensor([7.0]), 32))


def test_cosine_comes_first() -> None:
    assert timestep_embedding(torch.zeros(1), 6).tolist() == [[1, 1, 1, 0, 0, 0]]
