"""Resolve a request to the settings of one pipeline; refuse what the pipeline does not support.

Pure functions of the request and the pipeline's defaults (`defaults.py`). Values that were not
given are the pipeline's own. Nothing is ignored silently: an option for which the pipeline has no
parameter is an `InputError`. `call_arguments.py` builds a call from the settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from everyframe.core.errors import InputError, did_you_mean
from everyframe.core.options import shown
from everyframe.core.plan import Settings
from everyframe.core.request import Request
from everyframe.diffusers_pipelines.inputs import call_options, clip_continuation, media
from everyframe.diffusers_pipelines.inputs.defaults import PipelineDefaults, denoisers
from everyframe.diffusers_pipelines.inputs.image_forms import form_of, sides_of
from everyframe.diffusers_pipelines.inputs.media import VideoSize
from everyframe.diffusers_pipelines.inputs.options import PipelineOptions
from everyframe.diffusers_pipelines.inputs.position_tables import check_positions
from everyframe.diffusers_pipelines.inputs.schedule import check_steps, num_scheduled
from everyframe.diffusers_pipelines.inputs.signature import (
    NAMES,
    OWN_SEED,
    CallParameter,
    CallSignature,
)
from everyframe.media.read import read_image
from everyframe.runtime.request_checks import (
    check_amount,
    check_fit,
    check_used,
    frames_in,
    smaller_sizes,
    smaller_videos,
)

STEPS = 50

#: Largest value of a numeric parameter of a pipeline; useful values are far below.
_MOST = 1_000_000

_OF_PRESETS = ("num_inference_steps", "guidance_scale")
_NO_USE = {
    "resolution": "it has no named sizes; give size WIDTHxHEIGHT",
    "edit_strength": "give its own parameter by option, if it has one",
}


def resolve_settings(
    sizes: PipelineDefaults,
    title: str,
    request: Request,
    options: PipelineOptions,
    seed: int,
    *,
    is_given: bool = False,
) -> tuple[Settings, tuple[str, ...]]:
    """Resolve every value of the request, and notes for the user.

    `is_given`: the pipeline is already loaded by the caller; see `call_options`.

    Raises:
        InputError: the pipeline does not support an option or a value.
    """
    interface, notes = sizes.interface, _standing_notes(sizes)
    _check_request(sizes, title, request, options)
    own = check_options(interface, options.option, is_given=is_given)
    given, forms = _pictures_given(sizes, title, request, options)
    video = _video_given(interface, own)
    height, width = _size(sizes, request, forms, video, notes)
    fps, is_known = sizes.frame_rate()
    if request.fps is None and not is_known:
        notes.append(f"{title} names no frame rate; {fps:g} a second are taken (fps)")
    fps = request.fps or fps
    frames = _num_frames(sizes, request, fps, video, notes)
    preset_steps, scheduled = _preset_steps(sizes, request, notes), num_scheduled(interface, own)
    steps = scheduled or preset_steps or interface.default_of("num_inference_steps")
    check_amount(frames, height, width)
    if not is_given:
        check_positions(sizes, frames, height, width)
    for name, form in forms:
        if name == clip_continuation.OPTION:
            notes += clip_continuation.notes_of(sizes, form, frames, own)
    settings = Settings(
        prompt=call_options.text_of(own.get("prompt")) or request.prompt or "",
        negative_prompt=call_options.text_of(own.get("negative_prompt")) or request.negative_prompt,
        height=height,
        width=width,
        num_frames=frames,
        fps=fps,
        num_inference_steps=request.num_inference_steps
        or (steps if isinstance(steps, int) else STEPS),
        guidance_scale=_guidance(sizes, request),
        seed=seed,
        num_videos=request.num_videos,
        given_frames=given,
        own_choices=_own_choices(interface, request, has_steps=scheduled is not None),
        given_forms=forms,
        fit=options.fit,
        options=_shown(own, options, given),
    )
    check_steps(interface, own, settings.num_inference_steps)
    return settings, tuple(notes)


def _shown(
    own: Mapping[str, Any], options: PipelineOptions, given: tuple[str, ...]
) -> tuple[tuple[str, Any], ...]:
    """Options with an effect here, for plans and records."""
    prompts = {name: own[name] for name in call_options.PROMPTS if name in own}
    shown = dict(plain(media.media_parameter_names(call_options.with_seeds(own)))) | plain(prompts)
    if given and options.fit is not None:
        shown["fit"] = options.fit
    if options.vae_tiling:
        shown["vae_tiling"] = True
    return tuple(shown.items())


def _pictures_given(
    sizes: PipelineDefaults, title: str, request: Request, options: PipelineOptions
) -> tuple[tuple[str, ...], tuple[tuple[str, Any], ...]]:
    """Names of the request's images and clip, and forms of those that are passed on unchanged.

    An unreadable file is reported here, before anything is loaded.
    """
    given = tuple(name for name in ("image", "last_image") if getattr(request, name) is not None)
    clip = request.extend
    forms = () if clip is None else ((clip_continuation.OPTION, clip_continuation.clip_form(clip)),)
    names = (*given, *(name for name, _ in forms))
    if options.fit is None:
        return names, (*((name, form_of(getattr(request, name))) for name in given), *forms)
    check_fit(options.fit)
    if sizes.interface.name_of("height") is None:
        raise InputError(f"fit has no effect on {title}: it chooses the size itself")
    for name in given:
        read_image(getattr(request, name))
    return names, forms


def _own_choices(interface: CallSignature, request: Request, *, has_steps: bool) -> tuple[str, ...]:
    """Size and length parameters that were not given and that the pipeline chooses itself.

    With `has_steps` a schedule says how many steps there are.
    """
    asked = {
        "height": request.asked_size(),
        "width": request.asked_size(),
        "num_frames": request.num_frames or request.seconds,
    }
    chosen = [
        name
        for name, value in asked.items()
        if value is None and interface.name_of(name) and interface.default_of(name) is None
    ]
    steps = "num_inference_steps"
    is_free = request.num_inference_steps is None and interface.default_of(steps) is not None
    return (*chosen, *([steps] if has_steps and is_free else []))


def plain(value: Any) -> Any:
    """Convert to plain data for plans and records; an object becomes its type name."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    is_plain = value is None or isinstance(value, (str, int, float, bool))
    return value if is_plain else f"<{type(value).__name__}>"


