"""Resolve a request against one Open-Sora model: size, length, steps and family options.

Pure functions of the request and the model's sizes; no torch, no files. An impossible value raises
`InputError` with the possible values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from everyframe.checkpoints.folder import read_package_data
from everyframe.core.errors import InputError, did_you_mean
from everyframe.core.plan import Settings
from everyframe.core.request import Request
from everyframe.families.opensora.config import OpenSoraConfig
from everyframe.families.opensora.options import OpenSoraOptions
from everyframe.families.opensora.prompts import loses_all, lost
from everyframe.families.opensora.vae_config import VideoVAEConfig
from everyframe.runtime.request_checks import (
    check_amount,
    check_latents,
    check_size,
    frames_in,
    in_pieces,
    read_prompt,
    shorter_lengths,
    smaller_sizes,
    smaller_videos,
)

DEFAULT_ASPECT = "16:9"


@cache
def resolutions() -> Mapping[str, Mapping[str, tuple[int, int]]]:
    """(height, width) of 1.2's sizes by name and aspect ratio (width:height)."""
    table = read_package_data("families/opensora/resolutions.yaml")
    return {
        name: {aspect: (height, width) for aspect, (height, width) in sizes.items()}
        for name, sizes in table.items()
    }


def named_size(resolution: str, aspect: tuple[int, int] | None) -> tuple[int, int]:
    """(height, width) in pixels of a named resolution; `aspect` is (width, height).

    Raises `InputError` for a name or ratio that is not in 1.2's table.
    """
    table = resolutions()
    sizes = table.get(resolution.lower())
    if sizes is None:
        raise InputError(
            f"resolution must be one of {', '.join(table)}, got {resolution!r}"
            f"{did_you_mean(resolution, table)}"
        )
    wanted = DEFAULT_ASPECT if aspect is None else f"{aspect[0]}:{aspect[1]}"
    ratio = _ratio(wanted)
    for name, size in sizes.items():
        if _ratio(name) == ratio:
            return size
    closest = min(sizes, key=lambda name: abs(_ratio(name) - ratio))
    raise InputError(
        f"aspect (width:height) must be one of {', '.join(sizes)}, got {wanted}; "
        f"the nearest is {closest}"
    )


def _ratio(aspect: str) -> float:
    width, height = aspect.split(":")
    return int(width) / int(height)


#: Frames of one piece of 1.2's autoencoder; its weights were trained on multiples of it.
PIECE = 17
#: Training lengths of 1.2; quality beyond them is not known (upstream #641, #696).
_TRAINED_FRAMES = (51, 408)
#: The fps input of 1.2 for a single image (upstream `IMG_FPS`).
PICTURE_FPS = 120.0


def resolve_settings(
    config: OpenSoraConfig, title: str, request: Request, options: OpenSoraOptions, seed: int
) -> tuple[Settings, tuple[str, ...]]:
    """Resolve every value of the request; return settings, and notes for the user."""
    prompt = read_prompt(title, request)
    for text in (request.prompt, request.negative_prompt):
        if text is not None and loses_all(text):
            raise InputError(lost(text))
    notes: list[str] = []
    _check_given_frames(config, title, request)
    nominal = _nominal_size(config, title, request)
    height, width = _fitted_size(config, request, nominal, notes)
    fps = request.fps if request.fps is not None else float(config.default("fps"))
    num_frames = _num_frames(config, request, fps, notes)
    guidance = _or_default(request.guidance_scale, config.default("guidance_scale"))
    if request.negative_prompt is not None and guidance == 1:
        raise InputError("negative_prompt has no effect with guidance_scale 1; raise the scale")
    steps = _or_default(request.num_inference_steps, config.default("num_inference_steps"))
    if config.version == "1.0" and steps > 1000:
        raise InputError(f"num_inference_steps must be at most 1000 for Open-Sora 1.0, got {steps}")
    check_amount(num_frames, height, width)
    settings = Settings(
        prompt=prompt,
        negative_prompt=request.negative_prompt,
        height=height,
        width=width,
        num_frames=num_frames,
        fps=fps,
        num_inference_steps=int(steps),
        guidance_scale=float(guidance),
        seed=seed,
        num_videos=request.num_videos,
        fit="cover",
        chain=request.chain,
        edit_strength=request.edit_strength or 0.0,
        given_frames=tuple(
            name for name in ("image", "last_image", "extend") if getattr(request, name) is not None
        ),
        nominal_size=None if nominal == (height, width) else nominal,
        options=_family_settings(config, title, options),
    )
    _check_room(config, settings)
    size = config.vae.latent_size(settings.num_frames, settings.height, settings.width)
    check_latents(
        request.latents,
        (1, config.vae.latent_channels, *size),
        f"for {settings.num_frames} frames of {settings.width}x{settings.height}",
    )
    return settings, tuple(notes)


def _or_default(value: Any, default: Any) -> Any:
    return default if value is None else value


