"""Whole runs against diffusers' own `StableDiffusionControlNetInpaintPipeline`, in float32."""

from __future__ import annotations

import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import ControlNetModel, StableDiffusionControlNetInpaintPipeline
from diffusers.pipelines.controlnet import pipeline_controlnet_inpaint

import everyframe
from everyframe.core.errors import InputError
from everyframe.core.events import AudioDecoded as SoundMade
from everyframe.core.events import ComponentLoaded, Note, StageDone, Step
from everyframe.core.events import FramesDecoded as FramesMade
from everyframe.core.request import Request
from everyframe.families.inpaint.denoiser import Denoiser
from everyframe.media.audio import Audio
from everyframe.media.canny import canny
from everyframe.samplers import noise
from helpers.pictures import smooth_picture as picture
from helpers.references.inpaint import PROMPT, STEPS, Array, load_pipeline, soft_mask
from helpers.references.inpaint import frames_of as theirs
from helpers.references.inpaint import start_noise as latents_of
from helpers.rounding import moved_by_rounding
from helpers.tiny_checkpoints import inpaint as tiny_inpaint

#: Largest difference of a float frame; 1e-4 is what we promise. Sums are made in diffusers' order;
#: what is left are residuals of zero that are not added and batches of another length, so rounding,
#: which is another on another CPU. It moves frames by 7e-6 at most (`rounding.py`), and two ways of
#: computing differ by the root of 2 as much.
CLOSE = 5e-5
#: With DDIM by 6e-5: its first step divides what guidance has made 14 times as large by the root of
#: the noise level, 0.07.
CLOSE_BY_DDIM = 1e-4


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Pipelines by the channels of their UNet; the one of 4 has a second ControlNet beside it."""
    root = tmp_path_factory.mktemp("models")
    return {
        9: tiny_inpaint.inpaint(root / "nine"),
        4: tiny_inpaint.inpaint(root / "four", channels=4, num_controlnets=2),
    }


@pytest.fixture(scope="module")
def pipes(folders: dict[int, Path]) -> dict[int, Any]:
    return {channels: load_pipeline(folder) for channels, folder in folders.items()}


def ours(folder: Path, **options: Any) -> Array:
    given = {"num_inference_steps": STEPS, "seed": 7, "mask": soft_mask(32, 48), **options}
    video = everyframe.generate(PROMPT, model=str(folder), output="float", **given)
    assert isinstance(video, everyframe.Video)
    return video.frames


CASES: list[tuple[int, str, tuple[int, int], dict[str, Any]]] = [
    (9, "DDIMScheduler", (40, 32), {"guidance_scale": 1.0, "strength": 0.7}),
    (9, "EulerDiscreteScheduler", (32, 48), {"strength": 0.4, "negative_prompt": "a grey dog"}),
    (9, "DPMSolverMultistepScheduler", (32, 48), {"guess_mode": True}),
    (4, "DDIMScheduler", (32, 48), {"controlnet_conditioning_scale": 1.5}),
    (4, "UniPCMultistepScheduler", (32, 48), {"control_guidance_start": 0.3}),
    (4, "DPMSolverMultistepScheduler", (32, 48), {"control_guidance_end": 0.7, "strength": 0.9}),
    (4, "HeunDiscreteScheduler", (32, 48), {"strength": 0.7}),
]
#: Nothing but the same once more in other company.
AGAIN: list[tuple[int, str, tuple[int, int], dict[str, Any]]] = [
    (4, "PNDMScheduler", (32, 48), {"strength": 0.7}),
    (4, "EulerDiscreteScheduler", (64, 32), {"guidance_scale": 1.0}),
    (9, "UniPCMultistepScheduler", (24, 56), {"guidance_scale": 3.0}),
]


@pytest.mark.parametrize(
    ("channels", "scheduler", "size", "changed"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in AGAIN)],
    ids=str,
)
def test_frames_are_those_of_diffusers(
    folders: dict[int, Path],
    pipes: dict[int, Any],
    channels: int,
    scheduler: str,
    size: tuple[int, int],
    changed: dict[str, Any],
) -> None:
    pndm = {"skip_prk_steps": True, "steps_offset": 1} if scheduler.startswith("PNDM") else {}
    tiny_inpaint.with_scheduler(folders[channels], scheduler, **pndm)
    pipe = pipes[channels]
    pipe.scheduler = getattr(diffusers, scheduler).from_pretrained(folders[channels] / "scheduler")
    source, control, mask = picture(*size), picture(*size, seed=1), soft_mask(*size)
    given = {"latents": latents_of(*size), **changed}
    wanted = theirs(pipe, source, mask, control, **given)
    nets = {"controlnet": str(folders[channels] / "controlnet")}
    made = ours(
        folders[channels],
        source=source,
        mask=mask,
        control=control,
        unblended=True,
        **nets,
        **given,
    )
    assert made.shape == wanted.shape
    close = CLOSE_BY_DDIM if scheduler == "DDIMScheduler" else CLOSE
    assert np.abs(made - wanted).max() < close
    # The comparison means something: the frames are neither flat nor clipped away.
    assert wanted.std() > 0.05


@pytest.mark.parametrize(("channels", "strength"), [(9, 0.7), (4, 0.7), (9, 1.0)])
def test_start_noise_of_our_own_is_mixed_as_diffusers_mixes_its_own(
    folders: dict[int, Path],
    pipes: dict[int, Any],
    channels: int,
    strength: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """diffusers is handed our start noise where it would draw its own."""
    start = noise.start_noise(7, (4, 4, 6))[None]
    monkeypatch.setattr(pipeline_controlnet_inpaint, "randn_tensor", lambda *_, **__: start)
    tiny_inpaint.with_scheduler(folders[channels], "EulerDiscreteScheduler")
    pipe = pipes[channels]
    pipe.scheduler = diffusers.EulerDiscreteScheduler(**tiny_inpaint.NOISE)
    source, control, mask = picture(32, 48), picture(32, 48, seed=1), soft_mask(32, 48)
    wanted = theirs(pipe, source, mask, control, strength=strength)
    made = ours(
        folders[channels], source=source, mask=mask, control=control, strength=strength,
        unblended=True, controlnet=str(folders[channels] / "controlnet"),
    )  # fmt: skip
    assert np.abs(made - wanted).max() < CLOSE


def test_two_controlnets(folders: dict[int, Path], pipes: dict[int, Any]) -> None:
    folder = folders[4]
    tiny_inpaint.with_scheduler(folder, "DDIMScheduler")
    second = ControlNetModel.from_pretrained(folder / "controlnet_1")
    parts = {**pipes[4].components, "scheduler": diffusers.DDIMScheduler(**tiny_inpaint.NOISE)}
    parts["controlnet"] = [parts["controlnet"], second]
    pipe = StableDiffusionControlNetInpaintPipeline(**parts, requires_safety_checker=False)
    pipe.set_progress_bar_config(disable=True)
    source, control, mask = picture(32, 48), picture(32, 48, seed=1), soft_mask(32, 48)
    edges = np.repeat(canny(source)[..., None], 3, axis=-1)
    scales = [0.4, 1.2]
    wanted = theirs(
        pipe, source, mask, [edges, control], latents=latents_of(32, 48),
        controlnet_conditioning_scale=scales,
    )  # fmt: skip
    made = ours(
        folder, source=source, mask=mask, control=["canny", control], latents=latents_of(32, 48),
        controlnet_conditioning_scale=scales, unblended=True,
    )  # fmt: skip
    assert np.abs(made - wanted).max() < CLOSE_BY_DDIM
    # The bound follows from the arithmetic of diffusers' own pipeline, and is as wide.
    moved = moved_by_rounding(
        lambda: theirs(
            pipe, source, mask, [edges, control], latents=latents_of(32, 48),
            controlnet_conditioning_scale=scales,
        ),
        (pipe.unet, pipe.vae, pipe.text_encoder, pipe.controlnet),
    )  # fmt: skip
    assert CLOSE_BY_DDIM / 5 < moved < CLOSE_BY_DDIM / 2**0.5


def test_a_control_of_another_shape_is_resized_once(
    folders: dict[int, Path], pipes: dict[int, Any]
) -> None:
    """Where all is stretched to a size, as in diffusers; by way of the source's it is 0.02 off."""
    tiny_inpaint.with_scheduler(folders[9], "EulerDiscreteScheduler")
    pipes[9].scheduler = diffusers.EulerDiscreteScheduler(**tiny_inpaint.NOISE)
    source, mask, control = picture(24, 56), soft_mask(24, 56), picture(50, 30, seed=1)
    given: dict[str, Any] = {
        "height": 40, "width": 48, "latents": latents_of(40, 48), "num_inference_steps": 1,
        "guidance_scale": 1.0, "controlnet_conditioning_scale": 1.5,
    }  # fmt: skip
    wanted = theirs(pipes[9], source, mask, control, **given)
    made = ours(
        folders[9], source=source, mask=mask, control=control, fit="stretch", unblended=True,
        **given,
    )  # fmt: skip
    assert np.abs(made - wanted).max() < CLOSE


