"""Resolve a request against one Stable Video Diffusion: size, length, guidance, image fit, notes.

Pure functions of the request, its image and the model's configs; no torch. Defaults are those of
diffusers' pipeline. An impossible value raises `InputError` with the possible values.
"""

from __future__ import annotations

from collections.abc import Iterator

from everyframe.core.errors import InputError
from everyframe.core.plan import Settings
from everyframe.core.request import Request
from everyframe.families.svd.config import SVDConfig
from everyframe.families.svd.options import SVDOptions
from everyframe.media.read import read_image
from everyframe.runtime.request_checks import (
    DEFAULT_FIT,
    check_amount,
    check_fit,
    check_latents,
    check_size,
    check_used,
    fit_note,
    frames_in,
    smaller_sizes,
    smaller_videos,
)

#: Defaults of the released models: (height, width), frames per second, sampling steps.
SIZE = (576, 1024)
FPS = 7.0
STEPS = 25
#: Noise levels that AnimateLCM-SVD was distilled on (`samplers.consistency`).
CONSISTENCY_LEVELS = 40

_NO_USE = {
    "prompt": "it takes no text; leave the prompt out",
    "negative_prompt": "it takes no text",
    "guidance_scale": "give min_guidance_scale and max_guidance_scale",
    "last_image": "it knows only a first picture (image)",
    "extend": "it knows only a first picture (image)",
    "edit_strength": "give noise_aug_strength",
    "resolution": "it has no named sizes; give size WIDTHxHEIGHT",
}


def resolve_settings(
    config: SVDConfig, title: str, request: Request, options: SVDOptions, seed: int
) -> tuple[Settings, tuple[str, ...]]:
    """Resolve every value of the request; return settings, and notes for the user."""
    _check_request(title, request)
    _check_options(options)
    notes: list[str] = []
    height, width = _size(config, request)
    fps = FPS if request.fps is None else request.fps
    num_frames = _num_frames(config, request, fps, notes)
    chunk = min(options.decode_chunk_size or num_frames, num_frames)
    if chunk < num_frames and config.decodes_together:
        notes.append(
            f"frames are decoded {chunk} at once (decode_chunk_size): the decoder sees a frame's "
            f"neighbours only inside of these, so the picture differs from {num_frames} at once"
        )
    _note_decoding(config, request, (chunk, num_frames), notes)
    _note_fit(request, (height, width), options.fit or DEFAULT_FIT, notes)
    check_amount(num_frames, height, width)
    guidance, steps = options.max_guidance_scale, STEPS
    if config.preset is not None:
        steps = config.preset.num_inference_steps
        is_own = "max_guidance_scale" in options.model_fields_set
        guidance = guidance if is_own else config.preset.guidance_scale or guidance
        if (request.num_inference_steps or steps) > CONSISTENCY_LEVELS:
            raise InputError(
                f"num_inference_steps must be 1 to {CONSISTENCY_LEVELS} for a consistency model, "
                f"got {request.num_inference_steps}"
            )
    settings = Settings(
        prompt="",
        negative_prompt=None,
        height=height,
        width=width,
        num_frames=num_frames,
        fps=fps,
        num_inference_steps=request.num_inference_steps or steps,
        guidance_scale=guidance,
        seed=seed,
        num_videos=request.num_videos,
        given_frames=("image",),
        fit=None,
        options=(
            ("motion_bucket_id", options.motion_bucket_id),
            ("noise_aug_strength", options.noise_aug_strength),
            ("min_guidance_scale", options.min_guidance_scale),
            ("max_guidance_scale", guidance),
            ("decode_chunk_size", chunk),
            ("fit", options.fit or DEFAULT_FIT),
        ),
    )
    check_latents(
        request.latents,
        (1, *latent_shape(config, settings)),
        f"(1, frames, channels, rows, columns) for {settings.num_frames} frames of "
        f"{settings.width}x{settings.height}",
    )
    return settings, tuple(notes)


def _check_request(title: str, request: Request) -> None:
    check_used(title, request, _NO_USE)
    if request.image is None:
        raise InputError(f"{title} makes a video of a picture; give one (image)")


def _check_options(options: SVDOptions) -> None:
    check_fit(options.fit)
    low, high = options.min_guidance_scale, options.max_guidance_scale
    if high <= 1 < low:
        raise InputError(
            f"min_guidance_scale {low:g} has no effect with max_guidance_scale {high:g}, which "
            "turns guidance off; raise the latter"
        )


def _size(config: SVDConfig, request: Request) -> tuple[int, int]:
    asked = request.asked_size()
    if asked is not None:
        check_size(*asked, config.spatial_factor)
    return asked or SIZE


def _num_frames(config: SVDConfig, request: Request, fps: float, notes: list[str]) -> int:
    frames = request.num_frames
    if frames is None and request.seconds is not None:
        frames = frames_in(request.seconds, fps)
    if frames is None:
        return config.num_frames
    if frames != config.num_frames:
        notes.append(f"the model was trained on {config.num_frames} frames, not on {frames}")
    return frames


def _note_decoding(
    config: SVDConfig, request: Request, frames: tuple[int, int], notes: list[str]
) -> None:
    """Add a note where one rank decodes for several: what would use all of them.

    `frames` are the number decoded at once and the total.
    """
    at_once, num_frames = frames
    devices = min(-(-request.num_ranks // request.num_videos), num_frames)
    if devices == 1 or at_once < num_frames:
        return
    fewer = -(-num_frames // devices)
    price = "changes the picture" if config.decodes_together else "rounds differently"
    notes.append(
        f"one device decodes all {num_frames} frames together, and the others wait; "
        f"--decode-chunk-size {fewer} deals them out to {-(-num_frames // fewer)} devices, which "
        f"{price}"
    )


def _note_fit(request: Request, size: tuple[int, int], fit: str, notes: list[str]) -> None:
    """Note how the image is fitted; reads it, so an unreadable image fails before any download."""
    height, width = read_image(request.image).shape[:2]
    if min(height, width) < 2:
        raise InputError(f"the picture is {width}x{height}; each side must have 2 pixels or more")
    note = fit_note("picture", (height, width), size, fit)
    notes += [note] if note else []


def latent_shape(config: SVDConfig, settings: Settings) -> tuple[int, int, int, int]:
    """(T, C, h, w) of one video's latents."""
    step = config.spatial_factor
    rows, columns = settings.height // step, settings.width // step
    return (settings.num_frames, config.latent_channels, rows, columns)


def smaller_settings(config: SVDConfig, settings: Settings) -> Iterator[Settings]:
    """Yield the same video with less memory: smaller decode chunks, then shorter and smaller."""
    chunk = int(settings.option("decode_chunk_size"))
    lengths = [settings.num_frames]
    while lengths[-1] > 2:
        lengths.append(lengths[-1] // 2)
    step = 8 * config.spatial_factor
    sides = smaller_sizes(settings.height, settings.width, step, 2 * step)
    for each in smaller_videos(settings, lengths, sides):
        yield each.with_option("decode_chunk_size", min(chunk, each.num_frames))
