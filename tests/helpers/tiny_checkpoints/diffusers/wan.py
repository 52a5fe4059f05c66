"""Tiny checkpoints of Wan and of pipelines derived from it."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers

from helpers.tiny_checkpoints.diffusers.cases import Clip, Still, case
from helpers.tiny_checkpoints.pipeline_components import VOCABULARY, flow, made, tokenizer
from helpers.tiny_checkpoints.pipelines import SHORT


def umt5() -> Any:
    """The text encoder of Wan."""
    return made(
        transformers.UMT5EncoderModel(
            transformers.UMT5Config(
                d_model=32, d_kv=8, d_ff=37, num_layers=1, num_heads=4, vocab_size=VOCABULARY
            )
        )
    )  # fmt: skip


def vae(**more: Any) -> Any:
    """The autoencoder of Wan."""
    sizes = {"base_dim": 3, "z_dim": 16, **more}
    return made(
        diffusers.AutoencoderKLWan(
            dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True],
            **sizes,
        )
    )  # fmt: skip


def sees() -> dict[str, Any]:
    """What encodes a picture for attention, and what prepares it."""
    config = transformers.CLIPVisionConfig(
        hidden_size=4, projection_dim=4, num_hidden_layers=2, num_attention_heads=2, image_size=4,
        intermediate_size=16, patch_size=1,
    )  # fmt: skip
    return {
        "image_encoder": made(transformers.CLIPVisionModel(config)),
        "image_processor": transformers.CLIPImageProcessorPil(
            crop_size={"height": 4, "width": 4}, size={"shortest_edge": 4}
        ),
    }


def transformer(cls: Any = None, seed: int = 0, **more: Any) -> Any:
    """A transformer of Wan's kind."""
    sizes = {
        "patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 12,
        "in_channels": 16, "out_channels": 16, "text_dim": 32, "freq_dim": 32, "ffn_dim": 32,
        "num_layers": 2, "cross_attn_norm": True, "rope_max_seq_len": 32,
    }  # fmt: skip
    if cls not in (diffusers.AnyFlowTransformer3DModel, diffusers.AnyFlowFARTransformer3DModel):
        sizes["qk_norm"] = "rms_norm_across_heads"
    return made((cls or diffusers.WanTransformer3DModel)(**{**sizes, **more}), seed)


def unipc() -> Any:
    """Wan's scheduler."""
    return diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )


def parts(**more: Any) -> dict[str, Any]:
    """What all of them have; `more` in place of it or besides."""
    return {
        "vae": vae(), "text_encoder": umt5(), "tokenizer": tokenizer(), "scheduler": unipc(),
        "transformer": transformer(), **more,
    }  # fmt: skip


@case("WanPipeline", size="32x32", num_frames=5, option=SHORT)
def wan() -> Any:
    """Wan 2.2 of 5 billion: one expert, which gets the step of each token."""
    return diffusers.WanPipeline(
        **parts(
            transformer=transformer(in_channels=48, out_channels=48),
            vae=vae(
                z_dim=48, in_channels=12, out_channels=12, is_residual=True, patch_size=2,
                latents_mean=[0.0] * 48, latents_std=[1.0] * 48,
                scale_factor_spatial=16, scale_factor_temporal=4,
            ),
        ),
        expand_timesteps=True,
    )  # fmt: skip


@case("WanImageToVideoPipeline", size="16x16", num_frames=5, option=SHORT, image=Still())
def image_to_video() -> Any:
    """Wan 2.1 from a picture, which is encoded for attention too."""
    return diffusers.WanImageToVideoPipeline(
        **parts(transformer=transformer(in_channels=36, image_dim=4), **sees())
    )


@case(
    "WanVACEPipeline",
    size="16x16",
    num_frames=5,
    option={**SHORT, "video": Clip(5), "mask": Clip(5), "reference_images": [Still()]},
)
def vace() -> Any:
    """Wan VACE: a video, where to change it, and pictures of what is to be in it."""
    return diffusers.WanVACEPipeline(
        **parts(
            transformer=transformer(
                diffusers.WanVACETransformer3DModel, vace_layers=[0], vace_in_channels=96
            )
        )
    )


@case("WanVideoToVideoPipeline", size="16x16", option={**SHORT, "video": Clip(5)}, made=1)
def video_to_video() -> Any:
    """Wan from a video, with some of its steps."""
    return diffusers.WanVideoToVideoPipeline(**parts())


@case(
    "WanAnimatePipeline",
    size="16x16",
    image=Still(),
    made=4,
    option={
        **SHORT,
        "pose_video": Clip(9),
        "face_video": Clip(9),
        "segment_frame_length": 5,
    },
)
def animate() -> Any:
    """Wan Animate: a picture that moves as a video does, in segments."""
    return diffusers.WanAnimatePipeline(
        **parts(
            transformer=transformer(
                diffusers.WanAnimateTransformer3DModel, in_channels=36, latent_channels=16,
                image_dim=4, motion_encoder_channel_sizes={"4": 16, "8": 16, "16": 16},
                motion_encoder_size=16, motion_style_dim=8, motion_dim=4, motion_encoder_dim=16,
                face_encoder_hidden_dim=16, face_encoder_num_heads=2, inject_face_latents_blocks=2,
            ),
            **sees(),
        )
    )  # fmt: skip