def test_the_control_of_the_inpainting_controlnet(
    folders: dict[int, Path], pipes: dict[int, Any]
) -> None:
    """The source with -1 under the mask, as its authors and diffusers' documentation have it."""
    tiny_inpaint.with_scheduler(folders[9], "DDIMScheduler")
    pipes[9].scheduler = diffusers.DDIMScheduler(**tiny_inpaint.NOISE)
    source, mask, latents = picture(32, 48), soft_mask(32, 48), latents_of(32, 48)
    shown = source.astype(np.float32) / 255
    shown[mask.astype(np.float32) / 255 > 0.5] = -1.0
    control = torch.from_numpy(shown.transpose(2, 0, 1))[None]
    wanted = theirs(pipes[9], source, mask, control, latents=latents)
    made = ours(folders[9], source=source, control="inpaint", latents=latents, unblended=True)
    assert np.abs(made - wanted).max() < CLOSE_BY_DDIM


def test_outside_of_the_mask_the_source_stays_to_the_pixel(folders: dict[int, Path]) -> None:
    source, mask = picture(32, 48), soft_mask(32, 48)
    given = {"source": source, "mask": mask, "control": "canny", "num_inference_steps": 1}
    whole = ours(folders[9], unblended=True, **given)[0]
    blended = ours(folders[9], **given)[0]
    share = (mask.astype(np.float32) / 255)[..., None]
    kept = source.astype(np.float32) / 255
    assert np.array_equal(blended, share * whole + (1 - share) * kept)
    made = everyframe.generate(PROMPT, model=str(folders[9]), seed=7, **given)
    assert isinstance(made, everyframe.Video)
    assert np.array_equal(made.frames[0][mask == 0], source[mask == 0])
    assert not np.array_equal(made.frames[0][mask == 255], source[mask == 255])


