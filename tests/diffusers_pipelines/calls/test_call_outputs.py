"""Whatever form a pipeline's result has, frames are (T, H, W, 3) and sound is (channels, n)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from everyframe.core.errors import CheckpointError, EveryframeError
from everyframe.diffusers_pipelines.calls.call_outputs import (
    beyond_range,
    frames_of,
    num_videos_of,
    size_of,
    sound_of,
)

FRAMES = np.random.default_rng(0).random((4, 5, 6, 3)).astype(np.float32)
TCHW = torch.from_numpy(FRAMES).permute(0, 3, 1, 2)
PICTURES = [Image.fromarray((frame * 255).astype(np.uint8)) for frame in FRAMES]


@pytest.mark.parametrize(
    "result",
    [
        SimpleNamespace(frames=FRAMES[None]),
        SimpleNamespace(frames=[FRAMES]),
        SimpleNamespace(frames=TCHW[None]),
        SimpleNamespace(frames=TCHW.transpose(0, 1)[None]),
        SimpleNamespace(frames=[list(FRAMES)]),
        {"videos": FRAMES[None], "audio": None},
        SimpleNamespace(video=FRAMES, sound=None),
    ],
    ids=["array", "list of arrays", "tensor", "channels first", "frames", "modular", "no batch"],
)
def test_forms_of_frames(result: Any) -> None:
    assert np.array_equal(frames_of(result), FRAMES)
    assert size_of(result) == (4, 5, 6)


def test_a_size_needs_frames() -> None:
    """HDR's are a tensor with channels last; latents have no three of anything."""
    assert size_of(SimpleNamespace(frames=torch.from_numpy(FRAMES)[None])) == (4, 5, 6)
    assert size_of(SimpleNamespace(frames=torch.zeros(1, 16, 2, 4, 4))) is None
    assert size_of(SimpleNamespace(audio=1)) is None
    with pytest.raises(EveryframeError, match="a video without frames; ask for a longer one"):
        frames_of(SimpleNamespace(frames=np.zeros((1, 0, 5, 6, 3))))


@pytest.mark.parametrize("given", [[PICTURES], PICTURES], ids=["batch", "no batch"])
def test_pictures_stay_8_bits(given: Any) -> None:
    frames = frames_of(SimpleNamespace(frames=given))
    assert frames.dtype == np.uint8
    assert np.array_equal(frames, np.stack([np.asarray(each) for each in PICTURES]))


def test_a_tensor_of_bytes_stays_8_bits() -> None:
    """It was taken for light 255 times as bright as white."""
    wanted = np.stack([np.asarray(each) for each in PICTURES])
    tensor = torch.from_numpy(wanted).permute(0, 3, 1, 2)
    for given in (tensor[None], tensor.transpose(0, 1)[None], [tensor]):
        frames = frames_of(SimpleNamespace(frames=given))
        assert frames.dtype == np.uint8
        assert np.array_equal(frames, wanted)


@pytest.mark.parametrize(
    "given",
    [
        "frames", np.zeros((4, 4)), FRAMES[None, ..., :1],
        [[each.convert("L") for each in PICTURES]],
        [[PICTURES[0], Image.new("RGB", (8, 9))]], torch.zeros(4, 5, 6),
    ],
    ids=["text", "matrix", "one channel", "grey", "two sizes", "a tensor of three axes"],
)  # fmt: skip
def test_what_is_no_video_is_refused(given: Any) -> None:
    with pytest.raises(CheckpointError, match=r"must return pictures \(H, W, 3\) of one size"):
        frames_of(SimpleNamespace(frames=given))


def test_no_videos_are_no_frames() -> None:
    with pytest.raises(EveryframeError, match="a video without frames"):
        frames_of(SimpleNamespace(frames=[]))
    assert num_videos_of(SimpleNamespace(frames=[])) == 1


def test_three_frames_are_not_taken_for_channels() -> None:
    assert np.array_equal(frames_of(SimpleNamespace(frames=TCHW[None, :3])), FRAMES[:3])


@pytest.mark.parametrize("result", [SimpleNamespace(images=[]), FRAMES])
def test_a_result_without_frames_says_what_a_pipeline_returns(result: Any) -> None:
    """Also of a pipeline of somebody's own, whose call may return a bare array."""
    with pytest.raises(CheckpointError, match=r"an output with frames, videos or video, got a "):
        frames_of(result)


def vocoder(rate: Any) -> Any:
    return SimpleNamespace(
        vocoder=SimpleNamespace(config=SimpleNamespace(output_sampling_rate=rate))
    )


def test_sound_and_its_rate() -> None:
    samples = torch.zeros((1, 2, 10), dtype=torch.bfloat16)
    for result, pipe, rate in (
        (SimpleNamespace(audio=samples), vocoder(24000), 24000),
        ({"audio": samples, "sampling_rate": 16000}, vocoder(24000), 16000),
        (SimpleNamespace(sound=samples[0]), vocoder(8000), 8000),
    ):
        found = sound_of(result, pipe)
        assert found is not None
        assert (found[0].shape, found[0].dtype, found[1]) == ((2, 10), np.float32, rate)
    mono = sound_of(SimpleNamespace(audio=torch.zeros((1, 10))[0]), vocoder(8000))
    assert mono is not None
    assert mono[0].shape == (1, 10)
    assert sound_of(SimpleNamespace(frames=FRAMES), vocoder(1)) is None
    with pytest.raises(EveryframeError, match="names no sampling rate"):
        sound_of(SimpleNamespace(audio=samples), SimpleNamespace())
    for wrong in ([1], "x", -1, 0.5, 10**30, float("nan"), True, {"a": {}}):
        with pytest.raises(CheckpointError, match=r"the sampling rate .* must be 1 to 768000, got"):
            sound_of(SimpleNamespace(audio=samples), vocoder(wrong))


def test_light_beyond_white_is_reported() -> None:
    frames = np.full((2, 4, 4, 3), 0.5, np.float32)
    frames[0, 0, 0] = (1.0004, -0.0004, 1.0)
    assert beyond_range(frames) is None
    assert beyond_range(np.full((1, 2, 2, 3), 255, np.uint8)) is None
    frames[1] = 12.5
    note = beyond_range(frames)
    assert note is not None
    assert note.startswith("50% of the values are beyond")
    assert "the largest is 12.5" in note
