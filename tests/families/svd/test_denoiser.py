"""CLIP's small square against what diffusers makes of the same picture."""

from __future__ import annotations

import pytest
import torch
from diffusers.pipelines.stable_video_diffusion import pipeline_stable_video_diffusion

from everyframe.families.svd.denoiser import shrink


@pytest.mark.parametrize("size", [(224, 224), (576, 1024), (50, 1000), (300, 9), (2, 2)])
def test_shrunk_as_by_diffusers(size: tuple[int, int]) -> None:
    x = torch.rand(1, 3, *size, generator=torch.Generator().manual_seed(0)) * 2 - 1
    wanted = pipeline_stable_video_diffusion._resize_with_antialiasing(x, (224, 224))
    # The same float32 sums, possibly in another order.
    torch.testing.assert_close(shrink(x, 224), wanted, rtol=1e-5, atol=2e-6)