def _standing_notes(sizes: PipelineDefaults) -> list[str]:
    """Notes on limits of this pipeline that hold for every request."""
    interface, notes = sizes.interface, []
    if denoisers(sizes.configs):
        notes.append("only denoising steps are counted; text, pictures and decoding give no events")
    else:
        notes.append("it has no denoiser by a known name, so its steps give no events")
    if interface.name_of("latents") is None:
        notes.append("it takes no latents")
    return notes


def _check_request(
    sizes: PipelineDefaults, title: str, request: Request, options: PipelineOptions
) -> None:
    interface = sizes.interface
    check_used(title, request, _NO_USE)
    clip_continuation.check_clip(interface, title, request.extend, options.option)
    for name in NAMES:
        if getattr(request, name) is None or interface.name_of(name):
            continue
        if name in ("fps", "seed"):  # without a generator it draws from torch's own, seeded too
            continue
        if name == "guidance_scale" and "guider" in sizes.configs:
            continue
        raise InputError(
            f"{name} has no effect on {title}: its pipeline ({interface.class_name}) takes none"
        )
    if request.size is not None and interface.name_of("height") is None:
        raise InputError(
            f"size has no effect on {title}: {interface.class_name} chooses the size itself"
        )
    if request.seconds is not None and interface.name_of("num_frames") is None:
        raise InputError(
            f"seconds have no effect on {title}: {interface.class_name} chooses the length itself"
        )
    is_encoded = call_options.has_encoded_prompt(options.option)
    has_text = is_encoded or options.option.get("prompt") is not None
    if interface.name_of("prompt") and request.prompt is None and not has_text:
        raise InputError(f"{title} makes a video of a text; give a prompt")
    for name in call_options.PROMPTS:
        if getattr(request, name) is not None and options.option.get(name) is not None:
            raise InputError(f"{name} was given as text and by option {name}; give one of them")
    if request.prompt == "" and is_encoded:
        raise InputError("an empty prompt and an encoded one (prompt_embeds); give one of them")
    wants = interface.parameters.get("image")
    makes_of_picture = wants is not None and (
        wants.required or "ImageToVideo" in interface.class_name
    )
    has_encoded = request.latents is not None or any("image" in each for each in options.option)
    if makes_of_picture and request.image is None and not has_encoded:
        raise InputError(f"{title} makes a video of a picture; give one (image)")


