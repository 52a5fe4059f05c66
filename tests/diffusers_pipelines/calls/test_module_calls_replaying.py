"""A denoiser that is served what it answered before, where its inputs are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from everyframe.diffusers_pipelines.calls.module_calls import DenoiserReplay
from everyframe.diffusers_pipelines.calls.step_tracking import StepTracker
from everyframe.ops.call_override import override_call
from everyframe.runs.replay_log import FileReplayLog
from everyframe.runtime.interface import VideoState


class Denoiser(nn.Module):
    def forward(self, hidden_states: Tensor, timestep: Tensor) -> tuple[Tensor]:
        return (hidden_states * 2,)


class Kept:
    """One answer, as it comes out of a file; what is kept of others."""

    def __init__(self) -> None:
        self.left: list[Any] = [(torch.full((2,), 7.0),)]
        self.kept: list[Any] = []
        self.calls: list[str] = []

    def next(self, call: str) -> Any:
        self.calls.append(call)
        return self.left.pop() if self.left else None

    def keep(self, answer: Any, repairs: Any) -> None:
        self.kept.append(answer)

    def repairs(self) -> tuple[()]:
        return ()


def served(device: str) -> tuple[list[Tensor], Kept, StepTracker]:
    kept, denoiser = Kept(), Denoiser()
    watch = StepTracker({"denoiser": denoiser}, (), None, 2, lambda *_: None)
    video: VideoState = SimpleNamespace(replay_log=kept, repairs=())  # type: ignore[assignment]
    x = torch.ones(2, device=device)
    with watch, DenoiserReplay({"denoiser": denoiser}, watch, video):
        answers = [denoiser(x, timestep=torch.tensor(float(step)))[0] for step in (1, 0)]
    return answers, kept, watch


def test_what_was_kept_is_served_and_what_comes_after_is_computed_and_kept() -> None:
    (first, second), kept, watch = served("cpu")
    assert first.tolist() == [7, 7]
    assert second.tolist() == [2, 2]
    assert [answer[0].tolist() for answer in kept.kept] == [[2, 2]]
    assert watch.begun == 2
    assert len(set(kept.calls)) == 2, "each step is another call"


def test_what_lay_in_a_file_comes_to_where_the_inputs_are() -> None:
    """On a card the sampler would have met a prediction in the host's memory; so does meta."""
    answers, _, _ = served("meta")
    assert [answer.device.type for answer in answers] == ["meta", "meta"]


def test_modules_are_as_they_were() -> None:
    denoiser = Denoiser()
    kind = type(denoiser)
    with override_call(denoiser, lambda call: "served"):
        assert denoiser(torch.ones(1), torch.ones(1)) == "served"
        assert isinstance(denoiser, kind)
    assert type(denoiser) is kind


class Cache:
    """Keys of a reference, as Wan-Animate-2 keeps them between its calls."""

    def __init__(self) -> None:
        self.layers = [SimpleNamespace(key=None)]


class Cached(nn.Module):
    """Fills the cache in its first call, and reads it in the others."""

    num_calls = 0

    def forward(self, hidden_states: Tensor, timestep: Tensor, cache: Cache) -> tuple[Tensor]:
        self.num_calls += 1
        if cache.layers[0].key is None:
            cache.layers[0].key = hidden_states * 3
        return (hidden_states + cache.layers[0].key,)


def replayed(folder: Path, denoiser: Any, calls: Iterable[Tensor]) -> tuple[list[Tensor], int]:
    """Answers of these calls with the log in that folder, and how many were computed."""
    kept = FileReplayLog(folder, pytest.fail)
    watch = StepTracker({"denoiser": denoiser}, (), None, 3, lambda *_: None)
    video: VideoState = SimpleNamespace(replay_log=kept, repairs=())  # type: ignore[assignment]
    with watch, DenoiserReplay({"denoiser": denoiser}, watch, video):
        found = list(calls)
    return found, denoiser.num_calls


def check_resumed(answers: Callable[[int], tuple[list[Tensor], int]]) -> None:
    """Two calls, of which the first fills a cache, then three in another process."""
    whole, computed = answers(2)
    assert computed == 2
    resumed, computed = answers(3)
    assert computed == 2, "the first, which fills the cache, and the third"
    assert [each.tolist() for each in resumed] == [[4, 4], [5, 5], [6, 6]]
    assert all(map(torch.equal, resumed, whole))


def test_a_call_that_fills_a_cache_is_computed_again_and_the_others_are_served(
    tmp_path: Path,
) -> None:
    """Its answer says nothing of the cache, which is empty in another process."""

    def answers(num_calls: int) -> tuple[list[Tensor], int]:
        denoiser, cache = Cached(), Cache()
        calls = (
            denoiser(torch.ones(2) * step, torch.tensor(float(step)), cache)[0]
            for step in range(1, num_calls + 1)
        )
        return replayed(tmp_path, denoiser, calls)

    check_resumed(answers)


class HandsBack(nn.Module):
    """Fills a cache of tensors in its first call, as AnyFlow, and gives it back in each."""

    num_calls = 0

    def forward(self, hidden_states: Tensor, *, cache: dict[int, dict[str, Tensor]]) -> Any:
        self.num_calls += 1
        if not cache[0]["key"].any():
            cache[0]["key"][:] = hidden_states * 3
        return hidden_states + cache[0]["key"], cache


def test_a_cache_that_is_handed_back_is_that_of_the_call(tmp_path: Path) -> None:
    """Its answers could not be saved, so that AnyFlow was resumed from its first step."""

    def answers(num_calls: int) -> tuple[list[Tensor], int]:
        denoiser, cache = HandsBack(), {0: {"key": torch.zeros(2)}}

        def calls() -> Iterator[Tensor]:
            for step in range(1, num_calls + 1):
                answer, handed_back = denoiser(torch.ones(2) * step, cache=cache)
                assert handed_back is cache
                yield answer

        return replayed(tmp_path, denoiser, calls())

    check_resumed(answers)