def test_a_side_that_is_no_multiple_of_eight_is_padded_and_cut_back(
    folders: dict[int, Path],
) -> None:
    source = picture(30, 45)
    given: dict[str, Any] = {"control": "canny", "num_inference_steps": 1, "mask": "4,4,45,30"}
    made = ours(folders[9], source=source, **given)[0]
    assert made.shape == source.shape
    assert np.array_equal(np.rint(made * 255)[:4], source[:4])
    padded = np.pad(source, ((0, 2), (0, 3), (0, 0)), mode="edge")
    # Edges are looked for in the picture as it is, so the control is given here as well.
    edges = np.pad(canny(source), ((0, 2), (0, 3)), mode="edge")
    whole = ours(folders[9], source=padded, **{**given, "control": edges})[0]
    assert np.array_equal(made, whole[:30, :45])


def test_each_frame_of_a_video_is_as_if_it_were_alone(folders: dict[int, Path]) -> None:
    """The same start noise for every frame; two at once differ by rounding alone."""
    frames = np.stack([picture(32, 48), picture(32, 48, seed=1), picture(32, 48)])
    masks = np.stack([soft_mask(32, 48), 255 - soft_mask(32, 48), soft_mask(32, 48)])
    given: dict[str, Any] = {"num_inference_steps": 2, "control": "canny", "strength": 0.6}
    given |= {"controlnet": str(folders[4] / "controlnet")}
    whole = ours(folders[4], source=frames, mask=masks, **given)
    alone = ours(folders[4], source=frames[1], mask=masks[1], **given)
    assert np.array_equal(whole[1:2], alone)
    assert np.array_equal(whole[0], whole[2])
    by_two = ours(folders[4], source=frames, mask=masks, frames_at_once=2, **given)
    # Rows of a matrix product change in their last bits with their number.
    assert np.abs(by_two - whole).max() < CLOSE


