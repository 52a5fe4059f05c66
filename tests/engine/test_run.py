"""Runs: the order of events, the same bits for the same seed, and nothing left behind outside."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import everyframe
from everyframe.core.errors import CannotRunError, InputError, MediaError
from everyframe.core.events import (
    FramesDecoded,
    Planned,
    StageDone,
    StageStarted,
    Step,
    VideoDone,
    WeightsReady,
)
from everyframe.engine import request_inputs as given_frames
from everyframe.engine import run
from everyframe.engine.records.provenance import make_record
from everyframe.media.pixels import fit_image
from everyframe.runtime.stages import templates
from helpers.events import frames_by_seed
from helpers.out_of_memory import TOO_LITTLE
from helpers.tiny_checkpoints import opensora as tiny_opensora

SIZES: dict[str, Any] = {"size": "16x16", "num_frames": 3, "num_inference_steps": 2}


@pytest.fixture(scope="module")
def model_1_0(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_opensora.opensora_1_0(tmp_path_factory.mktemp("models") / "tiny"))


def request(model: str, **options: Any) -> everyframe.Request:
    return everyframe.Request(**{"prompt": "a red circle", "model": model, **SIZES, **options})


def test_events_come_in_order_and_count_right(model: str) -> None:
    events = list(run.stream(request(model, seed=8, num_videos=2)))
    assert isinstance(events[0], Planned)
    done = [e for e in events if isinstance(e, VideoDone)]
    assert [(e.seed, e.num_frames) for e in done] == [(8, 3), (9, 3)]
    ends = [e.seed for e in events if isinstance(e, FramesDecoded | VideoDone)]
    assert ends == [8, 8, 9, 9], "a video is reported as done before the next one's frames come"
    (ready,) = [e for e in events if isinstance(e, WeightsReady)]
    assert ready.record["request"]["seed"] == 8
    assert events.index(ready) < next(
        place for place, e in enumerate(events) if isinstance(e, StageStarted)
    )
    began = [e for e in events if isinstance(e, StageStarted)]
    assert [e.stage for e in began] == ["text", "denoise", "decode"]
    assert [e.stage for e in events if isinstance(e, StageDone)] == ["text", "denoise", "decode"]
    for start in began:
        steps = [e.step for e in events if isinstance(e, Step) and e.stage == start.stage]
        assert steps == list(range(1, start.num_steps + 1)), start.stage


def test_a_callers_default_device_changes_nothing(model: str) -> None:
    """As after ``torch.set_default_device("cuda")``; between two events it is the caller's."""
    wanted = frames_by_seed(run.stream(request(model, seed=8)))[8]
    with torch.device("meta"):
        seen = list(run.stream(request(model, seed=8)))
        assert torch.zeros(1).is_meta
    np.testing.assert_array_equal(frames_by_seed(seen)[8], wanted)


@pytest.mark.parametrize("which", ["model", "model_1_0"])
def test_each_of_several_videos_is_what_its_seed_alone_gives(
    which: str, request: pytest.FixtureRequest
) -> None:
    options = {"prompt": "a", "model": request.getfixturevalue(which), **SIZES}
    together = list(run.stream(everyframe.Request(seed=8, num_videos=2, **options)))
    seen = []
    for seed in (8, 9):
        alone = frames_by_seed(run.stream(everyframe.Request(seed=seed, **options)))[seed]
        np.testing.assert_array_equal(frames_by_seed(together)[seed], alone)
        seen.append(alone)
    assert not np.array_equal(seen[0], seen[1])


def test_the_record_of_each_video_is_that_of_its_seed_alone(model: str) -> None:
    several = list(run.stream(request(model, seed=8, num_videos=2)))
    alone = list(run.stream(request(model, seed=9)))
    first, second = (e.record for e in several if isinstance(e, VideoDone))
    assert first["request"]["seed"] == first["settings"]["seed"] == 8
    assert second == next(e.record for e in alone if isinstance(e, VideoDone))


