"""What a caller hears: notes and repairs as warnings, to `on_event` and in the record; the order.

Faults are planted: frames of one colour, a record of another machine, devices that are done in
another order than that of the seeds.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import everyframe
from everyframe import EveryframeWarning, api
from everyframe.cli.generate import make
from everyframe.core.events import Event, FramesDecoded, Note, Planned, VideoDone, WeightsReady
from everyframe.core.plan import Plan
from everyframe.families.opensora.vae import VideoVAE
from helpers.events import frames_by_seed

ASKED: dict[str, Any] = {"size": "16x16", "num_frames": 3, "num_inference_steps": 1, "fps": 12}


def messages(warned: pytest.WarningsRecorder) -> list[str]:
    return [str(each.message) for each in warned if each.category is EveryframeWarning]


def test_frames_of_one_colour_are_reported_in_every_way(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the second video alone, also in float32, so nothing can be done about it."""
    decode, calls = VideoVAE.decode_piece, []

    def black(self: VideoVAE, *args: Any) -> torch.Tensor:
        pixels = decode(self, *args)
        if not pixels.is_meta:  # else it is the plan's dry run
            calls.append(1)
        return pixels if len(calls) == 1 else pixels.fill_(-1)

    monkeypatch.setattr(VideoVAE, "decode_piece", black)
    events: list[Event] = []
    with pytest.warns(EveryframeWarning) as warned:
        first, second = everyframe.generate(
            "a fox", model=model, seed=3, num_videos=2, on_event=events.append, **ASKED
        )
    notes = [text for text in messages(warned) if "of one colour" in text]
    assert len(notes) == 1
    assert second.record["notes"] == notes
    assert "notes" not in first.record
    assert notes[0] in [event.text for event in events if isinstance(event, Note)]
    assert {each.filename for each in warned if each.category is EveryframeWarning} == {__file__}
    with warnings.catch_warnings():
        warnings.simplefilter("error", EveryframeWarning)
        with pytest.raises(EveryframeWarning):
            everyframe.generate("a fox", model=model, seed=3, **ASKED)


def test_a_record_is_compared_with_what_is_here(model: str) -> None:
    video = everyframe.generate("a fox", model=model, seed=3, **ASKED)
    assert isinstance(video, everyframe.Video)
    record = json.loads(json.dumps(dict(video.record)))
    record["versions"]["torch"] = "1.0"
    record["model"]["sha256"] = "0" * 64
    with pytest.warns(EveryframeWarning) as warned:
        everyframe.generate(from_record=record, model=model)
    differ = [text for text in messages(warned) if "may differ from the recorded ones" in text]
    assert any("the model's weights are not those" in text for text in differ)
    assert any("torch was 1.0" in text for text in differ)


@pytest.fixture
def plan(model: str) -> Plan:
    return everyframe.plan("a fox", model=model, seed=3, num_videos=2, **ASKED)


def raced(plan: Plan) -> Iterator[Event]:
    """Two videos on two devices, the second of which is done first."""
    yield Planned(plan)
    yield WeightsReady({})
    for seed in (4, 3):
        yield FramesDecoded(seed, 3, np.full((3, 16, 16, 3), seed / 10, np.float32))
        yield VideoDone(seed, 3, {"settings": {"seed": seed}})


def test_videos_are_in_the_order_of_their_seeds(
    plan: Plan, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "run_in_workers", lambda *_: raced(plan))
    videos = everyframe.generate(
        "a fox", model=model, seed=3, num_videos=2, num_devices=2, output="float", **ASKED
    )
    assert isinstance(videos, list)
    wanted = frames_by_seed(list(raced(plan)))
    for seed, video in zip((3, 4), videos, strict=True):
        assert video.record["settings"]["seed"] == seed
        np.testing.assert_array_equal(video.frames, wanted[seed])


def test_paths_are_printed_in_the_order_of_their_seeds(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert make(lambda: raced(plan), str(tmp_path / "clip.mp4"), json=False) == 0  # type: ignore[arg-type, return-value]
    paths = capsys.readouterr().out.split()
    assert len(paths) == 2
    assert paths == sorted(paths)
