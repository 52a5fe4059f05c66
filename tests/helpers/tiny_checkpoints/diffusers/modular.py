"""Tiny checkpoints of modular pipelines, with the components of the plain ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import diffusers
import transformers

from helpers.tiny_checkpoints.diffusers import wan
from helpers.tiny_checkpoints.diffusers.cases import Clip, Still, case
from helpers.tiny_checkpoints.diffusers.cosmos import omni
from helpers.tiny_checkpoints.diffusers.hunyuan import sees
from helpers.tiny_checkpoints.diffusers.wan import SHORT
from helpers.tiny_checkpoints.pipeline_components import (
    flow,
    hunyuan15_parts,
    ltx2_parts,
    ltx_parts,
    made,
)


def assembled(cls: Any, parts: Mapping[str, Any], **config: Any) -> Any:
    """A modular pipeline of those of the parts that it has."""
    pipe = cls()
    pipe.update_components(**{n: part for n, part in parts.items() if n in pipe.component_names})
    if config:
        pipe.register_to_config(**config)
    return pipe


@case("WanModularPipeline", size="16x16", num_frames=5, option=SHORT)
def wan_21() -> Any:
    """Wan 2.1 of a text."""
    return assembled(diffusers.WanModularPipeline, wan.parts())


@case("WanImage2VideoModularPipeline", size="32x32", num_frames=5, option=SHORT, image=Still())
def wan_21_of_a_picture() -> Any:
    """Wan 2.1 of a picture."""
    denoiser = wan.transformer(in_channels=36, image_dim=4)
    return assembled(
        diffusers.WanImage2VideoModularPipeline, wan.parts(transformer=denoiser, **wan.sees())
    )


@case("Wan22ModularPipeline", size="16x16", num_frames=5, option=SHORT)
def wan_22() -> Any:
    """Wan 2.2 of a text: two experts."""
    parts = wan.parts(transformer_2=wan.transformer(seed=1))
    return assembled(diffusers.Wan22ModularPipeline, parts)


@case("Wan22Image2VideoModularPipeline", size="32x32", num_frames=5, option=SHORT, image=Still())
def wan_22_of_a_picture() -> Any:
    """Wan 2.2 of a picture."""
    both = {
        name: wan.transformer(seed=seed, in_channels=36)
        for seed, name in enumerate(("transformer", "transformer_2"))
    }
    return assembled(diffusers.Wan22Image2VideoModularPipeline, wan.parts(**both))


@case(
    "Wan22VaceModularPipeline",
    size="16x16", num_frames=5,
    option={**SHORT, "video": Clip(5), "mask": Clip(5), "reference_images": [Still()]},
)  # fmt: skip
def wan_22_vace() -> Any:
    """Wan 2.2 VACE."""
    both = {
        name: wan.transformer(
            diffusers.WanVACETransformer3DModel, seed, vace_layers=[0], vace_in_channels=96
        )
        for seed, name in enumerate(("transformer", "transformer_2"))
    }
    return assembled(diffusers.Wan22VaceModularPipeline, wan.parts(**both))


@case("LTXModularPipeline", size="32x32", num_frames=9, option=SHORT)
def ltx() -> Any:
    """LTX-Video."""
    return assembled(diffusers.LTXModularPipeline, ltx_parts())


@case("LTX2ModularPipeline", size="32x32", num_frames=5, option=SHORT, sound=True)
def ltx2() -> Any:
    """LTX-2: picture and sound."""
    return assembled(diffusers.LTX2ModularPipeline, ltx2_parts())


@case("HunyuanVideo15ModularPipeline", size="16x16", num_frames=5)
def hunyuan15() -> Any:
    """HunyuanVideo-1.5."""
    return assembled(diffusers.HunyuanVideo15ModularPipeline, {**hunyuan15_parts(), **sees()})


_CHUNKS = {**SHORT, "num_latent_frames_per_chunk": 3, "history_sizes": [4, 2, 1]}
_PYRAMID: Mapping[str, Any] = {
    "size": "64x64", "num_frames": 36, "made": None, "num_inference_steps": None,
    "option": {**_CHUNKS, "pyramid_num_inference_steps_list": [1, 1, 1]},
}  # fmt: skip


@case("HeliosModularPipeline", size="32x32", num_frames=36, made=None, option=_CHUNKS)
def helios() -> Any:
    """Helios: chunk after chunk."""
    return assembled(diffusers.HeliosModularPipeline, wan.helios().components)


@case("HeliosPyramidModularPipeline", **_PYRAMID)
def helios_pyramid() -> Any:
    """Helios, each chunk from small to large."""
    return assembled(diffusers.HeliosPyramidModularPipeline, wan.helios_pyramid().components)


_WORDS = {"use_system_prompt": False, "add_resolution_template": False,
          "add_duration_template": False}  # fmt: skip


@case("Cosmos3OmniModularPipeline", size="16x16", num_frames=5, option=_WORDS)
def cosmos3() -> Any:
    """Cosmos 3."""
    return assembled(
        diffusers.Cosmos3OmniModularPipeline, omni().components, enable_safety_checker=False
    )


@case(
    "Cosmos3DistilledModularPipeline",
    size="16x16", num_frames=5, num_inference_steps=None, made=3, option=_WORDS,
)  # fmt: skip
def cosmos3_distilled() -> Any:
    """Cosmos 3 with few steps, which its config fixes."""
    return assembled(
        diffusers.Cosmos3DistilledModularPipeline, {**omni().components, "scheduler": flow()},
        enable_safety_checker=False, distilled_sigmas=[1.0, 0.7, 0.3],
    )  # fmt: skip


@case("HeliosPyramidDistilledModularPipeline", **_PYRAMID)
def helios_distilled() -> Any:
    """Helios from small to large with few steps."""
    parts = {
        **wan.helios_pyramid().components,
        "scheduler": diffusers.HeliosDMDScheduler(gamma=0.3),
    }
    return assembled(diffusers.HeliosPyramidDistilledModularPipeline, parts)


@case(
    "EchoModularPipeline",
    size="32x32", num_frames=9, num_inference_steps=None, made=8, option=SHORT, sound=True,
)  # fmt: skip
def echo() -> Any:
    """Echo: LTX-2 with a memory of pictures and sounds."""
    return assembled(diffusers.EchoModularPipeline, ltx2_parts())


def _animate2(cls: Any) -> Any:
    transformer = diffusers.WanAnimate2Transformer3DModel(
        dim=24, ffn_dim=32, freq_dim=32, text_dim=32, num_heads=2, num_layers=2, text_len=16
    )
    seen = transformers.CLIPVisionConfig(
        hidden_size=1280, projection_dim=4, num_hidden_layers=2, num_attention_heads=2,
        image_size=224, intermediate_size=16, patch_size=112,
    )  # fmt: skip
    return assembled(
        cls,
        wan.parts(
            transformer=made(transformer), scheduler=flow(),
            image_encoder=made(transformers.CLIPVisionModel(seen)),
        ),
    )  # fmt: skip


_DRIVEN = {**SHORT, "driving_video": Clip(9), "segment_frame_length": 5}


@case("WanAnimate2ModularPipeline", size="16x16", image=Still(), made=None, option=_DRIVEN)
def wan_animate2() -> Any:
    """Wan-Animate-2: a picture that moves as a video does, whose keys are kept for each segment."""
    return _animate2(diffusers.WanAnimate2ModularPipeline)


@case("WanAnimate2DistilledModularPipeline", size="16x16", image=Still(), made=None, option=_DRIVEN)
def wan_animate2_distilled() -> Any:
    """The same with few steps."""
    return _animate2(diffusers.WanAnimate2DistilledModularPipeline)
