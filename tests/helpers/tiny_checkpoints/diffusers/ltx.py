"""Tiny checkpoints of LTX-Video and of LTX-2."""

from __future__ import annotations

from typing import Any

import diffusers
from diffusers.pipelines.ltx.modeling_latent_upsampler import LTXLatentUpsamplerModel
from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel

from helpers.tiny_checkpoints.diffusers.cases import Clip, Still, case
from helpers.tiny_checkpoints.pipeline_components import ltx2_parts, ltx_parts, made
from helpers.tiny_checkpoints.pipelines import SHORT


@case("LTXPipeline", size="32x32", num_frames=9, option=SHORT)
def ltx() -> Any:
    """LTX-Video of a text."""
    return diffusers.LTXPipeline(**ltx_parts())


@case("LTXImageToVideoPipeline", size="32x32", num_frames=9, option=SHORT, image=Still())
def ltx_of_a_picture() -> Any:
    """LTX-Video of a picture."""
    return diffusers.LTXImageToVideoPipeline(**ltx_parts())


@case(
    "LTXConditionPipeline",
    size="32x32",
    num_frames=9,
    option={**SHORT, "conditions": [{"image": Still(), "frame_index": 0}]},
)
def ltx_with_conditions() -> Any:
    """LTX-Video with pictures and videos anywhere in it."""
    return diffusers.LTXConditionPipeline(**ltx_parts())


@case(
    "LTXI2VLongMultiPromptPipeline",
    size="32x32", num_frames=17, image=Still(), made=None,
    option={**SHORT, "temporal_tile_size": 16, "temporal_overlap": 8},
)  # fmt: skip
def ltx_long() -> Any:
    """LTX-Video window after window."""
    return diffusers.LTXI2VLongMultiPromptPipeline(**ltx_parts())


@case(
    "LTXLatentUpsamplePipeline",
    size="32x32", prompt=None, num_inference_steps=None, made=0, option={"video": Clip(9)},
)  # fmt: skip
def ltx_upsample() -> Any:
    """A video twice as large, by its latents; nothing is denoised."""
    upsampler = LTXLatentUpsamplerModel(in_channels=8, mid_channels=32, num_blocks_per_stage=1)
    return diffusers.LTXLatentUpsamplePipeline(
        vae=ltx_parts()["vae"], latent_upsampler=made(upsampler)
    )


_BLOCKS = {**SHORT, "spatio_temporal_guidance_blocks": [0]}


@case("LTX2Pipeline", size="32x32", num_frames=5, option=_BLOCKS, sound=True)
def ltx2() -> Any:
    """LTX-2: picture and sound."""
    return diffusers.LTX2Pipeline(**ltx2_parts())


@case(
    "LTX2ImageToVideoPipeline", size="32x32", num_frames=5, option=_BLOCKS, image=Still(),
    sound=True,
)  # fmt: skip
def ltx2_of_a_picture() -> Any:
    """LTX-2 of a picture."""
    return diffusers.LTX2ImageToVideoPipeline(**ltx2_parts())


@case(
    "LTX2ConditionPipeline",
    size="32x32", num_frames=5, sound=True,
    option={**_BLOCKS, "conditions": [{"frames": Clip(1), "index": 0, "strength": 0.5}]},
)  # fmt: skip
def ltx2_with_conditions() -> Any:
    """LTX-2 with pictures and videos anywhere in it."""
    return diffusers.LTX2ConditionPipeline(**ltx2_parts())


@case(
    "LTX2InContextPipeline",
    size="32x32", num_frames=5, sound=True,
    option={**_BLOCKS, "reference_conditions": [{"frames": Clip(5)}]},
)  # fmt: skip
def ltx2_in_context() -> Any:
    """LTX-2 with a video that shows how."""
    return diffusers.LTX2InContextPipeline(**ltx2_parts())


@case(
    "LTX2HDRPipeline",
    size="32x32", num_frames=5, option={**SHORT, "reference_conditions": [{"frames": Clip(5)}]},
)  # fmt: skip
def ltx2_hdr() -> Any:
    """LTX-2 with light beyond white."""
    return diffusers.LTX2HDRPipeline(**ltx2_parts())


@case(
    "LTX2DFRPipeline",
    size="32x32", num_frames=9, num_inference_steps=None, made=8, sound=True,
    option={**SHORT, "generate_slots": False},
)  # fmt: skip
def ltx2_dfr() -> Any:
    """LTX-2 with few steps, and keyframes that go with them."""
    return diffusers.LTX2DFRPipeline(**ltx2_parts())


@case(
    "LTX2LatentUpsamplePipeline",
    size="32x32", num_frames=5, prompt=None, num_inference_steps=None, made=0,
    option={"video": Clip(5)},
)  # fmt: skip
def ltx2_upsample() -> Any:
    """A video of LTX-2 twice as large."""
    upsampler = LTX2LatentUpsamplerModel(
        in_channels=4, mid_channels=32, num_blocks_per_stage=1, use_rational_resampler=False
    )
    return diffusers.LTX2LatentUpsamplePipeline(
        vae=ltx2_parts()["vae"], latent_upsampler=made(upsampler)
    )