def check_options(
    interface: CallSignature, given: Mapping[str, Any], *, is_given: bool = False
) -> dict[str, Any]:
    """Check the pipeline's own parameters, given by name, against its signature.

    With `is_given` the options of `call_options` are allowed: they are for a loaded pipeline.

    Raises:
        InputError: an unknown parameter, one that has an Everyframe option, a wrong type, or a
            required parameter that is missing.
    """
    ours = {own: option for option, names in NAMES.items() for own in names} | {OWN_SEED: "seed"}
    for name, value in given.items():
        parameter = interface.parameters.get(name)
        if (
            is_given
            and call_options.is_call_option(name, value)
            and (parameter or name == "output")
        ):
            call_options.check(name, value)
            continue
        if call_options.is_call_option(name, value) and not is_given:
            raise call_options.refused(name)
        if name in ours and parameter:
            raise InputError(f"give {ours[name]} by its own option, not by option {name}")
        if parameter is None:
            hint = call_options.hint(name) or did_you_mean(name, interface.parameters)
            raise InputError(f"{interface.class_name} has no parameter {name!r}{hint}")
        media.check(interface, parameter, value)
        _check_kind(interface, parameter, value)
    clip = clip_continuation.continuation_of(interface)
    others = {*given, *ours, *call_options.NAMES, *(() if clip is None else (clip.parameter,))}
    for parameter in interface.parameters.values():
        if parameter.required and parameter.name not in others:
            what = "FILE, a video or a picture" if parameter.form else "VALUE"
            raise InputError(
                f"{interface.class_name} can't do without {parameter.name!r}; "
                f"give it by --option {parameter.name}={what}"
            )
    return {
        name: float(value) if _wants_float(interface.parameters[name], value) else value
        for name, value in given.items()
    }


def _wants_float(parameter: CallParameter, value: Any) -> bool:
    return parameter.kinds == (float,) and isinstance(value, int) and not isinstance(value, bool)


def _check_kind(interface: CallSignature, parameter: CallParameter, value: Any) -> None:
    kinds = parameter.kinds
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, (int, float)) and not abs(value) <= _MOST:
        # A length of text, for one, is padded to what is asked: libraries end the process.
        raise InputError(
            f"{parameter.name} of {interface.class_name} must be a number of at most {_MOST:,}, "
            f"got {value!r}"
        )
    if parameter.name.endswith("_length") and isinstance(value, (int, float)) and value < 1:
        raise InputError(
            f"{parameter.name} of {interface.class_name} must be at least 1, got {value!r}"
        )
    if not kinds or value is None:
        return
    fitting = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
    if fitting or _wants_float(parameter, value):
        return
    allowed = " or ".join(kind.__name__ for kind in kinds)
    raise InputError(
        f"{parameter.name} of {interface.class_name} must be {allowed}, got {shown(value)}"
    )


