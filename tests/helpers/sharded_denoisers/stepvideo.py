"""Step-Video's denoiser on ranks, by heads or in a ring: cases, plans and faults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from everyframe.families.stepvideo import sharding
from everyframe.families.stepvideo.components import DENOISER_ISLANDS, rank_share
from everyframe.families.stepvideo.config import StepVideoModelConfig
from everyframe.families.stepvideo.model import StepVideoModel
from everyframe.parallel.communicator import Communicator, ParallelContext
from everyframe.parallel.token_partition import TokenGrid, TokenPartition
from helpers.sharded_denoisers.base import (
    Inputs,
    SmallDenoiser,
    drawn,
    other_noise,
    own_positions,
    pad_keys,
)

CONFIG = StepVideoModelConfig(
    num_attention_heads=3,
    attention_head_dim=16,
    in_channels=4,
    out_channels=4,
    num_layers=2,
    caption_channels=(12, 10),
)
LLM, CLIP = 6, 3


def dropped_mask(handle: Any, model: Any, inputs: Inputs, group: Communicator) -> None:
    """The first rank looks at all text tokens."""
    if group.rank == 0:
        inputs["mask"][:] = 1


def wrong_samples(handle: Any, model: Any, inputs: Inputs, group: Communicator) -> None:
    """The last rank takes the texts of the samples for each other's."""
    if group.rank == group.size - 1:
        for name in ("llm", "clip", "mask"):
            inputs[name] = inputs[name].flip(0)


def padding(handle: Any, model: Any, inputs: Inputs, group: Communicator) -> Any:
    """The first rank's attention sees a key of zeros behind the others."""
    return pad_keys(model.transformer_blocks[0].attn1.core.inner, group)


class StepVideo(SmallDenoiser):
    """Its denoiser, whose attention is split by `backend`."""

    #: Latents (B, T, H, W), and text tokens of each sample, CLIP's three counted in.
    cases: ClassVar[dict[str, Any]] = {
        "two branches, ragged texts": ((2, 3, 3, 5), (4, 9)),
        "one branch": ((1, 3, 4, 4), (9,)),
        "three samples, an empty text": ((3, 2, 1, 3), (0, 7, 5)),
        "a picture": ((2, 1, 3, 4), (5, 5)),
        "fewer tokens than ranks": ((1, 1, 1, 2), (4,)),
        "sizes that divide": ((1, 3, 4, 6), (9,)),
        "large": ((2, 5, 4, 8), (9, 4)),
    }
    fast = tuple(cases)[:-2]
    guided, single, large = "two branches, ragged texts", "one branch", "large"
    islands = DENOISER_ISLANDS
    faults: ClassVar[dict[str, Any]] = {
        fault.__name__: (fault, "two branches, ragged texts")
        for fault in (other_noise, dropped_mask, wrong_samples, own_positions, padding)
    }

    def __init__(self, backend: str) -> None:
        self.backend = backend

    def build(self) -> nn.Module:
        return StepVideoModel(CONFIG)

    def draw(self, model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            parameter.copy_(drawn(generator, *parameter.shape) * 0.2)

    def inputs(self, case: str) -> Inputs:
        (batch, frames, height, width), lengths = self.cases[case]
        generator = torch.Generator().manual_seed(2)
        return {
            "x": drawn(generator, batch, 4, frames, height, width),
            "t": torch.linspace(0.1, 0.9, batch).double(),
            "llm": drawn(generator, batch, LLM, 12),
            "clip": drawn(generator, batch, CLIP, 10),
            "mask": (torch.arange(LLM + CLIP) < torch.tensor(lengths)[:, None]).long(),
        }

    def answer(self, model: Any, inputs: Inputs) -> Tensor:
        context = model.context(inputs["llm"], inputs["clip"], inputs["mask"])
        out: Tensor = model(inputs["x"], inputs["t"], context)
        return out

    def apply(self, model: Any, group: Communicator, groups: int) -> Any:
        parallel = ParallelContext(group, group, groups, self.backend)
        return sharding.Sharding(model, parallel)

    def planned_bytes(self, weights: tuple[float, ...], groups: int, rank: int) -> int:
        partition = TokenPartition(
            TokenGrid(2, CONFIG.num_attention_heads, 3 * 3 * 5), weights, groups
        )
        return rank_share(CONFIG, partition, self.backend, rank, 8).sent_bytes

    def share(self, size: int, rank: int, case: str) -> float:
        """Of what belongs to tokens, and the timestep's embedding, which all have."""
        return 1 / size

    def exchanged(self, sent: Mapping[str, int]) -> int:
        return sum(sent.values()) - sent[self.gather]
