"""What a stage does is repeated as a whole where memory runs out."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from everyframe.core.events import Repaired, Step
from everyframe.core.plan import Settings
from everyframe.parallel.communicator import ONE
from everyframe.runtime.interface import MemorySaving, VideoState
from everyframe.runtime.stages.guard import Guard
from everyframe.runtime.stages.templates import VideoEncodeStage
from helpers.guard_modules import plan


class EncodeStage(VideoEncodeStage[Any, Tensor]):
    """Its first inputs find no memory on the device."""

    name = "given frames"
    component = "net"

    def inputs(self, video: VideoState, device: str) -> Tensor:
        if not self.context.tried:
            self.context.tried.append(video.seed)
            raise MemoryError("out of memory")
        return torch.full((2,), float(video.seed))

    def example_inputs(self, device: str) -> Tensor:
        raise AssertionError("no dry run here")

    def compute(self, module: Any, inputs: Tensor, device: str, settings: Settings) -> Tensor:
        result: Tensor = module(inputs)
        return result

    def store(self, video: VideoState, result: Tensor) -> None:
        video.conditioning = result


def savings(component: str, settings: Settings) -> Iterator[MemorySaving]:
    yield MemorySaving(settings.with_saving("tile", 8), "tiles")


def loaded(component: str) -> Generator[Any, None, nn.Module]:
    yield from ()
    return nn.Identity()


def test_inputs_without_room_on_the_device_are_moved_again_with_less_memory() -> None:
    context = SimpleNamespace(
        parallel=ONE,
        tried=[],
        load=loaded,
        device=lambda component: "cpu",
        guard=lambda stage, parts: Guard(plan(), stage, parts, savings=savings),
    )
    videos = [VideoState(1), VideoState(2)]
    events = list(EncodeStage(context).run(videos))
    assert [type(event) for event in events] == [Repaired, Step, Step]
    assert [video.conditioning.tolist() for video in videos] == [[1.0, 1.0], [2.0, 2.0]]
