"""Generators given to a pipeline in memory: one for several videos, torch's own, recorded ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import everyframe
from everyframe.core.errors import InputError
from everyframe.core.events import Step
from helpers.tiny_checkpoints.pipelines import SHORT, loaded

#: Two videos of one call.
ASKED: dict[str, Any] = {
    "prompt": "a fox", "height": 16, "width": 16, "num_frames": 5, "num_inference_steps": 2,
    "num_videos_per_prompt": 2, "output_type": "np", **SHORT,
}  # fmt: skip


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERYFRAME_RUNS", str(tmp_path / "runs"))


@pytest.fixture(scope="module")
def pipe(tiny_models: Callable[[str], Path]) -> Any:
    return loaded(tiny_models("wan"))


def seeded(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def frames_of(videos: Any) -> np.ndarray[Any, Any]:
    return np.stack([each.frames for each in videos])


def of_three() -> list[torch.Generator]:
    first, second = seeded(3), seeded(4)
    return [first, second, first]


@pytest.mark.parametrize(
    ("make", "more", "recorded"),
    [
        (lambda: [seeded()] * 2, {}, [{"seed": 3, "device": "cpu"}, {"same_as": 0}]),
        (
            of_three,
            {"num_videos_per_prompt": 1, "prompt": ["a fox", "a cat", "a dog"]},
            [{"seed": 3, "device": "cpu"}, {"seed": 4, "device": "cpu"}, {"same_as": 0}],
        ),
    ],
    ids=["one for both", "first and third"],
)
def test_a_generator_that_stands_in_a_list_again_goes_on(
    pipe: Any, make: Callable[[], Any], more: dict[str, Any], recorded: list[Any]
) -> None:
    """Also from its record, and where the run is resumed: no second one of its seed is drawn."""
    asked = {**ASKED, **more}
    wanted = pipe(**asked, generator=make()).frames
    assert not np.array_equal(wanted[0], wanted[-1])
    videos = everyframe.run(pipe, **asked, generator=make())
    assert np.array_equal(frames_of(videos), wanted)
    assert videos[0].record["request"]["option"]["generator"] == recorded
    again = everyframe.run(pipe, from_record=videos[0], output="float")
    assert np.array_equal(frames_of(again), wanted)

    def leave(event: Any) -> None:
        if isinstance(event, Step):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        everyframe.run(pipe, **asked, generator=make(), on_event=leave)
    assert np.array_equal(frames_of(everyframe.resume(pipe=pipe, output="float")), wanted)


def test_torchs_own_generator_is_drawn_from(pipe: Any) -> None:
    """``torch.manual_seed`` returns it: the second call goes on where the first one ended."""
    generator = torch.manual_seed(3)
    wanted = [pipe(**ASKED, generator=generator).frames for _ in range(2)]
    ends = generator.get_state()
    torch.manual_seed(3)
    found = [frames_of(everyframe.run(pipe, **ASKED, generator=generator)) for _ in range(2)]
    assert np.array_equal(found, wanted)
    assert torch.equal(torch.get_rng_state(), ends)


@pytest.mark.parametrize(
    ("recorded", "says"),
    [
        ([{"seed": "x", "device": "cpu"}] * 2, r"'seed': 'x', .* can't be made here .*; give gen"),
        ([{"seed": 3, "device": "nope"}] * 2, r"'device': 'nope'.* can't be made here"),
        ([{"seed": 2**70, "device": "cpu"}] * 2, "can't be made here"),
        ([{"same_as": 0}, {"seed": 3, "device": "cpu"}], r"must be a torch\.Generator or a list"),
        ([{"seed": 3, "device": "cpu"}, {"same_as": 1}], r"must be a torch\.Generator or a list"),
        ([{"seed": 3, "device": "cpu"}, {"same_as": "0"}], r"must be a torch\.Generator or a list"),
    ],
)
def test_what_a_record_has_in_place_of_generators_is_checked(
    pipe: Any, recorded: Any, says: str
) -> None:
    record = copy.deepcopy(everyframe.run(pipe, **ASKED, generator=[seeded()] * 2)[0].record)
    record["request"]["option"]["generator"] = recorded
    with pytest.raises(InputError, match=says):
        everyframe.run(pipe, from_record=record)
