"""One seed, one video, also where a pipeline draws noise without a generator or by another name."""

from __future__ import annotations

import random
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import everyframe
from everyframe.core.events import Note, RunSaved, Step
from everyframe.diffusers_pipelines.calls.global_generators import GlobalGenerators, is_same
from helpers.tiny_checkpoints.diffusers import ltx as tiny_ltx
from helpers.tiny_checkpoints.pipeline_components import ltx_parts, made
from helpers.tiny_checkpoints.pipelines import SHORT

ASKED: dict[str, Any] = {
    "prompt": "a fox", "height": 32, "width": 32, "num_frames": 9, "num_inference_steps": 2, **SHORT
}  # fmt: skip


def noisy() -> Any:
    """LTX-Video whose decoder draws noise, as 0.9.1's does."""
    parts = ltx_parts()
    config = {**parts["vae"].config, "decoder_inject_noise": (True,) * 5}
    parts["vae"] = made(diffusers.AutoencoderKLLTXVideo.from_config(config))
    pipe = diffusers.LTXPipeline(**parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def pipe() -> Any:
    return noisy()


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERYFRAME_RUNS", str(tmp_path / "runs"))


def state() -> dict[str, Any]:
    """All that draws in this process."""
    return {
        "torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()
    }  # fmt: skip


def drawn() -> list[float]:
    return [torch.rand(()).item(), np.random.rand(), random.random()]


def frames(pipe: Any, **more: Any) -> Any:
    video = everyframe.run(pipe, output="float", **{**ASKED, "seed": 7, **more})
    assert isinstance(video, everyframe.Video)
    return video.frames


def test_they_begin_with_the_seed_and_are_put_back() -> None:
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    wanted = [drawn(), drawn()]
    before = state()
    generators, outside = GlobalGenerators(), {}

    def fails() -> None:
        with generators.seeded(5):
            assert drawn() == wanted[0]
            with generators.put_back():
                assert is_same(state(), before)
                drawn()
                outside.update(state())
            assert drawn() == wanted[1]
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert is_same(state(), outside)
    assert not is_same(state(), before), "the planted draw was not seen"
    assert not generators.is_mixed


def test_two_calls_at_once_are_reported_and_leave_them_as_they_were() -> None:
    before, one, other = state(), GlobalGenerators(), GlobalGenerators()
    with one.seeded(1), other.seeded(2):
        pass
    assert not one.is_mixed, "nobody drew"
    assert not other.is_mixed
    with one.seeded(1), other.seeded(2):
        drawn()
    assert one.is_mixed
    assert other.is_mixed
    assert is_same(state(), before)


def test_two_runs_in_threads_say_that_they_shared_them() -> None:
    pipes, notes = [noisy(), noisy()], []
    before = state()
    meeting = threading.Barrier(2)

    def meet(*_: Any) -> None:
        meeting.wait(60)  # so both are at work when either draws

    def run(pipe: Any) -> None:
        pipe.vae.decoder.register_forward_pre_hook(meet)
        events: list[Any] = []
        frames(pipe, num_inference_steps=1, on_event=events.append)
        notes.extend(event.text for event in events if isinstance(event, Note) and event.in_record)

    threads = [threading.Thread(target=run, args=(pipe,)) for pipe in pipes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert is_same(state(), before)
    assert len(notes) == 2
    assert all("while another run was at work" in note for note in notes)


def test_a_decoder_that_draws_noise_repeats_and_is_that_of_diffusers(pipe: Any) -> None:
    before = state()
    first = frames(pipe)
    assert is_same(state(), before)
    drawn()
    assert np.array_equal(frames(pipe), first)
    assert not np.array_equal(frames(pipe, seed=8), first)
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(7)
    generator = torch.Generator().manual_seed(7)
    theirs = pipe(**ASKED, generator=generator, output_type="np").frames[0]
    others = pipe(**ASKED, generator=generator.manual_seed(7), output_type="np").frames[0]
    assert np.array_equal(first, theirs)
    assert not np.array_equal(theirs, others), "its decoder draws no noise"


def test_a_folder_and_a_record_repeat(tmp_path: Path) -> None:
    noisy().save_pretrained(tmp_path / "ltx")
    asked = {"size": "32x32", "num_frames": 9, "num_inference_steps": 1, "option": SHORT, "seed": 3}

    def video(**options: Any) -> everyframe.Video:
        found = everyframe.generate(model=str(tmp_path / "ltx"), **options)
        assert isinstance(found, everyframe.Video)
        return found

    first = video(prompt="a fox", **asked)
    drawn()
    assert np.array_equal(video(from_record=first.record).frames, first.frames)


def test_whoever_reads_events_has_their_own(pipe: Any) -> None:
    """Also where they leave, and where something fails."""
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    wanted = [drawn() for _ in range(2)]
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    seen: list[list[float]] = []
    request = everyframe.Request(**with_own(ASKED), seed=7)
    with closing(everyframe.stream(request, pipe=pipe)) as events:  # type: ignore[type-var]
        for event in events:
            if isinstance(event, Step):
                seen.append(drawn())
                break
    assert [*seen, drawn()] == wanted
    before = state()
    with pytest.raises(everyframe.EveryframeError):
        everyframe.run(pipe, **ASKED, sigmas=[])
    assert is_same(state(), before)


def with_own(asked: dict[str, Any]) -> dict[str, Any]:
    """As a request has it: what is the pipeline's own by ``option``."""
    return {**{k: v for k, v in asked.items() if k not in SHORT}, "option": SHORT}


def begun(pipe: Any) -> str:
    """The name of a run that was interrupted after its first step."""
    name = ""
    request = everyframe.Request(**with_own(ASKED), seed=7)
    with closing(everyframe.stream(request, pipe=pipe)) as events:  # type: ignore[type-var]
        for event in events:
            if isinstance(event, RunSaved):
                name = event.run
            if isinstance(event, Step):
                return name
    raise AssertionError("it was not interrupted")


def resumed(pipe: Any, name: str) -> Any:
    drawn()
    video = everyframe.resume(name, pipe=pipe, output="float")
    assert isinstance(video, everyframe.Video)
    return video.frames


def test_a_resumed_run_draws_what_an_unbroken_one_does(pipe: Any) -> None:
    wanted = frames(pipe)
    assert np.array_equal(resumed(pipe, begun(pipe)), wanted)


def test_a_denoiser_that_draws_is_computed_again(pipe: Any) -> None:
    """What is served draws nothing; the decoder after it would get other numbers."""
    calls = 0

    def draws(*_: Any) -> None:
        nonlocal calls
        calls += 1
        torch.randn(3)

    handle = pipe.transformer.register_forward_hook(draws)
    try:
        wanted, name = frames(pipe), begun(pipe)
        calls = 0
        assert np.array_equal(resumed(pipe, name), wanted)
        assert calls == 2
    finally:
        handle.remove()
    calls = 0
    assert not np.array_equal(frames(pipe), wanted), "the draws made no difference"


def test_a_call_that_is_repeated_draws_the_same_again(pipe: Any) -> None:
    """A decoder that overflows once is called again, and its noise is what it was."""
    wanted, calls = frames(pipe), 0

    def overflows(module: nn.Module, args: Any, result: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return result * float("inf") if calls == 1 else result

    handle = pipe.vae.decoder.conv_out.register_forward_hook(overflows)
    try:
        assert np.array_equal(frames(pipe), wanted)
    finally:
        handle.remove()
    assert calls > 1


def test_a_parameter_called_seed_gets_ours() -> None:
    pipe = tiny_ltx.ltx_long()
    pipe.set_progress_bar_config(disable=True)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (32, 32, 3), np.uint8))
    asked = {
        **ASKED, "num_frames": 17, "temporal_tile_size": 16, "temporal_overlap": 8, "image": image
    }  # fmt: skip
    first = frames(pipe, **asked)
    theirs = pipe(
        **{name: value for name, value in asked.items() if name != "image"}, cond_image=image,
        generator=torch.Generator().manual_seed(7), seed=7, output_type="np",
    ).frames[0]  # fmt: skip
    assert np.array_equal(first, theirs)
    assert not np.array_equal(frames(pipe, **asked, seed=8), first)
    both = everyframe.run(pipe, output="float", num_videos=2, seed=7, **asked)
    assert isinstance(both, list)
    assert np.array_equal(both[0].frames, first)
    assert not np.array_equal(both[1].frames, first)
