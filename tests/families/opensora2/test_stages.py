"""Runs of an Open-Sora 2.0: text in and mp4 out, two stages, clips, both ends, each video's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from PIL import Image
from safetensors.torch import load_file

import everyframe
from everyframe.cli.main import main
from everyframe.core.events import ComponentLoaded, StageStarted, Step
from everyframe.core.request import Request
from everyframe.engine.run import initial_videos
from everyframe.families.opensora2.checkpoint import FLUX, FLUX_VAE
from everyframe.families.opensora2.denoiser import Denoiser
from everyframe.families.opensora2.mmdit import MMDiT
from everyframe.planning.resolve import prepare
from everyframe.runtime.interface import DryRunSpec
from everyframe.samplers import noise
from helpers.pictures import smooth_picture
from helpers.plans import frames_of, unchanged
from helpers.references import flux
from helpers.references import opensora2 as reference
from helpers.slow_rows import slow_unless
from helpers.tiny_checkpoints import opensora2 as tiny

SIZES = {**reference.SIZES, "seed": 5, "num_inference_steps": 2}
#: A first picture, at the size of the tiny video.
FIRST = {"first_frame": "flux", "first_frame_resolution": "video"}
#: Float32 sums in another order, over two steps and a decoder.
CLOSE = 5e-5


@pytest.fixture(scope="module")
def folder(tiny_models: Callable[[str], Path]) -> Path:
    return tiny_models("opensora2")


def run(model: Path, prompt: str = reference.PROMPT, **options: Any) -> np.ndarray[Any, Any]:
    """Float frames (T, H, W, 3) of one video."""
    video = everyframe.generate(
        prompt, model=str(model), output="float", **{**SIZES, "device": "cpu", **options}
    )
    assert isinstance(video, everyframe.Video)
    return video.frames


@cache
def drawn(model: Path, **options: Any) -> np.ndarray[Any, Any]:
    """The frames of a run that several tests look at."""
    return run(model, **options)


def test_text_in_mp4_out(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.mp4"
    words = ["--size", "48x32", "--num-frames", "9", "--steps", "2", "--seed", "1", "-o", str(out)]
    assert main(["generate", "a red circle", "--model", str(folder), *words]) == 0
    with av.open(str(out)) as container:
        stream = container.streams.video[0]
        assert (stream.width, stream.height, float(stream.average_rate)) == (48, 32, 24.0)
        assert sum(1 for _ in container.decode(stream)) == 9
    assert out.with_suffix(".json").is_file()


def test_text_alone_equals_its_reference(folder: Path) -> None:
    """With a guidance that oscillates: from the eleventh step every second one has one branch."""
    wanted = reference.frames_of(folder, steps=12)
    got = run(folder, num_inference_steps=12)
    assert np.abs(got - wanted).max() < 4 * CLOSE
    assert wanted.std() > 0.01


@pytest.mark.parametrize(("image", "branches"), [(False, 80), (True, 110)])
def test_only_the_needed_branches_are_evaluated(
    folder: Path, monkeypatch: pytest.MonkeyPatch, image: bool, branches: int
) -> None:
    """Of 150 that upstream computes in 50 steps.

    The first answer of each size stands for all of them.
    """
    seen: list[int] = []
    answers: dict[int, Any] = {}
    real = MMDiT.forward

    def counted(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        if x.device.type == "meta":
            return real(self, x, *args, **kwargs)
        seen.append(len(x))
        if len(x) not in answers:
            answers[len(x)] = real(self, x, *args, **kwargs)
        return answers[len(x)].clone()

    monkeypatch.setattr(MMDiT, "forward", counted)
    given = {"image": smooth_picture(16, 16)} if image else {}
    run(
        folder, size="16x16", height=None, width=None, num_frames=5, num_inference_steps=50, **given
    )
    assert sum(seen) == branches


@pytest.mark.parametrize("resolution", slow_unless(["256px"], ["video", "256px"]))
def test_a_first_picture_of_flux_begins_the_video(folder: Path, resolution: str) -> None:
    """Equal to FLUX's picture by diffusers' modules, given as the first frame.

    Upstream draws it at a size of its table, and resizes and crops it as a given one.
    """
    height, width = (32, 48) if resolution == "video" else (208, 320)  # 3:2 of 256px
    config = tiny.FIRST
    model = flux.flux_of(config, load_file(folder / FLUX))
    vae: Any = AutoencoderKL(
        block_out_channels=(32, 32, 32, 32), layers_per_block=1, latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
        use_quant_conv=False, use_post_quant_conv=False,
    ).eval()  # fmt: skip
    stored = load_file(folder / FLUX_VAE)
    vae.load_state_dict({
        name: stored[tiny.ldm_name(name)].view(tensor.shape)
        for name, tensor in vae.state_dict().items()
    })  # fmt: skip
    t5, clip = reference.text_states(folder, [reference.PROMPT])
    x = noise.start_noise(noise.derived_seed(5, "first picture"), (4, 1, height // 8, width // 8))
    x, tokens = x[None], height // 16 * (width // 16)
    times = reference.shifted(2, tokens=tokens, frames=1)
    with torch.no_grad():
        for now, after in pairwise(times):
            x = x + (after - now) * flux.velocity(
                model, config, x, torch.tensor([now]), t5, clip, guidance=torch.tensor([4.0])
            )
        pixels = vae.decode(x[:, :, 0] / 0.3611 + 0.1159).sample[0]
    picture = (pixels.permute(1, 2, 0) / 2 + 0.5).clamp(0, 1) * 255
    picture = picture.round().numpy()
    if resolution != "video":
        resized = Image.fromarray(picture.astype(np.uint8)).resize((49, 32), Image.BICUBIC)
        picture = np.asarray(resized, np.float32)[:, :48]
    wanted = reference.frames_of(folder, steps=2, picture=picture)
    got = drawn(folder, first_frame="flux", first_frame_resolution=resolution)
    assert np.abs(got - wanted).max() < 4 * CLOSE
    assert np.abs(got - drawn(folder)).max() > 0.01


def test_flux_in_diffusers_layout_draws_the_same_picture(folder: Path, tmp_path: Path) -> None:
    flux_folder = tiny.diffusers_flux(tmp_path / "flux", folder)
    wanted = drawn(folder, **FIRST)
    got = run(folder, **FIRST, flux=str(flux_folder))
    assert np.abs(got - wanted).max() < CLOSE
    assert wanted.std() > 0.01


def test_stages_of_a_first_picture_load_one_model_at_a_time(folder: Path) -> None:
    request = Request(prompt="a", model=str(folder), **FIRST, num_videos=2, device="cpu", **SIZES)
    events = list(everyframe.stream(request))
    stages = [event.stage for event in events if isinstance(event, StageStarted)]
    assert stages == [
        "text", "clip text", "first picture", "decode first picture", "given frames", "denoise",
        "decode",
    ]  # fmt: skip
    loaded = [event.component for event in events if isinstance(event, ComponentLoaded)]
    assert loaded == [
        "text_encoder", "clip", "first_denoiser", "first_vae", "vae", "denoiser", "vae",
    ]  # fmt: skip
    steps = [event for event in events if isinstance(event, Step) and event.stage == "denoise"]
    assert len(steps) == 4


def test_given_pictures_are_the_ends(folder: Path) -> None:
    """The autoencoder's pictures of the given ones; the others are the model's."""
    first, last = smooth_picture(32, 48, seed=1), smooth_picture(32, 48, seed=2)
    loop = run(folder, image=first, last_image=last)
    head, tail = run(folder, image=first), run(folder, last_image=last)
    assert loop.shape == head.shape == tail.shape == (9, 32, 48, 3)
    # A causal decoder sees nothing but the first latent frame for the first frame but for the
    # statistics of its norms.
    assert np.abs(loop[0] - head[0]).mean() < np.abs(loop[0] - tail[0]).mean()
    assert np.abs(loop - head).max() > 0.01 < np.abs(loop - tail).max()


@pytest.mark.parametrize("at", ["head", "tail"])
def test_a_clip_is_continued_or_led_up_to(folder: Path, at: str) -> None:
    source = np.stack([smooth_picture(32, 48, seed=n) for n in range(35)])
    frames = run(folder, extend=source, num_frames=41, clip_at=at)
    assert len(frames) == 35 + 41 - 33
    given = frames[:35] if at == "head" else frames[-35:]
    assert np.array_equal(np.round(given * 255).astype(np.uint8), source)


def test_a_short_clip_is_read_as_a_whole(folder: Path) -> None:
    """Upstream fails on a clip under nine latent frames."""
    source = np.stack([smooth_picture(32, 48, seed=n) for n in range(7)])
    assert len(run(folder, extend=source, num_frames=9)) == 7 + 9 - 5


def test_oscillation_and_fading_are_turned_off_by_flags(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "picture.png"
    Image.fromarray(smooth_picture(32, 48)).save(picture)
    words = ["plan", "a", "--model", str(folder), "--image", str(picture), "--device", "cpu"]
    words += ["--size", "48x32", "--num-frames", "9", "--json"]
    off = ["--no-text-oscillation", "--no-image-oscillation", "--no-image-fading"]
    for more, value in (([], True), (off, False)):
        assert main([*words, *more]) == 0
        options = dict(json.loads(capsys.readouterr().out)["plan"]["settings"]["options"])
        names = ("text_oscillation", "image_oscillation", "image_fading")
        assert [options[name] for name in names] == [value] * 3


@pytest.mark.slow
def test_options_reach_the_run(folder: Path) -> None:
    picture = smooth_picture(32, 48)
    # Without fading, which leaves little of the picture's guidance in the last steps, and with much
    # of it: one step of the twelve has none by oscillation, and the tiny model hardly sees it.
    asked = {
        "image": picture, "num_inference_steps": 12, "image_fading": False,
        "image_guidance_scale": 50.0,
    }  # fmt: skip
    usual = run(folder, **asked)
    for name, value in (
        ("motion_score", 7), ("image_guidance_scale", 1.5), ("text_oscillation", False),
        ("image_oscillation", False), ("image_fading", True), ("flow_shift", 3.0),
        ("negative_prompt", "blue"), ("guidance_scale", 3.0), ("fps", 12), ("seed", 6),
    ):  # fmt: skip
        assert np.abs(run(folder, **{**asked, name: value}) - usual).max() > 1e-4, name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_weights_in_eight_bits_give_a_video_near_the_exact_one(folder: Path, kind: str) -> None:
    """T5, FLUX and the denoiser, whose layers' results differ by about 1 % and 3 %."""
    asked = {**FIRST, "num_inference_steps": 12}
    exact, rounded = run(folder, **asked), run(folder, **asked, quantize=kind)
    error = float(np.sqrt(np.mean((rounded - exact) ** 2)))
    assert 1e-5 < error < 0.1 * float(exact.std())


