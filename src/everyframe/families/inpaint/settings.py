"""Resolve a request against one inpainting model: size, frames, mask, control, steps, notes.

Every input frame is read once here, so an unusable frame is an error before the run starts. None is
cached. Defaults are those of diffusers' pipeline. An impossible value raises `InputError` with the
possible values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from everyframe.core.errors import InputError
from everyframe.core.plan import Settings
from everyframe.core.request import Request
from everyframe.families.inpaint.config import InpaintConfig
from everyframe.families.inpaint.inputs import (
    Box,
    Geometry,
    Inputs,
    check_controls,
    check_mask,
    open_inputs,
)
from everyframe.families.inpaint.options import BUILT_IN, InpaintOptions
from everyframe.families.inpaint.scheduler import num_timesteps
from everyframe.media.frame_source import FrameCount, num_animated, survey
from everyframe.runtime.request_checks import (
    DEFAULT_FIT,
    check_fit,
    check_latents,
    check_prompt,
    check_used,
    fit_note,
    frames_in,
)

STEPS = 50
GUIDANCE = 7.5
#: Frame rate of a source without one, and of an image, where it has no meaning.
FPS, PICTURE_FPS = 24.0, 1.0

_NO_USE = {
    "last_image": "give what is repainted as source",
    "extend": "give what is repainted as source",
    "edit_strength": "give strength",
    "resolution": "it works at the source's size; give size WIDTHxHEIGHT for another",
}


def resolve_settings(
    config: InpaintConfig, title: str, request: Request, options: InpaintOptions, seed: int
) -> tuple[Settings, tuple[str, ...]]:
    """Resolve every value of the request; return settings, and notes for the user."""
    notes: list[str] = []
    _check_request(config, title, request, options)
    inputs = open_inputs(options, request.image)
    found = survey(inputs.source, "source")
    _check_given(inputs, found, notes)
    for name in ("canny_low", "canny_high"):
        if getattr(options, name) is not None and "canny" not in inputs.controls:
            raise InputError(f"{name} has no effect without control canny")
    height, width = request.asked_size() or (found.height, found.width)
    fps = _fps(inputs, request, notes)
    guidance = GUIDANCE if request.guidance_scale is None else request.guidance_scale
    if request.negative_prompt is not None and guidance <= 1:
        raise InputError(f"negative_prompt has no effect with guidance_scale {guidance:g}")
    settings = Settings(
        prompt=request.prompt or "",
        negative_prompt=request.negative_prompt,
        height=height,
        width=width,
        num_frames=_num_frames(inputs, found, request, fps),
        fps=fps,
        num_inference_steps=request.num_inference_steps or STEPS,
        guidance_scale=guidance,
        seed=seed,
        num_videos=request.num_videos,
        fit=None,
        options=(
            ("source", inputs.source.name),
            ("mask", f"box {inputs.mask}" if isinstance(inputs.mask, Box) else inputs.mask.name),
            ("control", ", ".join(str(getattr(each, "name", each)) for each in inputs.controls)),
            ("strength", 1.0 if options.strength is None else options.strength),
            *_control_options(config, options),
            ("guess_mode", options.guess_mode or config.pools_control),
            ("frames_at_once", options.frames_at_once),
            ("fit", options.fit or DEFAULT_FIT),
            ("unblended", options.unblended),
            ("truncate_prompt", options.truncate_prompt),
        ),
    )
    settings = _with_painted(config, inputs, settings, notes)
    _note_size(config, settings, found, notes)
    _note_steps(config, settings, request, notes)
    check_latents(
        request.latents,
        (1, *latent_shape(config, settings)),
        "(1, channels, rows, columns), the start noise of every frame",
    )
    return settings, tuple(notes)


def _with_painted(
    config: InpaintConfig, inputs: Inputs, settings: Settings, notes: list[str]
) -> Settings:
    """Add the number of frames with a mask to the settings; only those are denoised."""
    num_frames = painted = settings.num_frames
    if not settings.option("unblended"):
        painted = inputs.num_painted(geometry_of(config, settings), num_frames)
    if not painted:
        raise InputError(
            f"the mask is empty in every frame at {settings.width}x{settings.height}: nothing "
            "would be repainted; choose other frames or another mask, size or fit"
        )
    if painted < num_frames:
        notes.append(
            f"the mask is empty in {num_frames - painted} of {num_frames} frames, which stay what "
            "they are and take no time"
        )
    return settings.with_option("frames_painted", painted)


def num_painted(settings: Settings) -> int:
    """Number of frames to denoise."""
    return int(settings.option("frames_painted", settings.num_frames))


def geometry_of(config: InpaintConfig, settings: Settings) -> Geometry:
    """Size that frames are fitted to, and the working size that they are padded to."""
    fit = str(settings.option("fit"))
    return Geometry(settings.height, settings.width, fit, config.spatial_factor)


def latent_shape(config: InpaintConfig, settings: Settings) -> tuple[int, int, int]:
    """(C, h, w) of one frame's latents."""
    rows, columns = geometry_of(config, settings).padded
    step = config.spatial_factor
    return (config.latent_channels, rows // step, columns // step)


def smaller_settings(settings: Settings) -> Iterator[Settings]:
    """Yield the same request with less memory: one frame at once, then smaller frames."""
    settings = settings.with_option("frames_at_once", 1)
    height, width = settings.height, settings.width
    while min(height, width) > 64:
        yield replace(settings, height=height, width=width)
        height, width = (max(side * 3 // 4 // 8 * 8, 8) for side in (height, width))


def _check_request(
    config: InpaintConfig, title: str, request: Request, options: InpaintOptions
) -> None:
    check_used(title, request, _NO_USE)
    if not config.controlnets:
        raise InputError(
            f"{title} is a {config.pipeline}, which makes single pictures; to repaint a part of a "
            "picture or video with it, name a ControlNet (controlnet: a folder, a hub id or a "
            "short name such as canny)"
        )
    if request.prompt is None:
        raise InputError(f"{title} needs a prompt that says what is painted")
    check_prompt(request.prompt)
    if (request.image is None) == (options.source is None):
        raise InputError(
            "image and source both say what is repainted; give one of them"
            if options.source is not None
            else f"{title} repaints a part of a picture or video; give it (source)"
        )
    if options.mask is None:
        raise InputError("there is no mask; give a picture, a video or a box (mask)")
    if options.control is None:
        raise InputError(
            "there is nothing for the ControlNet to see; give a picture or video, or one of "
            f"{', '.join(BUILT_IN)}, which are made of the source (control)"
        )
    check_fit(options.fit)
    _check_picture(request.image)


def _check_picture(image: Any) -> None:
    if isinstance(image, str) or hasattr(image, "__fspath__"):
        frames = num_animated(image)
        if frames > 1:
            raise InputError(
                f"image is one picture, and {str(image)!r} has {frames} frames; give it as source"
            )


def _check_given(inputs: Inputs, found: FrameCount, notes: list[str]) -> None:
    check_mask(inputs, found.num_frames, found.height, found.width)
    for name, height, width in check_controls(inputs, found.num_frames):
        if height * found.width != width * found.height:
            notes.append(
                f"control {name!r} is {width}x{height} and is stretched to the source's "
                f"{found.width}x{found.height}"
            )


def _control_options(config: InpaintConfig, options: InpaintOptions) -> tuple[tuple[str, Any], ...]:
    """Scale, start and end: a number for one ControlNet, a tuple for several."""
    count = len(config.controlnets)
    each = {
        name: _for_each(name, getattr(options, name), count)
        for name in (
            "controlnet_conditioning_scale", "control_guidance_start", "control_guidance_end"
        )
    }  # fmt: skip
    _, starts, ends = each.values()
    for start, end in zip(starts, ends, strict=True):
        if not 0 <= start < end <= 1:
            raise InputError(
                f"control_guidance_start {start:g} must be at least 0 and less than "
                f"control_guidance_end {end:g}, and that at most 1"
            )
    controls = options.control
    given = len(controls) if isinstance(controls, (list, tuple)) else None
    if isinstance(controls, str) and "," in controls:
        given = len(controls.split(","))
    if (given or 1) != count:
        raise InputError(
            f"there are {count} ControlNets and {given or 1} controls; give one for each, in order"
        )
    return tuple((name, v if count > 1 else v[0]) for name, v in each.items())


def _for_each(name: str, value: Any, count: int) -> tuple[float, ...]:
    values = value if isinstance(value, tuple) else (value,) * count
    if len(values) != count:
        raise InputError(f"{name} has {len(values)} values for {count} ControlNets")
    if any(not -1000 <= each <= 1000 for each in values):
        raise InputError(f"{name} must be -1000 to 1000, got {value}")
    return values


def _fps(inputs: Inputs, request: Request, notes: list[str]) -> float:
    if inputs.source.is_still:
        return request.fps or PICTURE_FPS
    own = None if inputs.source.fps is None else float(inputs.source.fps)
    if own is not None and request.fps is not None and request.fps != own:
        notes.append(
            f"the source has {own:g} frames a second and the result {request.fps:g}, so it will "
            f"not play at its own speed; --fps {own:g} keeps that"
        )
    if own is None and request.fps is None:
        notes.append(f"the source tells no frame rate, so the result has {FPS:g} (fps)")
    return request.fps or own or FPS


def _num_frames(inputs: Inputs, found: FrameCount, request: Request, fps: float) -> int:
    frames = request.num_frames
    if frames is None and request.seconds is not None:
        frames = frames_in(request.seconds, fps)
    if frames is not None and frames > found.num_frames:
        raise InputError(
            f"{frames} frames were asked for and the source has {found.num_frames}"
            + ("; it is one picture" if inputs.source.is_still else "")
        )
    return frames or found.num_frames


def _note_size(
    config: InpaintConfig, settings: Settings, found: FrameCount, notes: list[str]
) -> None:
    geometry = geometry_of(config, settings)
    given, size = (found.height, found.width), (settings.height, settings.width)
    note = fit_note("source", given, size, geometry.fit)
    if note:
        notes.append(note)
    elif found.height != settings.height:
        notes.append(
            f"the source is {found.width}x{found.height} and is resized; outside of the mask the "
            "result is the resized source"
        )
    height, width = geometry.padded
    if (height, width) != (settings.height, settings.width):
        notes.append(
            f"sides are worked on in multiples of {geometry.step}: {settings.width}x"
            f"{settings.height} is padded to {width}x{height} by its edges, and the result cut back"
        )


def _note_steps(
    config: InpaintConfig, settings: Settings, request: Request, notes: list[str]
) -> None:
    strength = float(settings.option("strength"))
    steps = settings.num_inference_steps
    done = num_timesteps(config.scheduler, steps, strength)
    if strength < 1:
        notes.append(f"strength {strength:g}: {done} of {steps} steps are done")
        if request.latents is not None:
            notes.append(
                "given latents are begun with as they are, as in diffusers; the source is not "
                "mixed into them"
            )
    if config.has_safety_checker:
        notes.append("the checkpoint's safety checker is not run")
