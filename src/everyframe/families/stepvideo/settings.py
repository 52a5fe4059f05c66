"""Resolve a request against one Step-Video: size, length, steps, prompt affixes.

Pure functions of the request and the model's sizes; no torch, no files. An impossible value raises
`InputError` with the possible values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from everyframe.core.errors import InputError, did_you_mean
from everyframe.core.plan import Settings
from everyframe.core.request import Request
from everyframe.families.stepvideo.config import StepVideoConfig
from everyframe.families.stepvideo.options import StepVideoOptions
from everyframe.runtime.request_checks import (
    check_amount,
    check_latents,
    check_size,
    check_used,
    nearest_length,
    read_prompt,
    shorter_lengths,
    smaller_sizes,
    smaller_videos,
)

#: Upstream's prompt suffix and its negative prompt.
POS_MAGIC = (
    "超高清、HDR 视频、环境光、杜比全景声、画面稳定、流畅动作、逼真的细节、专业级构图、超现实主义、"
    "自然、生动、超细节、清晰。"
)
NEG_MAGIC = (
    "画面暗、低分辨率、不良手、文本、缺少手指、多余的手指、裁剪、低质量、颗粒状、签名、水印、用户名、"
    "模糊。"
)
_SIZE, _FRAMES, _FPS = (544, 992), 204, 25.0
_BIASES = ("sqrt", "linear", "none")
_NO_USE = {
    "image": "it takes a prompt alone",
    "last_image": "it takes a prompt alone",
    "extend": "it takes a prompt alone",
    "edit_strength": "it takes no frames that could change",
    "resolution": "it has no named sizes; give size WIDTHxHEIGHT",
}


@dataclass(frozen=True)
class Defaults:
    """Values that upstream recommends for a variant."""

    steps: int
    guidance: float
    shift: float


BASE = Defaults(steps=50, guidance=9.0, shift=13.0)
#: Upstream recommends 10 to 15 steps; the default is the larger number.
TURBO = Defaults(steps=15, guidance=5.0, shift=17.0)


def resolve_settings(
    config: StepVideoConfig, title: str, request: Request, options: StepVideoOptions, seed: int
) -> tuple[Settings, tuple[str, ...]]:
    """Resolve every value of the request; return settings, and notes for the user."""
    _check_request(title, request, options)
    prompt = read_prompt(title, request)
    notes: list[str] = []
    defaults = TURBO if config.is_turbo else BASE
    guidance = defaults.guidance if request.guidance_scale is None else request.guidance_scale
    negative = request.negative_prompt
    if negative is not None and guidance <= 1:
        raise InputError(
            f"negative_prompt has no effect with guidance_scale {guidance:g}; raise the scale"
        )
    if negative is None and guidance > 1:
        negative = NEG_MAGIC
    height, width = _size(config, request)
    fps = _FPS if request.fps is None else request.fps
    num_frames = _num_frames(config, request, fps, notes)
    check_amount(num_frames, height, width)
    settings = Settings(
        prompt=prompt,
        negative_prompt=negative,
        height=height,
        width=width,
        num_frames=num_frames,
        fps=fps,
        num_inference_steps=request.num_inference_steps or defaults.steps,
        guidance_scale=float(guidance),
        seed=seed,
        num_videos=request.num_videos,
        options=(
            ("time_shift", float(options.time_shift or defaults.shift)),
            ("pos_magic", POS_MAGIC if options.pos_magic is None else options.pos_magic),
            ("llm_bias", options.llm_bias),
            ("truncate_prompt", options.truncate_prompt),
        ),
    )
    check_latents(
        request.latents,
        (1, *latent_shape(config, settings)),
        f"for {settings.num_frames} frames of {width}x{height}",
    )
    return settings, tuple(notes)


def latent_shape(config: StepVideoConfig, settings: Settings) -> tuple[int, int, int, int]:
    """(C, T, h, w) of one video's latents."""
    size = config.vae.latent_size(settings.num_frames, settings.height, settings.width)
    return (config.vae.latent_channels, *size)


def _check_request(title: str, request: Request, options: StepVideoOptions) -> None:
    check_used(title, request, _NO_USE)
    if options.llm_bias not in _BIASES:
        hint = did_you_mean(options.llm_bias, _BIASES)
        raise InputError(
            f"llm_bias must be one of {', '.join(_BIASES)}, got {options.llm_bias!r}{hint}"
        )


def _size(config: StepVideoConfig, request: Request) -> tuple[int, int]:
    size = request.asked_size() or _SIZE
    check_size(*size, config.size_step)
    return size


def _num_frames(config: StepVideoConfig, request: Request, fps: float, notes: list[str]) -> int:
    if request.seconds is None:
        frames = _FRAMES if request.num_frames is None else request.num_frames
        config.vae.pieces(frames)  # names the nearest that can be
        return frames
    nearest, piece = config.vae.nearest_frames, config.vae.frame_len
    return nearest_length(request.seconds, fps, nearest, piece, notes)


def smaller_settings(config: StepVideoConfig, settings: Settings) -> Iterator[Settings]:
    """Yield the same video shorter, smaller or both, most pixels first."""
    step = config.size_step
    sides = smaller_sizes(settings.height, settings.width, step, 4 * step)
    return smaller_videos(
        settings, shorter_lengths(settings.num_frames, config.vae.frame_len), sides
    )
