"""Stable Video Diffusion's UNet on ranks, against diffusers' own: cases, plans and faults."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar

import torch
from diffusers import UNetSpatioTemporalConditionModel
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from everyframe.families.svd import blocks, sharding, unet
from everyframe.families.svd.components import level_sizes, sent_bytes
from everyframe.ops import self_attention
from everyframe.parallel import distributed_moments
from everyframe.parallel.communicator import Communicator, ParallelContext
from everyframe.parallel.token_partition import TokenGrid, TokenPartition
from everyframe.runtime.components.meta_init import build_on_meta
from helpers.sharded_denoisers.base import Inputs, SmallDenoiser, drawn, other_noise
from helpers.tiny_checkpoints import opensora as tiny_opensora

LEVELS = 3
SIZES: dict[str, Any] = {
    "block_out_channels": (32, 64, 64), "layers_per_block": 1, "cross_attention_dim": 16,
    "num_attention_heads": (1, 2, 2), "projection_class_embeddings_input_dim": 24,
    "addition_time_embed_dim": 8, "num_frames": 3, "transformer_layers_per_block": (1, 2, 1),
    "down_block_types": (
        "CrossAttnDownBlockSpatioTemporal", "CrossAttnDownBlockSpatioTemporal",
        "DownBlockSpatioTemporal",
    ),
    "up_block_types": (
        "UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal",
        "CrossAttnUpBlockSpatioTemporal",
    ),
}  # fmt: skip


def _undo(owner: Any, name: str, value: Any) -> Callable[[], None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before)


def norm_of_its_own_frames(handle: Any, model: Any, inputs: Inputs, group: Communicator) -> Any:
    """Each rank takes the statistics of its own part for those of the whole."""

    def of_its_own(self: Any, x: Tensor, dim: int, groups: int) -> Any:
        parts = x.split(list(self.parts), dim) if self.parts else ()
        own = [distributed_moments._moments(part, groups) for part in parts]
        found = torch.stack(own) if own else x.new_empty(0, 2, groups)
        return None if self.is_whole else tuple(found.unbind(1))

    return _undo(distributed_moments.DistributedMoments, "merge", of_its_own)


def positions_from_zero(handle: Any, model: Any, inputs: Inputs, group: Communicator) -> Any:
    """The last rank counts frames from another one on."""
    before = blocks.FrameTransformer.context

    def rolled(*given: Any) -> Any:
        made = before(*given)
        frames = made.frames.roll(1, 0) if group.rank == group.size - 1 else made.frames
        return blocks.AttentionContext(made.spatial, made.temporal, frames, made.mix)

    return _undo(blocks.FrameTransformer, "context", rolled)


def wrong_samples(handle: Any, model: Any, inputs: Inputs, group: Communicator) -> None:
    """The last rank takes the pictures of the samples for each other's."""
    if group.rank == group.size - 1:
        inputs["picture"] = inputs["picture"].flip(0)