def _size(
    sizes: PipelineDefaults,
    request: Request,
    forms: tuple[tuple[str, Any], ...],
    video: VideoSize | None,
    notes: list[str],
) -> tuple[int, int]:
    """(height, width) from the request, or the pipeline's own."""
    interface = sizes.interface
    if interface.name_of("height") is None:
        shown = sides_of(forms[0][1]) if forms else None
        given = shown or (video[1:] if video else None) or sizes.default_size()
        notes.append("it chooses the video's size itself, by that of what is given")
        step = sizes.spatial_factor
        height, width = (max(step, (side or 0) // step * step) for side in given or (0, 0))
        return height, width
    chosen = request.asked_size() or sizes.default_size()
    if chosen is None:
        raise InputError(
            f"{interface.class_name} does not say what size it makes; give size WIDTHxHEIGHT"
        )
    if sizes.vae and min(chosen) < sizes.spatial_factor:  # no latent
        raise InputError(f"height and width must be at least {sizes.spatial_factor}, got "
                         f"{chosen[1]}x{chosen[0]}")  # fmt: skip
    return chosen


def _video_given(interface: CallSignature, own: Mapping[str, Any]) -> VideoSize | None:
    """Size of the input video, if it determines the output's size or length."""
    decides = interface.name_of("height") is None or interface.name_of("num_frames") is None
    return media.size_in(interface, own) if decides else None


def _num_frames(
    sizes: PipelineDefaults, request: Request, fps: float, video: VideoSize | None, notes: list[str]
) -> int:
    """Frames as requested, else those of the input, else the pipeline's default."""
    frames, rule = request.num_frames, sizes.length_rule()
    is_taken = sizes.interface.name_of("num_frames") is not None
    if not is_taken and video is not None and video[0] is not None:
        return video[0]
    if frames is None and request.seconds is not None:
        frames = frames_in(request.seconds, fps)
        if rule is not None:
            frames = _nearest(frames, *rule)
    frames = frames or sizes.default_length()
    if frames is None and is_taken:
        name = sizes.interface.class_name
        raise InputError(f"{name} does not say how many frames it makes; give num_frames")
    if frames is None:
        notes.append("how many frames it makes follows from what it is given; one is planned for")
    return frames or 1


def _nearest(frames: int, factor: int, rest: int) -> int:
    return max(rest or factor, round((frames - rest) / factor) * factor + rest)


def _guidance(sizes: PipelineDefaults, request: Request) -> float:
    """Guidance scale from the request, or the pipeline's own; 1 if it has none."""
    if request.guidance_scale is not None:
        return request.guidance_scale
    if sizes.preset is not None and sizes.preset.guidance_scale is not None:
        return sizes.preset.guidance_scale
    own = sizes.interface.default_of("guidance_scale")
    if own is None:
        own = sizes.configs.get("guider", {}).get("guidance_scale")
    return float(own) if isinstance(own, (int, float)) else 1.0


def _preset_steps(sizes: PipelineDefaults, request: Request, notes: list[str]) -> int | None:
    """Steps of the step-distilled model that this is, which a note tells; None for any other."""
    preset = sizes.preset
    if preset is None:
        return None
    given = [name for name in _OF_PRESETS if getattr(request, name) is not None]
    wins = f"; {' and '.join(given)} given here win" if given else ""
    notes.append(
        f"{sizes.preset_of} is known as {preset.title}, so it is sampled with {preset}"
        f"{wins} ({preset.source})"
    )
    return preset.num_inference_steps


def smaller_settings(sizes: PipelineDefaults, settings: Settings) -> Iterator[Settings]:
    """The same video shorter, then smaller; each is half or three quarters of the previous one."""
    factor, rest = sizes.length_rule() or (1, 0)
    step = 4 * sizes.spatial_factor
    lengths, sides = [settings.conditioned_length], [settings.conditioned_size]
    while lengths[-1] // 2 > factor:
        lengths.append(_nearest(lengths[-1] // 2, factor, rest))
    if sizes.interface.name_of("height"):
        sides = smaller_sizes(*sides[0], step, 2 * step)
    unconditioned = replace(settings, nominal_size=None, nominal_length=None, own_choices=())
    return smaller_videos(unconditioned, lengths, sides)
