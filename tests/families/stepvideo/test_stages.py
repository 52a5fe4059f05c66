"""Whole runs of Step-Video against the same formulas, written out in `references`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

import everyframe
from everyframe.cli.main import main
from everyframe.core.errors import InputError
from everyframe.core.events import Note, VideoDone
from everyframe.core.request import Request
from helpers.references.stepvideo import PROMPT, SIZES, frames_of

#: For questions that one frame answers.
SHORT: dict[str, Any] = {**SIZES, "num_frames": 1}


#: Float32 sums in another order (one batch or two) over 3 steps and a decoder; 4e-6 measured.
CLOSE = 4e-5


@pytest.fixture(scope="module")
def folder(tiny_models: Callable[[str], Path]) -> Path:
    return tiny_models("stepvideo")


def run(model: Path, prompt: str = PROMPT, **options: Any) -> np.ndarray[Any, Any]:
    """Float frames (T, H, W, 3) of one video."""
    given = {**SIZES, "seed": 5, **options}
    video = everyframe.generate(prompt, model=str(model), output="float", **given)
    assert isinstance(video, everyframe.Video)
    return video.frames


@pytest.mark.slow
def test_options_reach_the_run(folder: Path) -> None:
    asked = {"time_shift": 3.0, "pos_magic": "", "negative_prompt": "blue", "guidance_scale": 2.0}
    wanted = frames_of(folder, prompt=PROMPT, negative="blue", guidance=2.0, shift=3.0)
    np.testing.assert_allclose(run(folder, **asked), wanted, rtol=0, atol=CLOSE)
    # Each of them matters; the bias of the text's places too.
    same = run(folder, **SHORT)
    for name, value in (*asked.items(), ("llm_bias", "none"), ("seed", 6)):
        other = run(folder, **{**SHORT, name: value})
        assert np.abs(other - same).max() > 20 * CLOSE, name


@pytest.mark.slow
def test_without_guidance_there_is_one_branch(folder: Path) -> None:
    other = run(folder, **SHORT, guidance_scale=1)
    assert np.abs(other - run(folder, **SHORT)).max() > 100 * CLOSE
    with pytest.raises(InputError, match="no effect with guidance_scale 1"):
        run(folder, guidance_scale=1, negative_prompt="blue")


def test_a_guidance_of_less_than_1_is_off_as_upstream_has_it(folder: Path) -> None:
    """And not led away from the prompt: `guidance_scale > 1.0` is upstream's question."""
    off = run(folder, **SHORT, guidance_scale=1)
    assert np.array_equal(run(folder, **SHORT, guidance_scale=0), off)


def test_text_in_mp4_out(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.mp4"
    words = ["--size", "32x16", "--num-frames", "18", "--steps", "2", "--seed", "1", "-o", str(out)]
    assert main(["generate", "一只红色的气球 a balloon", "--model", str(folder), *words]) == 0
    with av.open(str(out)) as container:
        stream = container.streams.video[0]
        assert (stream.width, stream.height, float(stream.average_rate)) == (32, 16, 25.0)
        assert sum(1 for _ in container.decode(stream)) == 18
    assert out.with_suffix(".json").is_file()


def notes(folder: Path, prompt: str, **options: Any) -> list[str]:
    request = Request(prompt=prompt, model=str(folder), **{**SHORT, "num_inference_steps": 1},
                      **options)  # fmt: skip
    return [event.text for event in everyframe.stream(request) if isinstance(event, Note)]


def test_what_an_encoder_does_not_read_is_reported(folder: Path) -> None:
    fits = notes(folder, "a red circle", pos_magic="", negative_prompt="blue")
    assert not [note for note in fits if "CLIP" in note]
    long = "a red circle on a blue background " * 12
    request = Request(prompt=long, model=str(folder), pos_magic="超高清", negative_prompt="blue",
                      **{**SHORT, "num_inference_steps": 1})  # fmt: skip
    events = list(everyframe.stream(request))
    noted = [event.text for event in events if isinstance(event, Note)]
    (cut,) = [note for note in noted if "of the prompt's 89 tokens CLIP reads 77, and not" in note]
    done = events[-1]
    assert isinstance(done, VideoDone)
    assert done.record["notes"] == [cut]


def test_a_prompt_beyond_step_llm_is_refused_or_cut_as_asked(folder: Path) -> None:
    long = "a red circle on a blue background " * 60
    with pytest.raises(InputError, match=r"Step-LLM reads 320; shorten it.*--truncate-prompt") as e:
        run(folder, long)
    assert len(str(e.value)) < 500
    noted = notes(folder, long, truncate_prompt=True)
    with pytest.raises(InputError, match="Step-LLM reads 320"):
        everyframe.plan(long, model=str(folder), **SHORT)
    planned = everyframe.plan(long, model=str(folder), truncate_prompt=True, **SHORT).notes
    for found in (noted, planned):
        assert sum("too long for Step-LLM; its end is cut" in note for note in found) == 1
    with pytest.raises(InputError, match="the negative prompt has"):
        run(folder, negative_prompt=long)
