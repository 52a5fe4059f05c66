"""Open-Sora 2.0's denoiser on ranks, by heads or in a ring: cases, plans and faults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from everyframe.families.opensora2 import sharding
from everyframe.families.opensora2.components import DENOISER_ISLANDS, rank_share
from everyframe.families.opensora2.config import MMDiTConfig
from everyframe.families.opensora2.mmdit import MMDiT
from everyframe.parallel.communicator import Communicator, ParallelContext
from everyframe.parallel.token_partition import TokenGrid, TokenPartition
from everyframe.precision.islands import present
from helpers.sharded_denoisers.base import (
    Inputs,
    SmallDenoiser,
    drawn,
    other_noise,
    own_positions,
    pad_keys,
)

CONFIG = MMDiTConfig(
    in_channels=16, vec_in_dim=10, context_in_dim=12, hidden_size=48, num_heads=3, depth=2,
    depth_single_blocks=2, axes_dim=(4, 6, 6),
)  # fmt: skip
#: FLUX's layout, as the first picture has it.
PAIRED = replace(CONFIG, cond_embed=False, fused_qkv=True, use_liger_rope=False)
TEXT = 7


def wrong_samples(handle: Any, model: Any, inputs: Inputs, group: Communicator) -> None:
    """The last rank takes the texts of the samples for each other's."""
    if group.rank == group.size - 1:
        inputs["text"], inputs["vector"] = inputs["text"].flip(0), inputs["vector"].flip(0)


def wrong_condition(handle: Any, model: Any, inputs: Inputs, group: Communicator) -> None:
    """The last rank has the condition in all branches."""
    if group.rank == group.size - 1:
        inputs["cond"][:] = inputs["cond"][:1]


def dropped_text(handle: Any, model: Any, inputs: Inputs, group: Communicator) -> Any:
    """The first rank, which has text tokens, zeroes its last one."""

    def forget(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return torch.cat([out[:, :-1], torch.zeros_like(out[:, -1:])], 1)

    return model.text_tokens.register_forward_hook(forget).remove if group.rank == 0 else None


def padding(handle: Any, model: Any, inputs: Inputs, group: Communicator) -> Any:
    """The first rank's attention sees a key of zeros behind the others."""
    return pad_keys(model.double_blocks[0].attention.core.inner, group)


class OpenSora2(SmallDenoiser):
    """Its denoiser, whose attention is split by `backend`."""

    #: Latents (B, T, H, W); a few cut the text's seven tokens.
    cases: ClassVar[dict[str, Any]] = {
        "two branches": (2, 3, 4, 6),
        "three branches": (3, 2, 4, 6),
        "one branch": (1, 3, 4, 6),
        "a picture": (2, 1, 4, 6),
        "fewer tokens than ranks": (1, 1, 2, 2),
        "sizes that divide": (1, 3, 6, 8),
        "large": (2, 5, 8, 16),
    }
    fast = tuple(cases)[:-2]
    guided, single, large = "two branches", "one branch", "large"
    faults: ClassVar[dict[str, Any]] = {
        fault.__name__: (fault, case)
        for fault, case in (
            (other_noise, "two branches"),
            (wrong_samples, "two branches"),
            (wrong_condition, "two branches"),
            (own_positions, "two branches"),
            (dropped_text, "one branch"),
            (padding, "two branches"),
        )
    }

    def __init__(self, backend: str, config: MMDiTConfig = CONFIG) -> None:
        self.backend, self.config = backend, config
        self.islands = present(DENOISER_ISLANDS, MMDiT(config).state_dict())
        if not config.cond_embed:
            faults = {name: each for name, each in self.faults.items() if "condition" not in name}
            self.faults = faults  # type: ignore[misc]

    def build(self) -> nn.Module:
        return MMDiT(self.config)

    def draw(self, model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            parameter.copy_(drawn(generator, *parameter.shape) * 0.2)

    def inputs(self, case: str) -> Inputs:
        batch, *size = self.cases[case]
        channels = self.config.latent_channels
        generator = torch.Generator().manual_seed(2)
        found = {
            "x": drawn(generator, batch, channels, *size),
            "t": torch.linspace(0.1, 0.9, batch).double(),
            "text": drawn(generator, batch, TEXT, 12),
            "vector": drawn(generator, batch, 10),
        }
        if self.config.cond_embed:
            found["cond"] = drawn(generator, batch, 1 + channels, *size)
        return found

    def answer(self, model: Any, inputs: Inputs) -> Tensor:
        context = model.context(inputs["text"], inputs["vector"])
        out: Tensor = model(inputs["x"], inputs["t"], context, cond=inputs.get("cond"))
        return out

    def apply(self, model: Any, group: Communicator, groups: int) -> Any:
        parallel = ParallelContext(group, group, groups, self.backend)
        return sharding.Sharding(model, parallel)

    def planned_bytes(self, weights: tuple[float, ...], groups: int, rank: int) -> int:
        partition = TokenPartition(
            TokenGrid(2, self.config.num_heads, TEXT + 3 * 2 * 3), weights, groups
        )
        return rank_share(self.config, partition, self.backend, rank, 8).sent_bytes

    def share(self, size: int, rank: int, case: str) -> float:
        """Of what belongs to tokens, and the modulation, which all have."""
        return 1 / size

    def exchanged(self, sent: Mapping[str, int]) -> int:
        return sum(sent.values()) - sent[self.gather]