def test_the_number_of_threads_is_the_plans_while_it_runs(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = set()
    load = templates.load_component

    def spy(*args: Any, **kwargs: Any) -> Any:
        used.add(torch.get_num_threads())
        # A plan that says float32 means it: cuDNN's own default for convolutions is TF32.
        assert torch.backends.cudnn.conv.fp32_precision == "ieee"
        return load(*args, **kwargs)

    monkeypatch.setattr(templates, "load_component", spy)
    before = torch.get_num_threads()
    for event in run.stream(request(model, seed=1), num_threads=before + 1):
        # Whoever reads the events runs in their own surroundings.
        assert torch.get_num_threads() == before
        assert not torch.is_inference_mode_enabled()
        assert torch.is_grad_enabled()
        if isinstance(event, Planned):
            assert event.plan.num_threads == before + 1
        if isinstance(event, WeightsReady):
            assert event.record["plan"]["num_threads"] == before + 1
    assert used == {before + 1}
    assert torch.get_num_threads() == before


def test_a_run_that_is_left_gives_back_what_it_held(model: str) -> None:
    before = torch.get_num_threads()
    events = run.stream(request(model, seed=1), num_threads=before + 1)
    for event in events:
        if isinstance(event, Step):
            break
    events.close()  # type: ignore[attr-defined]
    assert torch.get_num_threads() == before
    assert not torch.is_inference_mode_enabled()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_start_noise_that_is_not_finite_is_refused(model: str, bad: float) -> None:
    latents = np.zeros((1, 4, 1, 2, 2), np.float32)
    latents[0, 0, 0, 1, 1] = bad
    with pytest.raises(InputError, match="latents hold values that are not finite"):
        next(iter(run.stream(request(model, latents=latents))))


@pytest.mark.parametrize(
    "latents",
    [
        np.zeros((1, 4, 1, 2, 2), object), np.full((1, 4, 1, 2, 2), "a"),
        np.zeros((1, 4, 1, 2, 2), complex), torch.zeros(1, 4, 1, 2, 2, device="meta"),
        torch.zeros(1, 4, 1, 2, 2).to_sparse(),
    ],
    ids=["objects", "texts", "complex", "meta", "sparse"],
)  # fmt: skip
def test_start_noise_that_is_no_real_number_is_refused(model: str, latents: Any) -> None:
    with pytest.raises(InputError, match="latents must be real numbers in memory, got"):
        next(iter(run.stream(request(model, latents=latents))))


@pytest.mark.parametrize("error", [RuntimeError(TOO_LITTLE), MemoryError("in a kernel")])
def test_memory_that_runs_out_between_guarded_calls_is_one_line(
    error: Exception, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check_decoder(*_: object) -> None:
        raise error

    monkeypatch.setattr(templates, "check_decoder", check_decoder)
    with pytest.raises(CannotRunError, match=rf"smaller size or num_frames.*{error.args[0][-9:]}"):
        list(run.stream(request(model)))


def test_start_noise_replaces_the_seeds(model: str) -> None:
    latents = torch.ones(1, 4, 1, 2, 2)
    one = frames_by_seed(run.stream(request(model, seed=1, latents=latents)))[1]
    two = frames_by_seed(run.stream(request(model, seed=2, latents=latents.numpy())))[2]
    np.testing.assert_array_equal(one, two)
    other = frames_by_seed(run.stream(request(model, seed=1)))[1]
    assert not np.array_equal(one, other)


def test_start_noise_may_be_flipped_or_of_another_byte_order(model: str) -> None:
    noise = np.random.default_rng(0).standard_normal((1, 4, 1, 2, 2), np.float32)
    expected = frames_by_seed(run.stream(request(model, seed=1, latents=noise)))[1]
    flipped = np.ascontiguousarray(noise[..., ::-1])[..., ::-1]
    for latents in (flipped, noise.astype(">f4")):
        made = frames_by_seed(run.stream(request(model, seed=1, latents=latents)))[1]
        np.testing.assert_array_equal(made, expected)


def test_a_video_without_pixels_is_not_extended(model: str) -> None:
    nothing = np.zeros((4, 0, 32, 3), np.uint8)
    with pytest.raises(InputError, match=r"extend must be frames \(T, H, W, 3\), got \(4, 0"):
        next(iter(run.stream(request(model, extend=nothing, num_frames=34))))


def test_given_pictures_are_read_before_anything_is_loaded(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr(templates, "load_component", never)
    (tmp_path / "no.png").write_text("no picture")
    options = {"num_frames": 17, "image": str(tmp_path / "no.png")}
    with pytest.raises(MediaError, match=r"no\.png' is no picture"):
        list(run.stream(request(model, **options)))


def test_given_frames_are_fitted_to_the_size(model: str) -> None:
    asked = request(model, num_frames=17, last_image=np.zeros((50, 80, 3), np.uint8))
    settings = everyframe.plan(asked).settings
    given = given_frames.read_given(asked, settings)
    assert given.last is not None
    assert given.last.shape == (1, 16, 16, 3)
    source = np.zeros((4, 50, 80, 3), np.uint8)
    asked = request(model, num_frames=17, extend=source)
    given = given_frames.read_given(asked, everyframe.plan(asked).settings)
    assert given.source is not None
    assert given.source.shape == (4, 16, 16, 3)


def test_a_picture_is_fitted_to_the_named_size_and_cut_to_the_videos(model: str) -> None:
    """240p of Open-Sora is 426 wide and the video 424; one of the video's size is left alone."""
    shown = np.arange(20 * 40 * 3, dtype=np.uint8).reshape(20, 40, 3)
    settings = everyframe.plan(request(model, num_frames=17, image=shown)).settings
    named = replace(settings, nominal_size=(16, 18))
    given = given_frames.read_given(request(model, image=shown), named)
    assert given.first is not None
    np.testing.assert_array_equal(given.first[0], fit_image(shown, 16, 18, "cover")[:, :16])
    own = shown[:16, :16]
    given = given_frames.read_given(request(model, image=own), named)
    assert given.first is not None
    np.testing.assert_array_equal(given.first[0], own)


def test_a_source_of_floats_is_rounded_and_other_shapes_are_refused(model: str) -> None:
    source = np.full((4, 16, 16, 3), 0.5, np.float32)
    asked = request(model, num_frames=17, extend=source)
    settings = everyframe.plan(asked).settings
    given = given_frames.read_given(asked, settings)
    assert given.source is not None
    # round(127.5) to even; as floats they would have been divided by 255 once more: black.
    np.testing.assert_array_equal(given.source, np.full((4, 16, 16, 3), 128, np.uint8))
    with pytest.raises(InputError, match=r"frames \(T, H, W, 3\), got \(16, 16, 3\)"):
        given_frames.read_given(request(model, num_frames=17, extend=source[0]), settings)


def test_a_source_may_be_a_video(model: str) -> None:
    source = everyframe.Video(np.full((4, 16, 16, 3), 0.5, np.float32), Fraction(12))
    asked = request(model, num_frames=17, fps=12, extend=source)
    given = given_frames.read_given(asked, everyframe.plan(asked).settings)
    assert given.source is not None
    np.testing.assert_array_equal(given.source, np.full((4, 16, 16, 3), 128, np.uint8))
    assert given.notes == ()
    plain = request(model, num_frames=17, fps=12, extend=source.frames)
    records = [
        make_record(everyframe.plan(each), each, [__file__])["request"]["extend"]
        for each in (asked, plain)
    ]
    assert records[0] == records[1]
    with pytest.raises(InputError, match=r"a path, an array of frames .* or a Video, got int"):
        given_frames.read_given(
            request(model, num_frames=17, extend=7), everyframe.plan(asked).settings
        )


def test_a_source_of_another_rate_is_reported(model: str, tmp_path: Path) -> None:
    frames = np.zeros((4, 16, 16, 3), np.uint8)
    everyframe.Video(frames, Fraction(12)).save(tmp_path / "clip.mp4")
    asked = request(model, num_frames=17, extend=str(tmp_path / "clip.mp4"))
    (note,) = given_frames.read_given(asked, everyframe.plan(asked).settings).notes
    assert "has 12 frames a second and the result 24" in note
    asked = request(model, num_frames=17, fps=12, extend=str(tmp_path / "clip.mp4"))
    assert given_frames.read_given(asked, everyframe.plan(asked).settings).notes == ()


def test_pictures_in_a_folder_have_the_rate_of_the_result(model: str, tmp_path: Path) -> None:
    for number in range(3):
        Image.new("RGB", (16, 16), (number, 0, 0)).save(tmp_path / f"{number}.png")
    asked = request(model, num_frames=17, extend=tmp_path)
    given = given_frames.read_given(asked, everyframe.plan(asked).settings)
    assert given.source is not None
    assert given.source[:, 0, 0, 0].tolist() == [0, 1, 2]
    assert given.notes == ()


def test_a_source_without_end_is_refused(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(given_frames, "_MAX_SOURCE_FRAMES", 3)
    asked = request(model, num_frames=17, extend=np.zeros((4, 16, 16, 3), np.uint8))
    with pytest.raises(InputError, match="has 4 frames, at most 3 are read"):
        list(run.stream(asked))
