"""The Python surface: what comes back, and a video made again from what its file says."""

from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import everyframe
from everyframe.core.errors import InputError, NumericsError
from everyframe.core.events import Planned
from everyframe.families.opensora.vae import VideoVAE
from helpers.tiny_checkpoints import opensora as tiny_opensora

SIZES: dict[str, Any] = {"size": "16x16", "num_frames": 3, "num_inference_steps": 2, "fps": 12}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_opensora.opensora_1_2(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def video(model: Path) -> everyframe.Video:
    return one(prompt="a red circle", model=str(model), seed=7, motion_score=3.0, **SIZES)


def one(**options: Any) -> everyframe.Video:
    made = everyframe.generate(**options)
    assert isinstance(made, everyframe.Video)
    return made


def test_what_comes_back(video: everyframe.Video) -> None:
    assert video.frames.shape == (3, 16, 16, 3)
    assert video.frames.dtype == np.uint8
    assert video.fps == Fraction(12)
    assert video.record["request"]["seed"] == 7


def test_the_same_seed_gives_the_same_bits_and_floats_are_what_is_rounded(
    model: Path, video: everyframe.Video
) -> None:
    options = {"prompt": "a red circle", "model": str(model), "motion_score": 3.0, **SIZES}
    floats = one(seed=7, output="float", **options).frames
    assert floats.dtype == np.float32
    assert floats.min() >= 0
    assert floats.max() <= 1
    np.testing.assert_array_equal(np.rint(floats * 255).astype(np.uint8), video.frames)
    np.testing.assert_array_equal(one(seed=7, output="float", **options).frames, floats)
    assert not np.array_equal(one(seed=8, output="float", **options).frames, floats)


def test_several_videos_are_a_list(model: Path, video: everyframe.Video) -> None:
    made = everyframe.generate(
        "a red circle", model=str(model), seed=6, num_videos=2, motion_score=3.0, **SIZES
    )
    assert isinstance(made, list)
    assert [each.record["settings"]["seed"] for each in made] == [6, 7]
    np.testing.assert_array_equal(made[1].frames, video.frames)


def test_without_a_seed_one_is_drawn_and_recorded(model: Path) -> None:
    first = one(prompt="a", model=str(model), **SIZES)
    again = one(prompt="a", model=str(model), seed=first.record["request"]["seed"], **SIZES)
    np.testing.assert_array_equal(first.frames, again.frames)


@pytest.mark.parametrize("kind", ["mp4", "sidecar", "record", "png"])
def test_a_record_makes_the_same_bits(
    model: Path, video: everyframe.Video, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    source: Any
    if kind == "record":
        source = json.loads(json.dumps(dict(video.record)))
    elif kind == "png":
        source = video.save(f"{tmp_path}/frames/")
    else:
        source = video.save(tmp_path / "clip.mp4")
        if kind == "sidecar":
            source = tmp_path / "clip.json"
    # A local model is recorded by its name, without the folders above it, and named again.
    monkeypatch.chdir(model.parent)
    again = one(from_record=source, model=model.name)
    np.testing.assert_array_equal(again.frames, video.frames)
    assert again.record["request"] == video.record["request"]


def test_a_record_brings_its_number_of_threads(model: Path, video: everyframe.Video) -> None:
    record = json.loads(json.dumps(dict(video.record)))
    record["plan"]["num_threads"] += 1
    again = one(from_record=record, model=str(model))
    assert again.record["plan"]["num_threads"] == record["plan"]["num_threads"]


def test_a_video_is_made_again_of_itself(model: Path, video: everyframe.Video) -> None:
    again = one(from_record=video, model=model)
    assert np.array_equal(again.frames, video.frames)
    bare = everyframe.Video(video.frames, video.fps)
    with pytest.raises(InputError, match="has no record"):
        everyframe.generate(from_record=bare, model=model)


@pytest.mark.parametrize(
    "call",
    [
        lambda video: everyframe.plan("a", model="x" * 5000),
        lambda video: everyframe.plan("a", model="a\0b"),
        lambda video: everyframe.plan("a", model="~nobody-is-called-so/x"),
        lambda video: everyframe.plan("a", profile=5),
        lambda video: everyframe.plan("a", profile="x" * 5000),
        lambda video: everyframe.generate(from_record=5),
        lambda video: everyframe.generate(from_record="x" * 5000),
        lambda video: everyframe.generate("a", run_dir="~nobody-is-called-so"),
        lambda video: everyframe.resume("x" * 5000),
        lambda video: everyframe.trace_diff(5, 6),
        lambda video: video.save(b"clip.mp4"),
        lambda video: video.save("x" * 5000 + ".mp4"),
        lambda video: video.save("a\0b.mp4"),
        lambda video: video.save(None),
        lambda video: everyframe.Video.load(b"clip.mp4"),
        lambda video: everyframe.Video.load("x" * 5000),
    ],
)
def test_what_no_file_can_be_called_is_wrong_input(
    video: everyframe.Video, call: Callable[[everyframe.Video], Any]
) -> None:
    with pytest.raises(InputError) as raised:
        call(video)
    assert len(str(raised.value)) < 1000
    assert "\0" not in str(raised.value)


def test_other_options_overrule_a_record(model: Path, video: everyframe.Video) -> None:
    again = one(from_record=dict(video.record), model=str(model), seed=8)
    assert again.record["request"]["seed"] == 8
    assert again.record["request"]["motion_score"] == 3.0
    assert not np.array_equal(again.frames, video.frames)


def test_plan_takes_what_generate_takes(model: Path) -> None:
    request = everyframe.Request(prompt="a", model=str(model), seed=3, **SIZES)
    expected = everyframe.plan(request)
    assert everyframe.plan("a", model=str(model), seed=3, **SIZES).settings == expected.settings
    assert everyframe.plan(prompt="a", model=str(model), seed=3, **SIZES).model == str(model)
    with pytest.raises(InputError, match="a request and options"):
        everyframe.plan(request, seed=4)


def test_stream_begins_with_the_plan(model: Path) -> None:
    events = everyframe.stream(everyframe.Request(prompt="a", model=str(model), seed=3, **SIZES))
    first = next(events)
    assert isinstance(first, Planned)
    assert json.dumps(first.to_json())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"output": "bytes"}, 'output must be "uint8" or "float", got'),
        ({"prompt": "  "}, "the prompt is empty"),
        ({"prompt": ["a", "b"]}, r"prompt must be text, got a list; .*everyframe\.run\(pipe"),
        ({"seed": float("nan")}, "seed must be a"),
        ({"num_inference_steps": -1}, "num_inference_steps must be more than 0, got -1"),
        ({"guidance": 3}, "did you mean 'guidance_scale'"),
    ],
)
def test_wrong_input_is_an_input_error(model: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        everyframe.generate(**{"prompt": "a", "model": str(model), **SIZES, **options})


@pytest.mark.parametrize("output", ["uint8", "float"])
def test_frames_that_are_not_finite_never_come_back(
    model: Path, monkeypatch: pytest.MonkeyPatch, output: Any
) -> None:
    decode = VideoVAE.decode_piece

    def broken(self: VideoVAE, *args: Any) -> torch.Tensor:
        pixels = decode(self, *args)
        pixels[:, :, 1, 2, 3] = float("nan")
        return pixels

    monkeypatch.setattr(VideoVAE, "decode_piece", broken)
    with pytest.raises(NumericsError, match=r"step 1 of decode .*values that are not finite"):
        everyframe.generate("a", model=str(model), output=output, **SIZES)


@pytest.mark.parametrize("given", ["a red circle", None, 5, {"prompt": "a red circle"}])
def test_a_stream_is_of_a_request(given: Any) -> None:
    with pytest.raises(InputError, match=r"stream takes a request, got .*Request\(prompt"):
        everyframe.stream(given)
