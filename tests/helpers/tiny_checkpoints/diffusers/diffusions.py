"""Tiny checkpoints of CogVideoX, of AnimateDiff and of the UNets that came before."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers

from helpers.tiny_checkpoints.diffusers.cases import Clip, Still, case
from helpers.tiny_checkpoints.pipeline_components import (
    VOCABULARY,
    animatediff_parts,
    clip,
    cogvideox_parts,
    image_vae,
    latte_parts,
    made,
    mochi_parts,
    tokenizer,
)
from helpers.tiny_checkpoints.pipelines import SHORT


@case("CogVideoXPipeline", size="16x16", num_frames=9, option=SHORT)
def cogvideox() -> Any:
    """CogVideoX of a text."""
    return diffusers.CogVideoXPipeline(**cogvideox_parts())


@case("CogVideoXImageToVideoPipeline", size="16x16", num_frames=9, option=SHORT, image=Still())
def cogvideox_of_a_picture() -> Any:
    """CogVideoX of a picture, whose latents lie beside the noise."""
    return diffusers.CogVideoXImageToVideoPipeline(**cogvideox_parts(in_channels=8))


@case("CogVideoXVideoToVideoPipeline", size="16x16", option={**SHORT, "video": Clip(9)}, made=1)
def cogvideox_of_a_video() -> Any:
    """CogVideoX of a video."""
    return diffusers.CogVideoXVideoToVideoPipeline(**cogvideox_parts())


@case("CogVideoXFunControlPipeline", size="16x16", option={**SHORT, "control_video": Clip(9)})
def cogvideox_by_a_video() -> Any:
    """CogVideoX Fun: led by a video of edges, depths or poses."""
    return diffusers.CogVideoXFunControlPipeline(**cogvideox_parts(in_channels=8))


@case("MochiPipeline", size="16x16", num_frames=7, option=SHORT)
def mochi() -> Any:
    """Mochi."""
    return diffusers.MochiPipeline(**mochi_parts())


@case("LattePipeline", size="16x16", num_frames=2, option={"clean_caption": False})
def latte() -> Any:
    """Latte."""
    return diffusers.LattePipeline(**latte_parts())


def _controlnet() -> Any:
    return made(
        diffusers.ControlNetModel(
            block_out_channels=(8, 8), layers_per_block=2, in_channels=4, norm_num_groups=2,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), cross_attention_dim=32,
            conditioning_embedding_out_channels=(8, 8), attention_head_dim=2,
        )
    )  # fmt: skip


@case("AnimateDiffPipeline", size="16x16", num_frames=3)
def animatediff() -> Any:
    """AnimateDiff of a text."""
    return diffusers.AnimateDiffPipeline(**animatediff_parts())


@case("AnimateDiffPAGPipeline", size="16x16", num_frames=3)
def animatediff_pag() -> Any:
    """The same, guided by attention that is perturbed."""
    return diffusers.AnimateDiffPAGPipeline(**animatediff_parts())


@case(
    "AnimateDiffControlNetPipeline",
    size="16x16", num_frames=3, option={"conditioning_frames": Clip(3)},
)  # fmt: skip
def animatediff_by_frames() -> Any:
    """AnimateDiff, led by frames of edges, depths or poses."""
    return diffusers.AnimateDiffControlNetPipeline(**animatediff_parts(), controlnet=_controlnet())


@case(
    "AnimateDiffSparseControlNetPipeline",
    size="16x16", num_frames=3,
    option={"conditioning_frames": [Still()], "controlnet_frame_indices": [0]},
)  # fmt: skip
def animatediff_by_some_frames() -> Any:
    """AnimateDiff, led by some frames."""
    sparse = diffusers.SparseControlNetModel(
        block_out_channels=(8, 8), layers_per_block=2, in_channels=4, norm_num_groups=2,
        down_block_types=("CrossAttnDownBlockMotion", "DownBlockMotion"), cross_attention_dim=32,
        conditioning_channels=3, conditioning_embedding_out_channels=(8, 8), attention_head_dim=2,
        use_simplified_condition_embedding=False, concat_conditioning_mask=False,
        motion_num_attention_heads=4,
    )  # fmt: skip
    return diffusers.AnimateDiffSparseControlNetPipeline(
        **animatediff_parts(), controlnet=made(sparse)
    )


@case("AnimateDiffVideoToVideoPipeline", size="16x16", made=1, option={"video": Clip(3)})
def animatediff_of_a_video() -> Any:
    """AnimateDiff of a video."""
    return diffusers.AnimateDiffVideoToVideoPipeline(**animatediff_parts())


@case(
    "AnimateDiffVideoToVideoControlNetPipeline",
    size="16x16", made=1, option={"video": Clip(3), "conditioning_frames": Clip(3)},
)  # fmt: skip
def animatediff_of_a_video_by_frames() -> Any:
    """AnimateDiff of a video, led by another."""
    return diffusers.AnimateDiffVideoToVideoControlNetPipeline(
        **animatediff_parts(), controlnet=_controlnet()
    )


@case("AnimateDiffSDXLPipeline", size="16x16", num_frames=3)
def animatediff_xl() -> Any:
    """AnimateDiff around the larger model."""
    parts = animatediff_parts()
    unet = diffusers.UNet2DConditionModel(
        block_out_channels=(32, 64), layers_per_block=2, sample_size=8, norm_num_groups=2,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), attention_head_dim=(2, 4),
        use_linear_projection=True, addition_embed_type="text_time", addition_time_embed_dim=8,
        transformer_layers_per_block=(1, 2), projection_class_embeddings_input_dim=80,
        cross_attention_dim=64,
    )  # fmt: skip
    motion = diffusers.MotionAdapter(
        block_out_channels=(32, 64), motion_layers_per_block=2, motion_norm_num_groups=2,
        motion_num_attention_heads=4, use_motion_mid_block=False,
    )  # fmt: skip
    second = transformers.CLIPTextModelWithProjection(
        transformers.CLIPTextConfig(
            hidden_size=32, intermediate_size=37, num_attention_heads=4, num_hidden_layers=2,
            vocab_size=VOCABULARY, projection_dim=32, eos_token_id=1, bos_token_id=2,
            pad_token_id=0,
        )
    )  # fmt: skip
    return diffusers.AnimateDiffSDXLPipeline(
        **{**parts, "unet": made(unet), "motion_adapter": made(motion)},
        text_encoder_2=made(second), tokenizer_2=tokenizer(77),
    )  # fmt: skip


@case("PIAPipeline", size="16x16", num_frames=3, image=Still())
def pia() -> Any:
    """PIA: AnimateDiff of a picture, whose latents lie beside the noise."""
    parts = animatediff_parts()
    unet = diffusers.UNetMotionModel.from_unet2d(parts["unet"], parts["motion_adapter"])
    adapter = diffusers.MotionAdapter(
        block_out_channels=(8, 8), motion_layers_per_block=2, motion_norm_num_groups=2,
        motion_num_attention_heads=4, conv_in_channels=9,
    )  # fmt: skip
    del unet
    return diffusers.PIAPipeline(**{**parts, "motion_adapter": made(adapter)})


def _unet3d() -> Any:
    return made(
        diffusers.UNet3DConditionModel(
            block_out_channels=(8, 8), layers_per_block=1, sample_size=8, norm_num_groups=2,
            down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"), cross_attention_dim=32,
            up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"), attention_head_dim=4,
        )
    )  # fmt: skip


def _synth(cls: Any) -> Any:
    return cls(
        unet=_unet3d(), vae=image_vae(), text_encoder=clip(), tokenizer=tokenizer(77),
        scheduler=diffusers.DDIMScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False,
            set_alpha_to_one=False,
        ),
    )  # fmt: skip


@case("TextToVideoSDPipeline", size="16x16", num_frames=3)
def text_to_video_sd() -> Any:
    """ModelScope's text to video."""
    return _synth(diffusers.TextToVideoSDPipeline)


@case("VideoToVideoSDPipeline", made=1, option={"video": Clip(3)})
def video_to_video_sd() -> Any:
    """Zeroscope's larger video of a smaller one."""
    return _synth(diffusers.VideoToVideoSDPipeline)
