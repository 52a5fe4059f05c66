"""Which diffusers pipelines continue a clip, and how their call takes it; the option is `extend`.

Data, read in the code of diffusers 0.42: each row names the method it comes from. A class that is
not here may take a video to repaint, to upscale or as a control signal, which is no continuation.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from everyframe.core.errors import InputError
from everyframe.core.plan import Settings
from everyframe.diffusers_pipelines.inputs import media
from everyframe.diffusers_pipelines.inputs.defaults import PipelineDefaults
from everyframe.diffusers_pipelines.inputs.image_forms import Form, form_of, num_frames_of
from everyframe.diffusers_pipelines.inputs.signature import CallSignature
from everyframe.media.pixels import check_range, to_uint8
from everyframe.media.read import video_shape
from everyframe.media.video import Video
from everyframe.runtime.interface import VideoState

OPTION = "extend"

Kept = Literal["whole", "end", "before", "none"]


@dataclass(frozen=True)
class ClipContinuation:
    """How the call of a pipeline class takes the clip that it continues.

    Attributes:
        kept: what the result begins with: the ``whole`` clip or its ``end``, which `num_frames`
            counts; the clip ``before`` the `num_frames` that are made; or ``none`` of it.
        source: where diffusers' code says so.
        parameter: parameter of the call that has the clip.
        clip_field: field of the parameter's condition object that has it; empty if it is passed
            as it is.
        fields: other fields of the condition object.
        beside: parameters that continuing needs; those that are given win.
        wants_bytes: it reads numbers as 0..255.
    """

    kept: Kept
    source: str
    parameter: str = "video"
    clip_field: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    beside: Mapping[str, Any] = field(default_factory=dict)
    wants_bytes: bool = False


def _of_conditions(source: str) -> ClipContinuation:
    """LTX-2: a condition at the first latent frame overwrites all that the clip covers."""
    return ClipContinuation("whole", source, "conditions", "frames", {"index": 0}, wants_bytes=True)


_HELIOS = ClipContinuation(
    "none", "helios/pipeline_helios.py prepare_video_latents: the memory of the first chunk"
)
_COSMOS3 = ClipContinuation(
    "end", "cosmos/pipeline_cosmos3_omni.py prepare_latents: condition_video_keep",
    beside={"condition_video_keep": "last"},
)  # fmt: skip
_LTX2_MODULAR = _of_conditions("modular_pipelines/ltx2: conditions as in LTX2ConditionPipeline")

#: By the exact class name: a class of a similar name may do something else with its video.
CONTINUATIONS: Mapping[str, ClipContinuation] = {
    "AnyFlowFARPipeline": ClipContinuation(
        "whole", "anyflow/pipeline_anyflow_far.py __call__: latent prefix fixed during sampling"
    ),
    "AnyFlowPipeline": ClipContinuation(
        "whole", "anyflow/pipeline_anyflow.py __call__: latent prefix fixed during sampling"
    ),
    "Cosmos2VideoToWorldPipeline": ClipContinuation(
        "whole", "cosmos/pipeline_cosmos2_video2world.py prepare_latents: cond_indicator"
    ),
    "Cosmos2_5_PredictBasePipeline": ClipContinuation(
        "end", "cosmos/pipeline_cosmos2_5_predict.py __call__: num_latent_conditional_frames"
    ),
    "Cosmos3DistilledModularPipeline": _COSMOS3,
    "Cosmos3OmniModularPipeline": _COSMOS3,
    "Cosmos3OmniPipeline": _COSMOS3,
    "CosmosVideoToWorldPipeline": ClipContinuation(
        "whole", "cosmos/pipeline_cosmos_video2world.py prepare_latents: cond_indicator"
    ),
    "HeliosModularPipeline": _HELIOS,
    "HeliosPipeline": _HELIOS,
    "HeliosPyramidDistilledModularPipeline": _HELIOS,
    "HeliosPyramidModularPipeline": _HELIOS,
    "HeliosPyramidPipeline": _HELIOS,
    # Its parameter `video` is a list of videos: of a bare clip it would take the first frame.
    "LTXConditionPipeline": ClipContinuation(
        "whole", "ltx/pipeline_ltx_condition.py LTXVideoCondition",
        "conditions", "video", {"frame_index": 0},
    ),
    "LTX25ModularPipeline": _LTX2_MODULAR,
    "LTX2ConditionPipeline": _of_conditions("ltx2/pipeline_ltx2_condition.py LTX2VideoCondition"),
    "LTX2DFRPipeline": _of_conditions("ltx2/pipeline_ltx2_dfr.py encode_conditions"),
    "LTX2InContextPipeline": _of_conditions("ltx2/pipeline_ltx2_ic_lora.py preprocess_conditions"),
    "LTX2ModularPipeline": _LTX2_MODULAR,
    # Without an overlap its code stops; 17 is the smaller of the two that it recommends.
    "SkyReelsV2DiffusionForcingVideoToVideoPipeline": ClipContinuation(
        "before", "skyreels_v2/pipeline_skyreels_v2_diffusion_forcing_v2v.py overlap_history",
        beside={"overlap_history": 17},
    ),
}  # fmt: skip


def continuation_of(interface: CallSignature) -> ClipContinuation | None:
    """How that pipeline takes a clip to continue; None if it is not known to."""
    found = CONTINUATIONS.get(interface.class_name)
    return found if found is not None and found.parameter in interface.parameters else None


def check_clip(interface: CallSignature, title: str, clip: Any, own: Mapping[str, Any]) -> None:
    """Check the clip to continue, or None, beside the pipeline's own parameters `own`.

    Raises:
        InputError: the pipeline continues no clip; or its parameter for it was given as well, or
            is required and was not given.
    """
    taken = continuation_of(interface)
    if clip is None:
        if (
            taken is not None
            and interface.parameters[taken.parameter].required
            and own.get(taken.parameter) is None
        ):
            raise InputError(f"{title} continues a video; give one (extend)")
        return
    if taken is None:
        takes_video = "video" in interface.parameters
        instead = "give the video as source" if takes_video else "it can't continue a video"
        raise InputError(f"extend has no effect on {title}: {instead}")
    if own.get(taken.parameter) is not None:
        name = f"option {taken.parameter}" + (" (source)" if taken.parameter == "video" else "")
        raise InputError(f"extend is given to {title} as its {name}; give one of them")


def clip_form(clip: Any) -> Form:
    """Form of the clip, without reading more of a file than its size needs.

    Raises:
        InputError: no video, frames (T, H, W, 3) or list of pictures.
        MediaError: a file that can't be read.
    """
    if isinstance(clip, (str, os.PathLike)):
        return ("array", (*video_shape(clip), 3), "uint8")
    form = form_of(clip.frames if isinstance(clip, Video) else clip)
    is_frames = form[0] != "array" or (len(form[1]) == 4 and form[1][-1] == 3)
    if not is_frames or not num_frames_of(form):
        what = tuple(getattr(clip, "shape", ())) or type(clip).__name__
        raise InputError(
            "extend must be a path, an array of frames (T, H, W, 3), a Video or a list of Pillow "
            f"images, got {what}"
        )
    return form


def notes_of(
    sizes: PipelineDefaults, form: Form, num_frames: int, own: Mapping[str, Any]
) -> tuple[str, ...]:
    """Notes on what becomes of a clip of that form in a video of `num_frames`.

    Raises:
        InputError: the clip leaves no frame to be made.
    """
    taken, given = continuation_of(sizes.interface), num_frames_of(form) or 0
    assert taken is not None
    notes = []
    if taken.kept == "whole":
        factor = sizes.temporal_factor or 1
        used = (given - 1) // factor * factor + 1
        if used >= num_frames:
            raise InputError(
                f"num_frames={num_frames} counts the {used} frames of extend that the video begins "
                f"with, so none is left to be made; give more, for example "
                f"{used + max(1, 24 // factor) * factor}"
            )
        notes.append(f"the video begins with the {used} frames of extend; num_frames counts them")
        if used < given:
            notes.append(
                f"of the {given} frames of extend the last {given - used} are made again: "
                f"{factor}n + 1 are continued, such as {used} or {used + factor}"
            )
    else:
        notes.append(_KEPT[taken.kept])
    set_here = [f"{name}={value}" for name, value in taken.beside.items() if own.get(name) is None]
    if set_here:
        notes.append(f"to continue a clip it has {', '.join(set_here)}; an option of yours wins")
    return tuple(notes)


_KEPT: Mapping[Kept, str] = {
    "end": "the video begins with the last frames of extend; num_frames counts them",
    "before": "the video begins with all frames of extend; num_frames counts what comes after them",
    "none": "the video continues where extend ends, and has none of its frames",
}


def clip_arguments(
    interface: CallSignature, settings: Settings, video: VideoState, own: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments of the call for the clip that the video continues; empty without one.

    8-bit frames (T, H, W, 3) become what a file's do. Floats in 0..1 keep their precision, unless
    they are fitted or the pipeline reads bytes. Lists of Pillow images and tensors are passed on
    unchanged.

    Raises:
        MediaError: floats outside of 0..1.
    """
    if OPTION not in video.inputs.as_given:
        return {}
    taken, clip = continuation_of(interface), video.inputs.as_given[OPTION]
    assert taken is not None
    parameter = interface.parameters[taken.parameter]
    home = media.record_fields(parameter)[taken.clip_field] if taken.clip_field else parameter
    if isinstance(clip, np.ndarray):
        check_range(clip, OPTION)
        if clip.dtype == np.uint8 or settings.fit is not None or taken.wants_bytes:
            frames_THWC = media.fitted(interface, home, to_uint8(clip), settings)
            clip = media.in_form(interface, home, frames_THWC)
        elif home.form == "tensor":
            clip = torch.from_numpy(clip).movedim(-1, 1)[None]
    if taken.clip_field:
        assert parameter.record is not None
        clip = [parameter.record(**{taken.clip_field: clip}, **taken.fields)]
    beside = {name: value for name, value in taken.beside.items() if own.get(name) is None}
    return {**beside, parameter.name: clip}
