"""Steps are found from calls: by the timestep, or by the scheduler's own index."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from torch import nn

from everyframe.diffusers_pipelines.calls.step_tracking import StepTracker, called_parts
from everyframe.fast_paths.apply import apply_fast_paths


class Denoiser(nn.Module):
    """Takes what diffusers' denoisers take."""

    def forward(self, hidden_states: Any, timestep: Any = None, **more: Any) -> Any:
        return hidden_states


class Coder(nn.Module):
    """An autoencoder: `decode` is no call of the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Identity()

    def decode(self, *x: Any) -> Any:
        return self.decoder(*x)


X = torch.zeros(1)


class Bench:
    """Two experts, a coder, and what was seen of them."""

    def __init__(self, scheduler: Any, expected: int = 99) -> None:
        self.high, self.low, self.coder = Denoiser(), Denoiser(), Coder()
        self.seen: list[tuple[int, int]] = []
        self.watch = StepTracker(
            {"transformer": self.high, "transformer_2": self.low},
            [self.coder],
            scheduler,
            expected,
            lambda step, total: self.seen.append((step, total)),
        )

    def num_hooks(self) -> int:
        parts = (self.high, self.low, self.coder, self.coder.decoder)
        return sum(len(part._forward_pre_hooks) for part in parts)


@pytest.mark.parametrize("calls_a_step", [1, 2, 3], ids=["batched", "two calls", "three calls"])
def test_calls_with_the_same_timestep_are_one_step(calls_a_step: int) -> None:
    bench = Bench(SimpleNamespace(timesteps=torch.tensor([999, 500, 1])))
    with bench.watch as watch:
        for number, t in enumerate((999, 500, 1)):
            for _ in range(calls_a_step):
                bench.high(X, timestep=torch.tensor([t, t]))
            assert len(bench.seen) == number, "a step is over when the next one begins"
        bench.coder.decode(X)
        assert bench.seen == [(1, 3), (2, 3), (3, 3)]
        watch.finish()
    assert bench.seen == [(1, 3), (2, 3), (3, 3)], "reported once"
    assert bench.watch.num_calls["transformer"] == 3 * calls_a_step


def test_two_experts_share_the_steps_and_may_differ_in_calls() -> None:
    bench = Bench(SimpleNamespace(timesteps=torch.tensor([900.0, 500.0])))
    with bench.watch as watch:
        bench.high(X, torch.tensor([900.0]))
        bench.high(X, torch.tensor([900.0]))
        bench.low(X, torch.tensor([500.0]))
        watch.finish()
    assert bench.seen == [(1, 2), (2, 2)]
    assert bench.watch.num_calls == {"transformer": 2, "transformer_2": 1}


def test_the_schedulers_index_counts_where_timesteps_are_rounded_together() -> None:
    """bfloat16 knows 996 and 1000 and nothing between: two steps may have one timestep."""
    scheduler = SimpleNamespace(timesteps=torch.tensor([999.0, 998.5, 10.0]), step_index=None)
    bench = Bench(scheduler)
    with bench.watch as watch:
        for index, t in ((None, 999.0), (1, 998.5), (2, 10.0)):
            scheduler.step_index = index
            bench.high(X, timestep=torch.tensor([t], dtype=torch.bfloat16))
        watch.finish()
    assert bench.seen == [(1, 3), (2, 3), (3, 3)]


def test_frames_that_are_given_have_a_timestep_of_their_own() -> None:
    bench = Bench(SimpleNamespace(timesteps=torch.tensor([900, 500])))
    with bench.watch as watch:
        for t in (900, 500):
            bench.high(X, timestep=torch.tensor([[0, t, t]]))
            bench.high(X, timestep=torch.tensor([[0, t, t]]))
        watch.finish()
    assert bench.seen == [(1, 2), (2, 2)]


def test_more_steps_than_the_scheduler_has_are_counted_as_they_come() -> None:
    """A pipeline that makes its video piece by piece runs through its timesteps several times."""
    bench = Bench(SimpleNamespace(timesteps=torch.tensor([900, 500])))
    with bench.watch as watch:
        for t in (900, 500, 900, 500):
            bench.high(X, timestep=torch.tensor(t))
        watch.finish()
    assert bench.seen == [(1, 2), (2, 2), (3, 3), (4, 4)]


def test_a_share_of_a_second_order_schedule_begins_with_a_step_of_two_calls() -> None:
    """Heun's timesteps are there twice, and one more call was counted than is made."""
    scheduler = diffusers.HeunDiscreteScheduler()
    scheduler.set_timesteps(4)
    bench = Bench(scheduler, expected=4)
    left = scheduler.timesteps[2:]  # as diffusers' `get_timesteps` cuts them for three steps of it
    with bench.watch as watch:
        for t in left:
            bench.high(X, timestep=t)
            scheduler.step(X, t, X)
        watch.finish()
    assert bench.seen == [(number, 5) for number in range(1, 6)]