def test_sequential_branches_give_the_same_video(folder: Path) -> None:
    """One branch after the other, for a device with little memory; rounding differs."""
    picture = smooth_picture(32, 48)
    request = Request(
        prompt=reference.PROMPT, model=str(folder), image=picture, device="cpu", **SIZES
    )
    prepared = prepare(request)
    given = initial_videos(request, prepared.plan)[0].inputs
    assert isinstance(prepared.model, DryRunSpec)
    (apart,) = prepared.model.savings("denoiser", prepared.plan.settings)
    whole = frames_of(prepared, unchanged, inputs=given)
    split = frames_of(prepared, lambda plan: replace(plan, settings=apart.settings), inputs=given)
    assert not apart.is_lossy
    assert np.abs(whole - split).max() < CLOSE


def test_the_step_follows_from_the_time() -> None:
    """A run that goes on has another denoiser, which knows no number of a step."""
    times = torch.linspace(1, 0, 6, dtype=torch.float64)
    denoiser = Denoiser.__new__(Denoiser)
    denoiser._timesteps = times
    steps = [denoiser._step_of(time.to(torch.float32)[None]) for time in times[:-1]]
    assert steps == [0, 1, 2, 3, 4]
    assert denoiser._step_of(torch.zeros(1, device="meta")) == 0


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, marks=pytest.mark.slow, id="text"),
        pytest.param({"image": smooth_picture(32, 48)}, id="picture"),
    ],
)
def test_lossy_methods_compute_some_steps_and_keep_what_is_given(
    folder: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    """With all steps computed both are the exact run; the given picture is in every one's."""
    asked = {"num_inference_steps": 4, "num_frames": 5, "text_oscillation": False, **more}
    exact = run(folder, **asked)
    np.testing.assert_allclose(run(folder, **asked, quality="abm2@4"), exact, atol=CLOSE)
    np.testing.assert_array_equal(run(folder, **asked, quality="taylor1@4"), exact)
    calls: list[float] = []
    real = Denoiser.__call__

    def counted(self: Any, x: Any, t: Any) -> Any:
        calls.append(float(t[0]))
        return real(self, x, t)

    monkeypatch.setattr(Denoiser, "__call__", counted)
    for quality in ("abm2@2", "taylor1@2"):
        calls.clear()
        found = run(folder, **asked, quality=quality)
        assert len(calls) == 2
        assert np.abs(found - exact).max() > 1e-4
        if more:
            assert np.abs(found[0] - exact[0]).max() < 0.2
