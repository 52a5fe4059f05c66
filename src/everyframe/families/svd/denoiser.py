"""``denoise(x, t)`` of a Stable Video Diffusion: its UNet, with picture and guidance inside.

Not here: the sampler (`samplers/euler_karras.py`) and the stage around both (`stages.py`). Read
next: `unet.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from everyframe.core.plan import Settings
from everyframe.families.sparing import branches_at_once
from everyframe.families.svd.job import Picture
from everyframe.families.svd.unet import VideoUNet


class Denoiser:
    """``denoise(x, t)`` for the sampler: the UNet with the picture and guidance inside.

    Guidance rises from frame to frame, from `min_guidance_scale` to `max_guidance_scale`. The
    unconditional branch sees zeros in place of the picture, its embedding and its latents; frame
    rate, motion and noise are told to both. Where memory is short the plan has them computed one
    after the other.
    """

    def __init__(self, unet: VideoUNet, picture: Picture, settings: Settings, device: str) -> None:
        assert picture.latents is not None, "the encoding stage comes before"
        self._unet = unet
        # Frame rates were counted from 0 in training.
        told = (
            settings.fps - 1,
            settings.option("motion_bucket_id"),
            settings.option("noise_aug_strength"),
        )
        told_BN = torch.tensor([told], dtype=torch.float32)
        embedding, latents_BCHW = picture.embedding, picture.latents
        self._guidance_TCHW: Tensor | None = None
        self._at_once = branches_at_once(settings, 2)
        if settings.guidance_scale > 1:
            low, high = settings.option("min_guidance_scale"), settings.guidance_scale
            rising = torch.linspace(low, high, settings.num_frames, dtype=torch.float32)
            self._guidance_TCHW = rising[:, None, None, None].to(device)
            embedding = torch.cat([torch.zeros_like(embedding), embedding])
            latents_BCHW = torch.cat([torch.zeros_like(latents_BCHW), latents_BCHW])
            told_BN = told_BN.expand(2, -1)
        embedding_BD = embedding[:, 0].to(device)
        self._context = unet.context(embedding_BD, told_BN.to(device), settings.num_frames)
        still = latents_BCHW[:, None].expand(-1, settings.num_frames, -1, -1, -1)
        self._picture_BTCHW = still.to(device)

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        """The guided v for scaled x (1, T, C, h, w) and t (1,)."""
        branches = range(len(self._picture_BTCHW))
        lots = [branches[i : i + self._at_once] for i in branches[:: self._at_once]]
        answers = [self._answer(x, t, slice(lot.start, lot.stop)) for lot in lots]
        if self._guidance_TCHW is None:
            return answers[0]
        uncond, cond = torch.cat(answers).chunk(2)
        return uncond + self._guidance_TCHW * (cond - uncond)

    def _answer(self, x: Tensor, t: Tensor, rows: slice) -> Tensor:
        """The UNet's answer for some of the branches."""
        picture_BTCHW = self._picture_BTCHW[rows].to(x.dtype)
        branches = len(picture_BTCHW)
        answer: Tensor = self._unet(
            torch.cat([x.expand(branches, *x.shape[1:]), picture_BTCHW], dim=2),
            t.expand(branches),
            self._context.rows(rows),
        )
        return answer
