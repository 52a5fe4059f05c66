"""Whole runs of Open-Sora against the same formulas, written out in `references`."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import everyframe
from everyframe.core.errors import InputError
from everyframe.core.events import ComponentLoaded, Note, StageDone
from everyframe.core.quality import LossyMethod, SamplingMethod
from everyframe.families.opensora import stages
from everyframe.families.opensora.stdit3 import STDiT3
from everyframe.families.opensora.vae import VideoVAE
from everyframe.ops.attention import by_kernel
from everyframe.runtime.stages import templates
from helpers.references.opensora import (
    LATENTS,
    PROMPT,
    SIZES,
    frames_1_2,
    load_video_vae,
    start_noise,
)

#: Float32 sums in another order (one batch or two, fused or not) over 4 steps; 2e-6 measured.
CLOSE = 2e-5


@pytest.fixture(autouse=True)
def _plain_attention() -> Iterator[None]:
    """By the kernel of a run for which nothing is certified: other kernels round differently."""
    with by_kernel("math"):
        yield


@pytest.fixture(scope="module")
def model_1_2(model: str) -> Path:
    return Path(model)


def run(model: Path, prompt: str = PROMPT, **options: Any) -> np.ndarray[Any, Any]:
    """Float frames (T, H, W, 3) of one video."""
    given = {**SIZES, "seed": 5, **options}
    video = everyframe.generate(prompt, model=str(model), output="float", **given)
    assert isinstance(video, everyframe.Video)
    return video.frames


@pytest.fixture
def seen_latents(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The latents of each clip as they are decoded."""
    found: list[Tensor] = []
    decode_piece = VideoVAE.decode_piece

    def spy(self: VideoVAE, latents: Tensor, piece: Any, *more: Any) -> Any:
        if piece.latent_start == 0 and not latents.is_meta:  # not the dry run's
            found.append(latents.clone())
        return decode_piece(self, latents, piece, *more)

    monkeypatch.setattr(VideoVAE, "decode_piece", spy)
    return found


def test_a_negative_prompt_stands_in_for_the_null_text_with_its_own_mask(model_1_2: Path) -> None:
    start = start_noise()
    # Without the score that the prompt gets: on both sides guidance would cancel it.
    _, expected = frames_1_2(model_1_2, start, negative="blue square")
    frames = run(model_1_2, latents=start, negative_prompt="blue square")
    assert np.abs(frames - expected).max() < CLOSE
    assert np.abs(frames - run(model_1_2, latents=start)).max() > 100 * CLOSE


