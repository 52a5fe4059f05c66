"""Open-Sora's denoisers on ranks: cases, plans and faults."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from everyframe.families.opensora import sharding
from everyframe.families.opensora.components import build_model, sent_bytes
from everyframe.families.opensora.config import STDiT3Config, STDiTConfig
from everyframe.parallel.communicator import Communicator, ParallelContext
from everyframe.parallel.token_partition import TokenGrid, TokenPartition
from helpers.sharded_denoisers.base import Inputs, SmallDenoiser, drawn, other_noise

HIDDEN, DEPTH, LENGTH, CAPTION = 32, 2, 6, 12


def padding(handle: Any, model: Any, inputs: Inputs, group: Communicator) -> Any:
    """Frames get a place of zeros behind their own, so that they divide; attention sees it."""

    def pad(module: nn.Module, args: tuple[Any, ...]) -> Any:
        return (torch.cat([args[0], torch.zeros_like(args[0][:, :, :1])], dim=2), *args[1:])

    def cut(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        return out[:, :, :-1]

    blocks = getattr(model, "blocks", None) or model.spatial_blocks
    attention = blocks[0].attn
    before = attention.register_forward_pre_hook(pad)
    after = attention.register_forward_hook(cut, prepend=True)

    def undo() -> None:
        before.remove()
        after.remove()

    return undo


def dropped_mask(handle: Any, model: Any, inputs: Inputs, group: Communicator) -> None:
    """The first rank looks at all text tokens."""
    if group.rank == 0:
        inputs["mask"][:] = True


def dropped_frames_mask(handle: Any, model: Any, inputs: Inputs, group: Communicator) -> None:
    """The first rank does not know which frames are given."""
    if group.rank == 0:
        inputs["x_mask"][:] = True


def wrong_samples(handle: Any, model: Any, inputs: Inputs, group: Communicator) -> None:
    """The last rank takes the texts of the samples for each other's."""
    if group.rank == group.size - 1:
        inputs["text"], inputs["mask"] = inputs["text"].flip(0), inputs["mask"].flip(0)


class OpenSora(SmallDenoiser):
    """STDiT of 1.0 or STDiT3 of 1.2."""

    #: Latents (B, T, H, W), real text tokens of each sample, frames that are given: the first of
    #: them to every sample, the second to the last one.
    cases: ClassVar[dict[str, Any]] = {
        "16 frames": ((2, 16, 6, 8), (6, 6), ()),
        "15 frames, odd sides, ragged texts": ((2, 15, 5, 7), (2, 6), ()),
        "three samples, an empty text": ((3, 2, 4, 6), (0, 3, 5), ()),
        "a given frame": ((2, 4, 6, 4), (3, 4), (0, 2)),
        "a picture": ((2, 1, 6, 6), (5, 5), ()),
        "one sample": ((1, 5, 6, 6), (4,), (0, 4)),
        "one token a frame": ((1, 3, 2, 2), (3,), ()),
        "sizes that divide": ((1, 12, 12, 12), (6,), ()),
    }
    fast = tuple(cases)[:-1]
    guided, single = "15 frames, odd sides, ragged texts", "one sample"
    large = "16 frames"
    islands = ("final_layer",)

    def __init__(self, version: str) -> None:
        kinds: dict[str, Any] = {"1.0": STDiTConfig, "1.2": STDiT3Config}
        sizes = {"hidden_size": HIDDEN, "depth": DEPTH, "num_heads": 2}
        self.version = version
        self.config = kinds[version](**sizes, caption_channels=CAPTION, model_max_length=LENGTH)
        faults = (other_noise, padding, dropped_mask, wrong_samples)
        faults = (*faults, dropped_frames_mask) if version == "1.2" else faults
        self.faults = {fault.__name__: (fault, "a given frame") for fault in faults}

    def build(self) -> nn.Module:
        return build_model(self.config)

    def draw(self, model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)

    def inputs(self, case: str) -> Inputs:
        (batch, frames, height, width), lengths, given = self.cases[case]
        generator = torch.Generator().manual_seed(2)
        inputs: Inputs = {
            "x": drawn(generator, batch, 4, frames, height, width),
            "t": torch.linspace(10, 900, batch).double(),
            "text": drawn(generator, batch, LENGTH, CAPTION),
            "mask": torch.arange(LENGTH) < torch.tensor(lengths)[:, None],
        }
        if self.version == "1.2":
            inputs["fps"], inputs["width"] = 12.0, 96.0
            inputs["height"] = torch.linspace(64, 128, batch)  # positions of each sample's own
            if given:
                mask = torch.ones(batch, frames, dtype=torch.bool)
                mask[:, given[0]] = mask[-1, given[1]] = False
                inputs["x_mask"] = mask
        return inputs

    def answer(self, model: Any, inputs: Inputs) -> Tensor:
        rest = {k: v for k, v in inputs.items() if k not in ("x", "t", "text", "mask")}
        context = model.context(inputs["text"], inputs["mask"])
        out: Tensor = model(inputs["x"], inputs["t"], context, **rest)
        return out

    def apply(self, model: Any, group: Communicator, groups: int) -> Any:
        return sharding.Sharding(model, ParallelContext(group, group, groups))

    def planned_bytes(self, weights: tuple[float, ...], groups: int, rank: int) -> int:
        partition = TokenPartition(TokenGrid(2, 15, 3 * 4), weights, groups)
        return sent_bytes(self.config, partition, rank, element_bytes=8)

    def share(self, size: int, rank: int, case: str) -> float:
        """What a rank has to do: its columns, or its rows where that is more."""
        (batch, frames, height, width), _, _ = self.cases[case]
        grid = TokenGrid(batch, frames, -(-height // 2) * -(-width // 2))
        partition = TokenPartition(grid, (1.0,) * size)
        columns = len(partition.columns[rank]) / (grid.samples * grid.places)
        return max(columns, len(partition.rows[rank]) / (grid.samples * grid.frames))
