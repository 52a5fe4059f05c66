"""Build the keyword arguments of a pipeline call from the resolved settings and one video's state.

Resolved options are passed under the pipeline's own names. All others keep the pipeline's
defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from everyframe.core.plan import Settings
from everyframe.diffusers_pipelines import oom_fallback
from everyframe.diffusers_pipelines.inputs import call_options, defaults
from everyframe.diffusers_pipelines.inputs.clip_continuation import OPTION, clip_arguments
from everyframe.diffusers_pipelines.inputs.media import opened
from everyframe.diffusers_pipelines.inputs.signature import OWN_SEED, CallSignature
from everyframe.runtime.interface import VideoState

#: What a modular pipeline is asked for, where it has it.
_MODULAR_OUTPUTS = ("videos", "audio", "sampling_rate")


def arguments(
    interface: CallSignature,
    settings: Settings,
    video: VideoState,
    own: Mapping[str, Any],
    *,
    decodes: bool = True,
) -> dict[str, Any]:
    """Keyword arguments for one video with its seed; `own` are the pipeline's own parameters.

    With `decodes` False the call ends with latents. The generator lives on the CPU, so noise
    depends on the seed alone and not on the device. A pipeline with a seed parameter beside its
    generator gets the same seed.
    """
    from PIL import Image

    height, width = settings.conditioned_size
    ours: dict[str, Any] = {
        "height": height,
        "width": width,
        "num_frames": settings.conditioned_length,
        "fps": settings.fps,
        "num_inference_steps": settings.num_inference_steps,
        "guidance_scale": settings.guidance_scale,
        "seed": torch.Generator(device="cpu").manual_seed(video.seed),
    }
    if settings.prompt or not call_options.has_encoded_prompt(own):
        ours["prompt"] = settings.prompt
    if settings.negative_prompt is not None:
        ours["negative_prompt"] = settings.negative_prompt
    elif own.get("negative_prompt_embeds") is not None:
        ours["negative_prompt"] = None  # Latte and Sana have "" there, and refuse it beside these
    elif defaults.of(defaults.EMPTY_NEGATIVE, interface.class_name):
        ours["negative_prompt"] = ""
    if video.start_noise is not None:
        ours["latents"] = video.start_noise
    if video.inputs.first is not None:
        ours["image"] = Image.fromarray(video.inputs.first[0])
    if video.inputs.last is not None:
        ours["last_image"] = Image.fromarray(video.inputs.last[0])
    ours |= {name: each for name, each in video.inputs.as_given.items() if name != OPTION}
    if isinstance(latents := ours.get("latents"), torch.Tensor):
        ours["latents"] = latents.clone()  # Kandinsky 5 writes into them, and may be called again
    names = {each: interface.name_of(each) for each in ours if each not in settings.own_choices}
    call = {name: _as_declared(interface, name, ours[each]) for each, name in names.items() if name}
    if OWN_SEED in interface.parameters and "generator" not in own:
        call[OWN_SEED] = video.seed
    for name in map(interface.name_of, ("prompt", "image")):
        if name is not None and interface.parameters[name].required:
            call.setdefault(name, None)  # it makes a video of what was encoded of one before
    call |= opened(interface, own, settings) | clip_arguments(interface, settings, video, own)
    if oom_fallback.NAME in dict(settings.savings):
        call[oom_fallback.NAME] = settings.saving(oom_fallback.NAME, 0)
    if "output_type" in interface.parameters:
        call["output_type"] = own.get("output_type", "np") if decodes else "latent"
    if "return_dict" in interface.parameters:
        call["return_dict"] = True
    if interface.is_modular:
        call["output"] = [name for name in _MODULAR_OUTPUTS if name in interface.results]
    return call


def _as_declared(interface: CallSignature, name: str, value: Any) -> Any:
    """Pass a whole frame rate as int to a pipeline that declares int, as diffusers' LTX does."""
    is_whole = isinstance(value, float) and value.is_integer()
    return int(value) if is_whole and interface.parameters[name].kinds == (int,) else value