def counted_branches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each call of the denoiser from now on."""
    batches: list[int] = []
    forward = STDiT3.forward

    def spy(self: STDiT3, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if x.device.type != "meta":  # the plan's dry run
            batches.append(len(x))
        return forward(self, x, *args, **kwargs)

    monkeypatch.setattr(STDiT3, "forward", spy)
    return batches


@pytest.mark.parametrize(("scale", "branches"), [(1.0, 1), (3.0, 2)])
def test_without_guidance_one_branch_is_computed(
    model_1_2: Path, monkeypatch: pytest.MonkeyPatch, scale: float, branches: int
) -> None:
    batches = counted_branches(monkeypatch)
    run(model_1_2, guidance_scale=scale)
    assert batches == [branches] * SIZES["num_inference_steps"]


@pytest.mark.parametrize(
    ("limit", "branches"), [(None, [2, 2, 2, 1, 2, 1]), (1e-12, [2, 2, 2, 2, 2, 2])]
)
def test_held_steps_compute_one_branch_until_the_error_passes_its_limit(
    model_1_2: Path, monkeypatch: pytest.MonkeyPatch, limit: float | None, branches: list[int]
) -> None:
    batches = counted_branches(monkeypatch)
    method = SamplingMethod("ab2", 6, holds_guidance=True, limit=limit)
    with contextlib.ExitStack() as stack:
        if limit is not None:
            stack.enter_context(
                pytest.warns(everyframe.EveryframeWarning, match="all steps from here")
            )
        run(model_1_2, method=LossyMethod(method), num_inference_steps=6)
    assert batches == branches


def test_image_to_video_keeps_the_image_and_equals_the_formulas(
    model_1_2: Path, seen_latents: list[Tensor]
) -> None:
    image = np.random.default_rng(0).integers(0, 256, (24, 40, 3), dtype=np.uint8)
    frames = run(model_1_2, latents=start_noise(), image=image)
    vae = load_video_vae(model_1_2 / "vae")
    pixels = torch.from_numpy(image).float().permute(2, 0, 1)[None, :, None] / 255 * 2 - 1
    first = vae.encode(pixels)
    known, mask = torch.zeros(LATENTS), torch.ones(1, 6, dtype=torch.bool)
    known[:, :, :1], mask[:, 0] = first, False
    latents, expected = frames_1_2(model_1_2, start_noise(), known=known, mask=mask)
    # Bit for bit: no step touches a frame that is given.
    assert torch.equal(seen_latents[0][:, :, :1], first)
    assert (seen_latents[0] - latents).abs().max() < CLOSE
    assert np.abs(frames - expected).max() < CLOSE


def test_last_image_is_the_last_latent_frame(model_1_2: Path, seen_latents: list[Tensor]) -> None:
    image = np.random.default_rng(1).integers(0, 256, (24, 40, 3), dtype=np.uint8)
    run(model_1_2, last_image=image)
    vae = load_video_vae(model_1_2 / "vae")
    # The last piece of 20 frames has 3; standing still, it ends in one latent frame of them all.
    still = torch.from_numpy(image).float().permute(2, 0, 1)[None, :, None] / 255 * 2 - 1
    expected = vae.encode(still.expand(-1, -1, 3, -1, -1))
    # The spatial half sees one frame in place of three, whose sums may have another order.
    assert (seen_latents[0][:, :, -1:] - expected).abs().max() < CLOSE
    assert (seen_latents[0][:, :, -2:-1] - expected).abs().max() > 0.1


@pytest.mark.parametrize(
    ("length", "num_frames", "overlap"),
    [(30, 20, 17), (5, 20, 1), pytest.param(30, 17, 1, marks=pytest.mark.slow)],
)
def test_extend_begins_with_the_source_and_drops_the_overlap(
    model_1_2: Path, seen_latents: list[Tensor], length: int, num_frames: int, overlap: int
) -> None:
    source = np.random.default_rng(2).integers(0, 256, (length, 24, 40, 3), dtype=np.uint8)
    options = {**SIZES, "num_frames": num_frames}
    video = everyframe.generate(PROMPT, model=str(model_1_2), seed=5, extend=source, **options)
    assert isinstance(video, everyframe.Video)
    assert video.num_frames == length + num_frames - overlap
    np.testing.assert_array_equal(video.frames[:length], source)
    vae = load_video_vae(model_1_2 / "vae")
    pixels = torch.from_numpy(source[-overlap:]).float() / 255
    expected = vae.encode(pixels.permute(3, 0, 1, 2)[None] * 2 - 1)
    assert torch.equal(seen_latents[0][:, :, : expected.shape[2]], expected)


def test_a_chain_goes_on_from_the_clip_before(model_1_2: Path, seen_latents: list[Tensor]) -> None:
    frames = run(model_1_2, chain=2)
    assert len(frames) == 20 + 20 - 17
    np.testing.assert_array_equal(frames[:20], run(model_1_2))
    vae = load_video_vae(model_1_2 / "vae")
    tail = torch.from_numpy(frames[3:20]).permute(3, 0, 1, 2)[None] * 2 - 1
    assert torch.equal(seen_latents[1][:, :, :5], vae.encode(tail))
    # The second clip has noise of its own.
    assert not torch.allclose(seen_latents[1][:, :, 5], seen_latents[0][:, :, 5])


def test_edit_strength_goes_from_keeping_to_ignoring(
    model_1_2: Path, seen_latents: list[Tensor]
) -> None:
    image = np.random.default_rng(0).integers(0, 256, (24, 40, 3), dtype=np.uint8)
    free = run(model_1_2)
    ignored = run(model_1_2, image=image, edit_strength=1.0)
    np.testing.assert_array_equal(ignored, free)
    run(model_1_2, image=image)
    run(model_1_2, image=image, edit_strength=0.6)
    kept, edited = seen_latents[2][:, :, 0], seen_latents[3][:, :, 0]
    assert (edited - kept).abs().max() > 0.01
    assert (edited - seen_latents[0][:, :, 0]).abs().max() > 0.01


def test_each_part_is_gone_before_the_next_one_is_loaded(
    model_1_2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[weakref.ref[nn.Module]] = []
    load = templates.load_component

    def spy(*args: Any, **kwargs: Any) -> nn.Module:
        alive = [ref for ref in loaded if ref() is not None]
        assert not alive, f"{len(alive)} of {len(loaded)} parts still live"
        module: nn.Module = load(*args, **kwargs)
        loaded.append(weakref.ref(module))
        return module

    monkeypatch.setattr(templates, "load_component", spy)
    image = np.zeros((24, 40, 3), dtype=np.uint8)
    request = everyframe.Request(
        prompt=PROMPT, model=str(model_1_2), seed=1, chain=2, image=image, **SIZES
    )
    gc.disable()  # nothing may hang on a cycle: only the engine's own collection helps
    try:
        events = list(everyframe.stream(request))
    finally:
        gc.enable()
    parts = [event.component for event in events if isinstance(event, ComponentLoaded)]
    once = ["vae", "denoiser", "vae"]
    assert parts == ["text_encoder", *once, *once]
    assert len([event for event in events if isinstance(event, StageDone)]) == len(parts)
    assert all(ref() is None for ref in loaded)


def test_a_finished_video_keeps_no_frames(model_1_2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Seen after each clip of each of two videos: the end of a clip is held for the next one only.
    held: list[list[bool]] = []
    decode = stages.DecodeStage.run

    def spy(self: stages.DecodeStage, videos: Any) -> Any:
        yield from decode(self, videos)
        held.append([video.last_frames is not None for video in videos])

    monkeypatch.setattr(stages.DecodeStage, "run", spy)
    request = everyframe.Request(
        prompt=PROMPT, model=str(model_1_2), seed=1, chain=2, num_videos=2, **SIZES
    )
    list(everyframe.stream(request))
    assert held == [[True, True], [False, False]]


def test_a_prompt_that_is_too_long_is_reported_before_anything_is_loaded(
    model_1_2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr(templates, "load_component", never)
    with pytest.raises(InputError, match=r"has 46 tokens, this model reads 24;.*cuts: 'left"):
        run(model_1_2, "a red circle " * 7 + "a " + "left " * 16)


def test_a_prompt_is_cut_by_choice_with_a_note(model_1_2: Path) -> None:
    words = "a red circle " * 7 + "a " + "left " * 16
    request = everyframe.Request(
        prompt=words, model=str(model_1_2), seed=1, truncate_prompt=True, **SIZES
    )
    notes = [e.text for e in everyframe.stream(request) if isinstance(e, Note)]
    assert sum("its end is cut: 'left" in note for note in notes) == 1, notes


def test_a_prompt_of_which_nothing_is_left_is_refused(model_1_2: Path) -> None:
    with pytest.raises(InputError, match="Chinese characters"):
        run(model_1_2, "一个红色的圆圈")
    with pytest.raises(InputError, match="nothing is left of the prompt"):
        run(model_1_2, "https://example.org/film")
    with pytest.raises(InputError, match="nothing is left of the prompt '圆'"):
        run(model_1_2, negative_prompt="圆")
