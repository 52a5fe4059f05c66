"""A search for repairs that runs out of memory takes its repairs back, and is made in less."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from everyframe.core.events import Note, Repaired
from everyframe.core.plan import Settings
from everyframe.runtime.interface import MemorySaving, VideoState
from everyframe.runtime.stages.denoise_stage import GuardedDenoiser
from everyframe.runtime.stages.guard import Guard
from helpers.guard_modules import halved, inputs, plan, planted, scaled
from helpers.out_of_memory import TOO_LITTLE

Call = Callable[[Guard, nn.Module], Tensor]


def savings(component: str, settings: Settings) -> Iterator[MemorySaving]:
    yield MemorySaving(settings.with_saving("tile", 8), "tiles")


def a_step(guard: Guard, net: nn.Module) -> Tensor:
    return guard.call(1, lambda: net(inputs()))


def a_denoising_step(guard: Guard, net: nn.Module) -> Tensor:
    return GuardedDenoiser(guard, lambda: lambda x: net(x))(inputs())


@pytest.mark.parametrize("error", [RuntimeError(TOO_LITTLE), MemoryError("too little")])
@pytest.mark.parametrize("call", [a_step, a_denoising_step])
def test_a_repair_without_memory_is_made_with_less(call: Call, error: Exception) -> None:
    net = halved(planted(lambda: scaled(nn.Linear(8, 8), 1e5), 1))
    guard, video = Guard(plan(), "denoise", {"net": net}, savings=savings), VideoState(0)
    guard.start_video(video)

    def check(part: nn.Module, _: object) -> None:
        if part.weight.dtype == torch.float32 and not guard.settings.saving("tile", 0):
            raise error

    net.parts[1].register_forward_pre_hook(check)
    with torch.inference_mode():
        assert bool(call(guard, net).isfinite().all())
    memory, *found = (event for event in guard.events() if isinstance(event, Repaired))
    assert (memory.cause, memory.to) == ("memory", "tiles")
    # What comes after the layer takes its wide result.
    assert [(each.target, each.to) for each in found] == [
        ("parts.1", "float32"), ("parts.2", "float32"), ("norm", "float32"),
    ]  # fmt: skip
    assert [each.module for each in video.repairs] == ["parts.1", "parts.2", "norm"]


def test_a_check_of_an_overflow_without_memory_leaves_no_repair() -> None:
    """tanh makes 1 of infinity, and the wide call has no memory."""
    net = nn.Sequential(scaled(nn.Linear(8, 8, bias=False), 1e5), nn.Tanh(), nn.Linear(8, 8))
    guard = Guard(plan(), "denoise", {"net": halved(net)})

    def check(part: nn.Module, _: object) -> None:
        if part.weight.dtype == torch.float32:
            raise MemoryError("too little")

    net[0].register_forward_pre_hook(check)
    with torch.inference_mode():
        assert bool(a_step(guard, net).isfinite().all())
    (note,) = guard.events()
    assert isinstance(note, Note)
    assert "too little memory" in note.text
    assert not guard.has_repaired
    assert net[0].weight.dtype == torch.float16