def padding(handle: Any, model: Any, inputs: Inputs, group: Communicator) -> Any:
    """Frames get a pixel of zeros behind their own, so that they divide; attention sees it."""
    before = self_attention.attention

    def padded(q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Tensor:
        more = [torch.cat([each, torch.zeros_like(each[:, :, :1])], 2) for each in (k, v)]
        return before(q, *more, **named)

    return _undo(self_attention, "attention", padded)


class VideoUNet(SmallDenoiser):
    """The video UNet."""

    #: Latents (B, T, H, W). At 5x7 the levels have 35, 12 and 4 places, at 3x2 6, 2 and 1.
    cases: ClassVar[dict[str, Any]] = {
        "guided, odd sides": (2, 5, 5, 7),
        "fewer frames than ranks": (1, 2, 3, 6),
        "fewer places than ranks": (2, 3, 3, 2),
        "one frame": (2, 1, 4, 6),
        "three samples": (3, 2, 4, 4),
        "one sample": (1, 7, 6, 4),
        "sizes that divide": (1, 4, 8, 8),
        "large": (2, 12, 8, 12),
    }
    fast = ("guided, odd sides", "fewer frames than ranks")
    guided, single, large = "guided, odd sides", "one sample", "large"
    gather = "the answer is gathered"
    islands = ("conv_in", "conv_out", "*norm*")
    faults: ClassVar[dict[str, Any]] = {
        **{
            fault.__name__: (fault, "guided, odd sides")
            for fault in (other_noise, positions_from_zero, wrong_samples, padding)
        },
        # Ranks with a sample each have no need of what is wrong here.
        norm_of_its_own_frames.__name__: (norm_of_its_own_frames, "one sample"),
    }

    def build(self) -> nn.Module:
        made = unet.build(SIZES)
        made.load_state_dict(tiny_opensora.randomised(made, 0))
        return made

    def draw(self, model: nn.Module) -> None:
        """`build` has drawn them."""

    @cache  # noqa: B019
    def wanted(self, case: str) -> Tensor:
        """What diffusers' own class answers."""
        theirs = build_on_meta(lambda: UNetSpatioTemporalConditionModel(**SIZES))
        theirs.load_state_dict(tiny_opensora.randomised(theirs, 0), assign=True)
        theirs = theirs.double().eval().requires_grad_(False)
        x, t, picture, micro = self.inputs(case).values()
        with torch.no_grad():
            answer: Tensor = theirs(x, t, picture[:, None], micro, return_dict=False)[0]
        return answer

    def inputs(self, case: str) -> Inputs:
        """Scaled latents, times, pictures, micro-conditions: each sample's own."""
        batch, frames, height, width = self.cases[case]
        generator = torch.Generator().manual_seed(2)
        micro = torch.tensor([[6.0, 127.0, 0.02]], dtype=torch.float64)
        return {
            "x": drawn(generator, batch, frames, 8, height, width),
            "t": torch.linspace(-1.2, 1.6, batch, dtype=torch.float64),
            "picture": drawn(generator, batch, 16),
            "micro": micro + torch.arange(batch)[:, None],
        }

    def answer(self, model: Any, inputs: Inputs) -> Tensor:
        x, t, picture, micro = inputs.values()
        context = model.context(picture, micro, x.shape[1])
        with torch.no_grad():
            out: Tensor = model(x, t, context)
        return out

    def apply(self, model: Any, group: Communicator, groups: int) -> Any:
        return sharding.Sharding(model, ParallelContext(group, group, groups))

    def planned_bytes(self, weights: tuple[float, ...], groups: int, rank: int) -> int:
        branches, frames, height, width = self.cases[self.guided]
        partition = TokenPartition(TokenGrid(branches, frames, height * width), weights, groups)
        return sent_bytes(self.model(), (height, width), partition, rank, element_bytes=8)

    def share(self, size: int, rank: int, case: str) -> float:
        """What a rank has to do: its frames, or its places at some level where that is more."""
        branches, frames, height, width = self.cases[case]
        partitions = [
            TokenPartition(TokenGrid(branches, frames, h * w), (1.0,) * size)
            for h, w in level_sizes(height, width, LEVELS)
        ]
        places = [
            len(partition.columns[rank]) / (branches * partition.grid.places)
            for partition in partitions
        ]
        return max(*places, len(partitions[0].rows[rank]) / (branches * frames))

    def operations(self, group: Communicator) -> int:
        """Those of one rank in the large case, counted on tensors without numbers."""
        batch, frames, height, width = self.cases[self.large]
        made = self._without_numbers()
        sizes = ((batch, frames, 8, height, width), (batch,), (batch, 16), (batch, 3))
        x, t, picture, micro = (torch.empty(size, device="meta") for size in sizes)
        with self.apply(made, group, 1), FlopCounterMode(display=False) as counter:
            made(x, t, made.context(picture, micro, frames))
        return counter.get_total_flops()

    @cache  # noqa: B019
    def _without_numbers(self) -> Any:
        return build_on_meta(lambda: unet.build(SIZES)).eval().requires_grad_(False).to("meta")
