"""Resolve a request against one Open-Sora 2.0: size, length, guidance, given frames.

Functions of the request and the model's sizes. They import no torch; the only file is a given clip,
whose frames are counted. An impossible value raises `InputError` with the possible values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from everyframe.core.errors import InputError, did_you_mean
from everyframe.core.plan import Settings
from everyframe.core.request import Request
from everyframe.families.opensora2.config import OpenSora2Config
from everyframe.families.opensora2.options import OpenSora2Options
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

#: Named sizes by the side of the square of as many pixels.
RESOLUTIONS = {"256px": 256, "768px": 768}
#: Aspect ratios, (width, height), whose sizes upstream works out; the others are transposed.
_ASPECTS = ((9, 16), (1, 1), (239, 100), (2, 1), (185, 100), (4, 3), (3, 2), (5, 8))
_ALL_ASPECTS = sorted({*_ASPECTS, *((h, w) for w, h in _ASPECTS)}, key=lambda a: a[0] / a[1])
_DEFAULT_ASPECT = (16, 9)
_FPS, _STEPS, _GUIDANCE, _MOTION = 24.0, 50, 7.5, 4.0
#: Longest video of the training.
_LONGEST = 129
_CLIPS = {False: (33, 65), True: (32, 64)}
_NO_USE = {
    "edit_strength": "given frames stay as they are",
}
#: Options that steer by given frames.
_OF_PICTURES = {"image_guidance_scale", "image_oscillation", "image_fading"}
#: Options of the settings with the size at which a first picture is drawn.
FIRST_FRAME_SIZE = ("first_frame_height", "first_frame_width")
#: Guidance of FLUX's picture, an input of its network; upstream's number.
FLUX_GUIDANCE = 4.0


def named_size(
    resolution: str, aspect: tuple[int, int] | None, *, step: int = 16, of_training: bool = False
) -> tuple[int, int]:
    """(height, width) in pixels of a named resolution; `aspect` is (width, height).

    `step` is 16, or 32 for the DC-AE. Upstream's sizes of the training are nearer to the pixels of
    the resolution (`opensora/datasets/aspect.py`). Raises `InputError` for a name or ratio that
    upstream lacks.
    """
    side = RESOLUTIONS.get(resolution.lower())
    if side is None:
        raise InputError(
            f"resolution must be one of {', '.join(RESOLUTIONS)}, got {resolution!r}"
            f"{did_you_mean(resolution, RESOLUTIONS)}"
        )
    wanted = aspect or _DEFAULT_ASPECT
    ratios = {each[0] / each[1]: each for each in _ASPECTS}
    ratio = wanted[0] / wanted[1]
    for known in ratios:
        if math.isclose(ratio, known):
            return _size_of(side, known, step, of_training=of_training)
        if math.isclose(ratio, 1 / known):
            height, width = _size_of(side, known, step, of_training=of_training)
            return width, height
    names = [f"{w / 100:g}:{h / 100:g}" if h == 100 else f"{w}:{h}" for w, h in _ALL_ASPECTS]
    raise InputError(
        f"aspect (width:height) must be one of {', '.join(names)} (2.39:1 as 239:100), got "
        f"{wanted[0]}:{wanted[1]}; the nearest is {names[_ALL_ASPECTS.index(_nearest(ratio))]}"
    )


def _nearest(ratio: float) -> tuple[int, int]:
    """The nearest known aspect ratio, (width, height)."""
    return min(_ALL_ASPECTS, key=lambda each: abs(math.log(each[0] / each[1] / ratio)))


def _size_of(side: int, ratio: float, step: int, *, of_training: bool) -> tuple[int, int]:
    pixels = side * side
    width = int(math.sqrt(pixels * ratio) // step * step)
    height = int(pixels / width // step * step)
    if not of_training:
        return height, width
    beside = [(height - step, width), (height + step, width), (height, width - step)]
    sizes = [(height, width), *beside, (height, width + step)]
    return min(sizes, key=lambda size: abs(size[0] * size[1] - pixels))


def resolve_settings(
    config: OpenSora2Config, title: str, request: Request, options: OpenSora2Options, seed: int
) -> tuple[Settings, tuple[str, ...]]:
    """Resolve every value of the request; return settings, and notes for the user."""
    _check_request(title, request, options)
    prompt = read_prompt(title, request)
    notes: list[str] = []
    height, width = _size(config, request)
    fps = _FPS if request.fps is None else request.fps
    num_frames = _num_frames(config, request, fps, notes)
    check_amount(num_frames, height, width)
    given = _given_frames(request, options)
    if given and not config.denoiser.cond_embed:
        raise InputError(
            f"{title}: its denoiser can't be given frames, as it has no tensors 'cond_in'; leave "
            f"out {given[0]}"
        )
    guidance = _GUIDANCE if request.guidance_scale is None else request.guidance_scale
    settings = Settings(
        prompt=prompt,
        negative_prompt=request.negative_prompt,
        height=height,
        width=width,
        num_frames=num_frames,
        fps=fps,
        num_inference_steps=request.num_inference_steps or _STEPS,
        guidance_scale=float(guidance),
        seed=seed,
        num_videos=request.num_videos,
        fit="cover",
        given_frames=given,
        options=(
            ("motion_score", _MOTION if options.motion_score is None else options.motion_score),
            ("image_guidance_scale", options.image_guidance_scale),
            ("text_oscillation", options.text_oscillation),
            ("image_oscillation", options.image_oscillation),
            ("image_fading", options.image_fading),
            ("flow_shift", options.flow_shift),
            ("given_clip", _clip(config, request, options, num_frames, notes)),
            ("clip_at", options.clip_at),
            ("first_frame", options.first_frame),
            *zip(FIRST_FRAME_SIZE, _first_frame_size(request, options, height, width), strict=True),
            ("truncate_prompt", options.truncate_prompt),
        ),
    )
    if settings.negative_prompt is not None and not is_guided(settings):
        raise InputError("negative_prompt has no effect with guidance_scale 1; raise the scale")
    _check_room(config, settings)
    check_latents(
        request.latents,
        (1, *latent_shape(config, settings)),
        f"for {settings.num_frames} frames of {width}x{height}",
    )
    return settings, tuple(notes)


def latent_shape(config: OpenSora2Config, settings: Settings) -> tuple[int, int, int, int]:
    """(C, T, h, w) of one video's latents."""
    size = config.vae.latent_size(settings.num_frames, settings.height, settings.width)
    return (config.vae.latent_channels, *size)