@case("LucyEditPipeline", size="16x16", num_frames=5, option={**SHORT, "video": Clip(5)})
def lucy() -> Any:
    """Lucy: a video that is changed by words."""
    return diffusers.LucyEditPipeline(**parts(transformer=transformer(in_channels=32)))


@case("ChronoEditPipeline", size="16x16", num_frames=5, option=SHORT, image=Still())
def chronoedit() -> Any:
    """ChronoEdit: a picture that is changed by words, by way of a video."""
    return diffusers.ChronoEditPipeline(
        **parts(
            transformer=transformer(
                diffusers.ChronoEditTransformer3DModel, in_channels=36, image_dim=4
            ),
            scheduler=flow(),
            **sees(),
        )
    )


@case("AnyFlowPipeline", size="16x16", num_frames=5, option=SHORT)
def anyflow() -> Any:
    """AnyFlow: steps of any length."""
    return diffusers.AnyFlowPipeline(
        **parts(
            transformer=transformer(diffusers.AnyFlowTransformer3DModel),
            scheduler=diffusers.FlowMapEulerDiscreteScheduler(shift=5.0),
        )
    )


@case(
    "AnyFlowFARPipeline",
    size="16x16",
    num_frames=9,
    made=8,
    option={**SHORT, "chunk_partition": [1, 1, 1]},
)
def anyflow_far() -> Any:
    """AnyFlow chunk after chunk."""
    return diffusers.AnyFlowFARPipeline(
        **parts(
            transformer=transformer(diffusers.AnyFlowFARTransformer3DModel),
            scheduler=diffusers.FlowMapEulerDiscreteScheduler(shift=5.0),
        )
    )


def _skyreels(**more: Any) -> Any:
    return transformer(diffusers.SkyReelsV2Transformer3DModel, **more)


@case("SkyReelsV2Pipeline", size="16x16", num_frames=5, option=SHORT)
def skyreels() -> Any:
    """SkyReels V2 of a text."""
    return diffusers.SkyReelsV2Pipeline(**parts(transformer=_skyreels()))


@case("SkyReelsV2ImageToVideoPipeline", size="16x16", num_frames=5, option=SHORT, image=Still())
def skyreels_of_a_picture() -> Any:
    """SkyReels V2 of a picture."""
    return diffusers.SkyReelsV2ImageToVideoPipeline(
        **parts(transformer=_skyreels(in_channels=36, image_dim=4), **sees())
    )


_FORCED = {**SHORT, "base_num_frames": 9}


@case("SkyReelsV2DiffusionForcingPipeline", size="16x16", num_frames=9, option=_FORCED)
def skyreels_forced() -> Any:
    """SkyReels V2, frames at different steps of their own."""
    return diffusers.SkyReelsV2DiffusionForcingPipeline(
        **parts(transformer=_skyreels(inject_sample_info=True, num_frame_per_block=1))
    )


@case(
    "SkyReelsV2DiffusionForcingImageToVideoPipeline",
    size="16x16", num_frames=9, option=_FORCED, image=Still(),
)  # fmt: skip
def skyreels_forced_of_a_picture() -> Any:
    """The same from a picture."""
    return diffusers.SkyReelsV2DiffusionForcingImageToVideoPipeline(
        **parts(transformer=_skyreels(inject_sample_info=True))
    )


@case(
    "SkyReelsV2DiffusionForcingVideoToVideoPipeline",
    size="16x16", num_frames=17, made=6,
    option={**SHORT, "base_num_frames": 9, "overlap_history": 5, "video": Clip(9)},
)  # fmt: skip
def skyreels_forced_of_a_video() -> Any:
    """The same from a video, which goes on."""
    return diffusers.SkyReelsV2DiffusionForcingVideoToVideoPipeline(
        **parts(transformer=_skyreels(inject_sample_info=True))
    )


def _helios() -> Any:
    return made(
        diffusers.HeliosTransformer3DModel(
            num_attention_heads=2, attention_head_dim=12, text_dim=32, freq_dim=32, ffn_dim=32,
            num_layers=2, rope_dim=(4, 4, 4),
        )
    )  # fmt: skip


@case(
    "HeliosPipeline",
    size="32x32", num_frames=36, made=None,
    option={**SHORT, "num_latent_frames_per_chunk": 3, "history_sizes": [4, 2, 1]},
)  # fmt: skip
def helios() -> Any:
    """Helios: chunk after chunk, with a memory of what was."""
    return diffusers.HeliosPipeline(
        **parts(
            transformer=_helios(),
            scheduler=diffusers.HeliosScheduler(stages=1, stage_range=[0, 1]),
        )
    )


@case(
    "HeliosPyramidPipeline",
    size="64x64", num_frames=36, made=None, num_inference_steps=None,
    option={
        **SHORT, "num_latent_frames_per_chunk": 3, "history_sizes": [4, 2, 1],
        "pyramid_num_inference_steps_list": [1, 1, 1],
    },
)  # fmt: skip
def helios_pyramid() -> Any:
    """Helios, each chunk from small to large.

    With a third for `gamma`, as in diffusers, a matrix is singular but for rounding.
    """
    return diffusers.HeliosPyramidPipeline(
        **parts(transformer=_helios(), scheduler=diffusers.HeliosScheduler(gamma=0.3))
    )