def test_a_scheduler_that_draws_gives_every_frame_the_same(folders: dict[int, Path]) -> None:
    tiny_inpaint.with_scheduler(folders[9], "EulerAncestralDiscreteScheduler")
    source = np.stack([picture(32, 48)] * 2)
    both = ours(folders[9], source=source, control="canny", frames_at_once=2)
    assert np.array_equal(both[0], both[1])


@pytest.mark.parametrize(
    "name",
    [
        "DDPMScheduler",
        pytest.param("LCMScheduler", marks=pytest.mark.slow),
        # Its own tables take it seconds.
        pytest.param("KDPM2AncestralDiscreteScheduler", marks=pytest.mark.slow),
    ],
)
def test_schedulers_that_draw_are_diffusers(
    folders: dict[int, Path], pipes: dict[int, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both draw by diffusers' own function, which is handed the same noise for the same draw."""
    kind = getattr(diffusers, name)
    draws: list[tuple[int, ...]] = []

    def drawn(shape: Any, *_: Any, dtype: Any = None, **__: Any) -> torch.Tensor:
        draws.append(tuple(shape))
        generator = torch.Generator().manual_seed(len(draws))
        return torch.randn(tuple(shape), generator=generator, dtype=dtype)

    monkeypatch.setattr(sys.modules[kind.__module__], "randn_tensor", drawn)
    tiny_inpaint.with_scheduler(folders[9], name)
    pipes[9].scheduler = kind.from_pretrained(folders[9] / "scheduler")
    source, control, mask = picture(32, 48), picture(32, 48, seed=1), soft_mask(32, 48)
    wanted = theirs(pipes[9], source, mask, control, latents=latents_of(32, 48))
    by_diffusers = draws[:]
    draws.clear()
    made = ours(
        folders[9], source=source, mask=mask, control=control, latents=latents_of(32, 48),
        unblended=True,
    )  # fmt: skip
    assert draws == by_diffusers
    assert len(draws) >= STEPS - 1
    assert np.abs(made - wanted).max() < CLOSE
    assert wanted.std() > 0.05


def test_frames_with_an_empty_mask_are_the_source_and_are_not_denoised(
    folders: dict[int, Path],
) -> None:
    tiny_inpaint.with_scheduler(folders[4], "DDIMScheduler")
    frames = np.stack([picture(32, 48, seed=seed) for seed in range(5)])
    masks = np.zeros((5, 32, 48), np.uint8)
    masks[1], masks[4] = soft_mask(32, 48), soft_mask(32, 48)
    given: dict[str, Any] = {
        "prompt": PROMPT, "model": str(folders[4]), "mask": masks, "control": "canny", "seed": 7,
        "num_inference_steps": 2, "controlnet": str(folders[4] / "controlnet"),
    }  # fmt: skip
    plan = everyframe.plan(source=frames, **given)
    assert any("empty in 3 of 5 frames" in note for note in plan.notes)
    seen = list(everyframe.stream(Request(source=frames, **given)))
    steps = [event.stage for event in seen if isinstance(event, Step)]
    assert [steps.count(stage) for stage in ("given frames", "denoise", "decode")] == [2, 4, 2]
    made = np.concatenate([event.frames for event in seen if isinstance(event, FramesMade)])
    assert np.array_equal(made[[0, 2, 3]], frames[[0, 2, 3]].astype(np.float32) / 255)
    # The others are what they are alone.
    for number in (1, 4):
        alone = ours(
            folders[4], source=frames[number], mask=masks[number],
            **{name: given[name] for name in ("control", "controlnet", "num_inference_steps")},
        )  # fmt: skip
        assert np.array_equal(made[number : number + 1], alone)
    # Where nothing is left of the mask, nothing is done for hours.
    with pytest.raises(InputError, match="the mask is empty in every frame at 48x32"):
        everyframe.plan(source=frames, num_frames=1, **given)


@pytest.mark.slow
def test_the_sound_of_a_video_comes_along(folders: dict[int, Path], tmp_path: Path) -> None:
    frames = np.stack([picture(32, 48)] * 4)
    tone = np.sin(2 * np.pi * 440 * np.arange(16000) / 16000, dtype=np.float32)[None] / 2
    video = everyframe.Video(frames, Fraction(8), {}, Audio(tone, 16000))
    video.save(tmp_path / "source.mp4")
    given: dict[str, Any] = {
        "prompt": PROMPT, "model": str(folders[9]), "mask": "4,4,24,24", "control": "canny",
        "num_inference_steps": 1, "seed": 1, "source": tmp_path / "source.mp4",
    }  # fmt: skip
    seen = list(everyframe.stream(Request(num_frames=2, **given)))
    (sound,) = [event for event in seen if isinstance(event, SoundMade)]
    # Two frames of eight a second; AAC is lossy, and the tone is still what is heard.
    assert sound.samples.shape == (1, 4000)
    power = np.abs(np.fft.rfft(sound.samples[0]))
    assert power.argmax() == 110
    assert 0.3 < np.abs(sound.samples[0, 1000:]).max() < 0.7
    faster = list(everyframe.stream(Request(fps=4, **given)))
    assert not [event for event in faster if isinstance(event, SoundMade)]
    assert [e for e in faster if isinstance(e, Note) and "plays at another speed" in e.text]


def test_stages_and_steps_are_events(folders: dict[int, Path]) -> None:
    tiny_inpaint.with_scheduler(folders[4], "DDIMScheduler")
    request = Request(
        prompt=PROMPT, model=str(folders[4]), source=np.stack([picture(32, 48)] * 3),
        mask=(8, 8, 24, 24), control="canny,inpaint", seed=1, num_inference_steps=4, strength=0.5,
        frames_at_once=2,
    )  # fmt: skip
    seen = list(everyframe.stream(request))
    loaded = [event.component for event in seen if isinstance(event, ComponentLoaded)]
    assert loaded == ["text_encoder", "vae", "controlnet", "controlnet_1", "unet", "vae"]
    stages = [event.stage for event in seen if isinstance(event, StageDone)]
    assert stages == ["text", "given frames", "denoise", "decode"]
    steps = [
        (event.stage, event.step, event.num_steps) for event in seen if isinstance(event, Step)
    ]
    # Two batches of frames; half of four steps for each.
    assert steps == [
        *[(name, n, 2) for name in ("text", "given frames") for n in (1, 2)],
        *[("denoise", n, 4) for n in (1, 2, 3, 4)],
        *[("decode", n, 2) for n in (1, 2)],
    ]


def test_predicted_answers_leave_the_scheduler_alone(
    folders: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PNDM with its state: each batch computes its own steps, from its own answers."""
    tiny_inpaint.with_scheduler(folders[9], "PNDMScheduler", skip_prk_steps=True, steps_offset=1)
    calls: list[int] = []
    real = Denoiser.__call__

    def counted(self: Any, x: Any, t: Any) -> Any:
        calls.append(len(x))
        return real(self, x, t)

    monkeypatch.setattr(Denoiser, "__call__", counted)
    source = np.random.default_rng(0).integers(0, 255, (3, 24, 24, 3), dtype=np.uint8)
    asked: dict[str, Any] = {
        "prompt": "a red ball", "model": str(folders[9]), "source": source, "mask": "4,4,20,20",
        "control": "canny", "num_inference_steps": 8, "seed": 3, "frames_at_once": 2,
        "output": "float", "device": "cpu",
    }  # fmt: skip
    everyframe.plan(**{name: each for name, each in asked.items() if name != "output"})
    calls.clear()
    exact = everyframe.generate(**asked).frames
    assert len(calls) >= 16
    calls.clear()
    found = everyframe.generate(**asked, quality="taylor1@4").frames
    assert calls == [2] * 4 + [1] * 4
    assert np.abs(found - exact).max() > 1e-4
    apart = everyframe.generate(**{**asked, "frames_at_once": 1}, quality="taylor1@4").frames
    np.testing.assert_allclose(apart, found, atol=1e-4)