def _check_given_frames(config: OpenSoraConfig, title: str, request: Request) -> None:
    if config.version == "1.0":
        for name in ("image", "last_image", "extend"):
            if getattr(request, name) is not None:
                raise InputError(f"{title} can't take given frames ({name}); Open-Sora 1.2 can")
        if request.chain > 1:
            raise InputError(f"{title} can't continue a clip (chain); Open-Sora 1.2 can")
    if request.edit_strength is not None and not request.has_given_frames() and request.chain == 1:
        raise InputError(
            "edit_strength has no effect without given frames; "
            "give image, last_image, extend or chain"
        )


def _nominal_size(config: OpenSoraConfig, title: str, request: Request) -> tuple[int, int]:
    asked = request.asked_size()
    if asked is not None:
        return asked
    if request.resolution is not None:
        if config.version == "1.0":
            raise InputError(
                f"{title} has no named resolutions, got {request.resolution!r}; "
                f"it was trained at {config.square}x{config.square}"
            )
        return named_size(request.resolution, request.asked_aspect())
    if config.default("resolution"):
        return named_size(config.default("resolution"), None)
    side = config.square or 256
    return int(config.default("height") or side), int(config.default("width") or side)


def _fitted_size(
    config: OpenSoraConfig, request: Request, nominal: tuple[int, int], notes: list[str]
) -> tuple[int, int]:
    """Fit the size to whole latents: an error for a numeric size, a note for a named one."""
    step = config.size_step
    fitted = (nominal[0] // step * step, nominal[1] // step * step)
    if fitted == nominal and min(fitted) > 0:
        return fitted
    if request.asked_size() is None:
        notes.append(
            f"{nominal[1]}x{nominal[0]} becomes {fitted[1]}x{fitted[0]}: "
            f"the autoencoder works in steps of {step} pixels"
        )
        return fitted
    check_size(*nominal, step)
    raise AssertionError("a size that does not fit has a side that does not")


def _num_frames(config: OpenSoraConfig, request: Request, fps: float, notes: list[str]) -> int:
    if request.num_frames is not None:
        frames = request.num_frames
    elif request.seconds is not None:
        frames = frames_in(request.seconds, fps)
        if isinstance(config.vae, VideoVAEConfig):
            whole = max(1, round(frames / PIECE)) * PIECE
            if whole != frames:
                notes.append(in_pieces(request.seconds, fps, whole, PIECE))
            frames = whole
    else:
        frames = int(config.default("num_frames"))
    low, high = _TRAINED_FRAMES
    if (
        config.version == "1.2"
        and not config.defaults
        and frames != 1
        and not low <= frames <= high
    ):
        notes.append(
            f"Open-Sora 1.2 was trained on 1 frame and on {low} to {high}, not on {frames}"
        )
    return frames


def _family_settings(
    config: OpenSoraConfig, title: str, options: OpenSoraOptions
) -> tuple[tuple[str, Any], ...]:
    scores = {
        "aesthetic": options.aesthetic,
        "motion_score": options.motion_score,
        "camera_motion": options.camera_motion,
    }
    if not config.has_scores:
        for name, value in scores.items():
            if value is not None:
                raise InputError(
                    f"{name} has no effect on {title}; it is for Open-Sora 1.2's weights"
                )
    elif "aesthetic" not in options.model_fields_set:
        scores["aesthetic"] = config.default("aesthetic")
    return (
        *scores.items(),
        ("truncate_prompt", options.truncate_prompt),
    )


def known_frames(config: OpenSoraConfig, settings: Settings) -> tuple[int, int]:
    """Number of frames that a clip continues from, and of their latent frames.

    A whole piece if the clip is longer than one, as upstream does; else one image.
    """
    if config.vae.latent_frames(settings.num_frames) > config.vae.latent_frames(PIECE):
        return PIECE, config.vae.latent_frames(PIECE)
    return 1, 1


def _check_room(config: OpenSoraConfig, settings: Settings) -> None:
    """Check that conditioning frames leave frames to generate."""
    if not settings.given_frames and settings.chain == 1:
        return
    latent_frames = config.vae.latent_frames(settings.num_frames)
    is_continuation = "extend" in settings.given_frames or settings.chain > 1
    taken = (
        known_frames(config, settings)[1] if is_continuation else "image" in settings.given_frames
    )
    taken += "last_image" in settings.given_frames
    if latent_frames <= taken and settings.edit_strength == 0:
        enough = PIECE if settings.num_frames < PIECE else 2 * PIECE
        raise InputError(
            f"{settings.num_frames} frames are {latent_frames} latent frames, and the given ones "
            f"take {taken} of them; ask for more frames, for example {enough}"
        )


def smaller_settings(config: OpenSoraConfig, settings: Settings) -> Iterator[Settings]:
    """Yield the same video shorter, smaller or both, most pixels first."""
    step = config.size_step
    sides = smaller_sizes(settings.height, settings.width, step, 8 * step)
    for each in smaller_videos(settings, shorter_lengths(settings.num_frames, PIECE), sides):
        is_as_asked = (each.height, each.width) == sides[0]
        yield each if is_as_asked else replace(each, nominal_size=None)