@pytest.mark.parametrize(
    "kind", [diffusers.FlowMatchEulerDiscreteScheduler, diffusers.FlowMatchHeunDiscreteScheduler]
)
def test_a_sigma_is_no_timestep_of_the_same_number(kind: Any) -> None:
    """Cosmos 2.5 gives its denoiser sigmas; the first is 1, which is also the last timestep."""
    scheduler = kind()
    scheduler.set_timesteps(4)
    bench = Bench(scheduler, expected=4)
    with bench.watch as watch:
        for t, sigma in zip(scheduler.timesteps, scheduler.sigmas[:-1], strict=True):
            bench.high(X, timestep=sigma)
            scheduler.step(X, t, X)
        watch.finish()
    total = len(scheduler.timesteps)
    assert bench.seen == [(number, total) for number in range(1, total + 1)]


def test_without_timesteps_each_call_is_a_step() -> None:
    bench = Bench(None, expected=2)
    with bench.watch as watch:
        bench.high(X)
        bench.high(X)
        watch.finish()
    assert bench.seen == [(1, 2), (2, 2)]


def test_text_before_the_first_step_is_no_step() -> None:
    bench = Bench(SimpleNamespace(timesteps=torch.tensor([1])))
    with bench.watch:
        bench.coder.decode(X)
        assert bench.seen == []


def test_hooks_are_taken_off_whatever_happens() -> None:
    bench = Bench(None)
    with bench.watch:
        assert bench.num_hooks() == 4
    assert bench.num_hooks() == 0
    with pytest.raises(RuntimeError), bench.watch:
        raise RuntimeError
    assert bench.num_hooks() == 0


class Attends(nn.Module):
    """Tells whether torch might take a fused kernel."""

    def forward(self) -> bool:
        return torch.backends.cuda.flash_sdp_enabled()


@pytest.mark.parametrize("paths", [(), ("attention-flash",)])
def test_a_kernel_holds_however_a_component_is_called(paths: tuple[str, ...]) -> None:
    """MiniMax-H3 calls ``text_encoder.model``; ``text_encoder`` itself was all that was put on."""
    whole = Coder()
    whole.decoder = Attends()
    apply_fast_paths(whole, paths, called_parts(whole))
    assert whole.decode() is bool(paths)
    assert torch.backends.cuda.flash_sdp_enabled()


class OnMetal(torch.Tensor):
    """As on Apple's GPUs, which have no float64."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cpu:
            return args[0].as_subclass(torch.Tensor)
        made = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(made, cls) and made.dtype == torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return made


def test_timesteps_on_a_device_without_float64() -> None:
    steps = torch.tensor([999.0, 500, 1])
    timesteps = steps.as_subclass(OnMetal)
    with pytest.raises(TypeError, match="float64"):
        timesteps.double()
    bench = Bench(SimpleNamespace(timesteps=timesteps, sigmas=steps / 1000))
    with bench.watch as watch:
        for each in timesteps:
            bench.high(X, each.expand(2))
        watch.finish()
    assert bench.seen == [(1, 3), (2, 3), (3, 3)]