def frame_tokens(config: OpenSora2Config, settings: Settings) -> int:
    """Number of image tokens of one latent frame."""
    patch = config.denoiser.patch_size
    _, _, height, width = latent_shape(config, settings)
    return (height // patch) * (width // patch)


def is_conditioned(settings: Settings) -> bool:
    """Whether latents of pictures or of a clip condition the denoiser."""
    return bool(settings.given_frames)


def is_guided(settings: Settings) -> bool:
    """Whether guidance needs the negative prompt, empty if none is given."""
    by_picture = is_conditioned(settings) and settings.option("image_guidance_scale") != 1
    return settings.guidance_scale != 1 or by_picture


def _check_request(title: str, request: Request, options: OpenSora2Options) -> None:
    check_used(title, request, _NO_USE)
    if options.first_frame not in (None, "flux"):
        raise InputError(f"first_frame must be flux, got {options.first_frame!r}")
    if options.first_frame and (request.image is not None or request.extend is not None):
        other = "image" if request.image is not None else "extend"
        raise InputError(f"first_frame draws the first picture, and {other} gives one; drop one")
    if options.flux is not None and not options.first_frame:
        raise InputError("flux has no effect without --first-frame flux")
    if "first_frame_resolution" in options.model_fields_set and not options.first_frame:
        raise InputError("first_frame_resolution has no effect without --first-frame flux")
    if request.extend is not None and request.last_image is not None:
        raise InputError("extend can't be combined with last_image on this model; drop one")
    if options.clip_at not in ("head", "tail"):
        raise InputError(f"clip_at must be head or tail, got {options.clip_at!r}")
    set_here = options.model_fields_set & {"clip_at", "clip_frames"}
    if request.extend is None and set_here:
        raise InputError(f"{min(set_here)} has no effect without extend")
    of_pictures = options.model_fields_set & _OF_PICTURES
    if of_pictures and not _given_frames(request, options):
        raise InputError(
            f"{min(of_pictures)} has no effect without given frames; give image, last_image, "
            "extend or first_frame"
        )
    if request.extend is not None and "image_fading" in options.model_fields_set:
        raise InputError("image_fading is for given pictures and has no effect with extend")


def _given_frames(request: Request, options: OpenSora2Options) -> tuple[str, ...]:
    given = [
        name for name in ("image", "last_image", "extend") if getattr(request, name) is not None
    ]
    return (*(["first_frame"] if options.first_frame else []), *given)


def _size(config: OpenSora2Config, request: Request) -> tuple[int, int]:
    asked = request.asked_size()
    step = config.size_step
    if asked is None:
        name = request.resolution or ("768px" if config.is_high_compression else "256px")
        return named_size(name, request.asked_aspect(), step=step)
    check_size(*asked, step)
    return asked


def _first_frame_size(
    request: Request, options: OpenSora2Options, height: int, width: int
) -> tuple[int, int]:
    """(height, width) of a first picture, from upstream's training table."""
    if not options.first_frame or options.first_frame_resolution == "video":
        return height, width
    is_named = request.asked_size() is None
    aspect = request.asked_aspect() if is_named else _nearest(width / height)
    try:
        return named_size(options.first_frame_resolution, aspect, of_training=True)
    except InputError as error:
        raise InputError(f"first_frame_{error}, or video") from error


def first_frame_size(settings: Settings) -> tuple[int, int]:
    """(height, width) in pixels of a first picture, before it is resized to the video's size."""
    own = (settings.height, settings.width)
    height, width = (settings.option(*each) for each in zip(FIRST_FRAME_SIZE, own, strict=True))
    return height, width


def _num_frames(config: OpenSora2Config, request: Request, fps: float, notes: list[str]) -> int:
    longest = _LONGEST - config.is_high_compression
    if request.seconds is None:
        frames = longest if request.num_frames is None else request.num_frames
        config.vae.latent_frames(frames)  # names the nearest that can be
    else:
        nearest, piece = config.vae.nearest_frames, config.vae.temporal_factor
        frames = nearest_length(request.seconds, fps, nearest, piece, notes)
    if frames > longest:
        notes.append(f"Open-Sora 2.0 was trained on at most {longest} frames, not on {frames}")
    return frames


def _clip(
    config: OpenSora2Config,
    request: Request,
    options: OpenSora2Options,
    num_frames: int,
    notes: list[str],
) -> int:
    """Number of frames to read of the given clip: as requested, else all; 0 without a clip."""
    if request.extend is None:
        return 0
    trained = _CLIPS[config.is_high_compression]
    asked = trained[0] if options.clip_frames is None else options.clip_frames
    config.vae.latent_frames(asked)  # names the nearest that can be
    # Late import: brings NumPy, and most requests have no video.
    from everyframe.media.read import count_frames

    there = count_frames(request.extend, asked, what="extend")
    lengths = (asked, *config.vae.nearest_frames(there), 1)
    frames = max(length for length in lengths if length <= max(there, 1))
    if frames < asked:
        notes.append(f"the given clip has {there} frames, of which {frames} are read, not {asked}")
    notes.append(
        "continuing a clip is a condition that the published training of Open-Sora 2.0 left out, "
        "so its quality is unknown"
    )
    return frames


def _check_room(config: OpenSora2Config, settings: Settings) -> None:
    """Check that given frames leave frames to generate."""
    if not is_conditioned(settings):
        return
    latent_frames = config.vae.latent_frames(settings.num_frames)
    clip = settings.option("given_clip")
    taken = config.vae.latent_frames(clip) if clip else len(settings.given_frames)
    if latent_frames <= taken:
        enough = config.vae.nearest_frames(settings.num_frames + 4 * (taken - latent_frames) + 4)[0]
        raise InputError(
            f"{settings.num_frames} frames are {latent_frames} latent frames, and the given ones "
            f"take {taken} of them; ask for more frames, for example {enough}"
        )


def smaller_settings(config: OpenSora2Config, settings: Settings) -> Iterator[Settings]:
    """Yield the same video shorter, smaller or both, most pixels first."""
    step = config.size_step
    sides = smaller_sizes(settings.height, settings.width, step, 8 * step)
    # Halve the number of latent frames, which determines the length.
    extra = 0 if config.is_high_compression else 1
    shorter = [each + extra for each in shorter_lengths(settings.num_frames - extra, 4)]
    least = max(settings.option("given_clip") + 1, 8)
    lengths = [settings.num_frames, *(each for each in shorter[1:] if each >= least)]
    return smaller_videos(settings, lengths, sides)
