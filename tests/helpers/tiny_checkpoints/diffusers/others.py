"""Tiny checkpoints of Allegro, EasyAnimate, Sana-Video, Motif-Video and Kandinsky 6."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers

from helpers.tiny_checkpoints.diffusers import wan
from helpers.tiny_checkpoints.diffusers.cases import Clip, Still, case
from helpers.tiny_checkpoints.diffusers.hunyuan import qwen_vl, sees
from helpers.tiny_checkpoints.pipeline_components import (
    VOCABULARY,
    clip,
    flow,
    hunyuan_parts,
    ltx2_vae,
    made,
    t5,
    tokenizer,
)
from helpers.tiny_checkpoints.pipelines import SHORT


@case(
    "AllegroPipeline",
    size="160x160", num_frames=24, vae_tiling=True, option={**SHORT, "clean_caption": False},
)  # fmt: skip
def allegro() -> Any:
    """Allegro, whose autoencoder decodes in tiles alone."""
    transformer = diffusers.AllegroTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, num_layers=1,
        cross_attention_dim=24, sample_width=8, sample_height=8, sample_frames=8,
        caption_channels=32,
    )  # fmt: skip
    vae = diffusers.AutoencoderKLAllegro(
        block_out_channels=(8, 8, 8, 8), latent_channels=4, layers_per_block=1, norm_num_groups=2,
        sample_size=160,
    )  # fmt: skip
    return diffusers.AllegroPipeline(
        transformer=made(transformer), vae=made(vae), text_encoder=t5(), tokenizer=tokenizer(),
        scheduler=diffusers.DDIMScheduler(),
    )  # fmt: skip


@case("EasyAnimatePipeline", size="16x16", num_frames=5, negative_prompt="blurred")
def easyanimate() -> Any:
    """EasyAnimate of a text."""
    transformer = diffusers.EasyAnimateTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4,
        time_embed_dim=2, text_embed_dim=16, num_layers=1, mmdit_layers=1, sample_width=16,
        sample_height=16, patch_size=2, time_position_encoding_type="3d_rope",
    )  # fmt: skip
    vae = diffusers.AutoencoderKLMagvit(
        latent_channels=4, block_out_channels=[8, 8, 8, 8], layers_per_block=1, norm_num_groups=2,
    )  # fmt: skip
    qwen = transformers.Qwen2VLForConditionalGeneration(
        transformers.Qwen2VLConfig(
            text_config={
                "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
                "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": VOCABULARY,
                "rope_scaling": {
                    "mrope_section": [1, 1, 2], "rope_type": "default", "type": "default",
                },
            },
            vision_config={"depth": 1, "hidden_size": 16, "embed_dim": 16, "num_heads": 2},
            image_token_id=4, video_token_id=5, vision_start_token_id=6, vision_end_token_id=7,
        )
    )  # fmt: skip
    return diffusers.EasyAnimatePipeline(
        transformer=made(transformer), vae=made(vae), text_encoder=made(qwen),
        tokenizer=tokenizer(256), scheduler=flow(),
    )  # fmt: skip


def _gemma() -> Any:
    return made(
        transformers.Gemma2Model(
            transformers.Gemma2Config(
                hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                num_key_value_heads=2, head_dim=8, vocab_size=VOCABULARY, pad_token_id=0,
            )
        )
    )  # fmt: skip


def _sana(cls: Any) -> Any:
    transformer = diffusers.SanaVideoTransformer3DModel(
        in_channels=16, out_channels=16, num_attention_heads=2, attention_head_dim=12, num_layers=2,
        num_cross_attention_heads=2, cross_attention_head_dim=12, cross_attention_dim=24,
        caption_channels=16, sample_size=8, patch_size=(1, 2, 2), rope_max_seq_len=32,
    )  # fmt: skip
    return cls(
        transformer=made(transformer), vae=wan.vae(), text_encoder=_gemma(),
        tokenizer=tokenizer(), scheduler=flow(),
    )  # fmt: skip


_PLAIN = {
    **SHORT, "clean_caption": False, "use_resolution_binning": False,
    "complex_human_instruction": [],
}  # fmt: skip


@case("SanaVideoPipeline", size="32x32", num_frames=5, option=_PLAIN)
def sana() -> Any:
    """Sana-Video of a text."""
    return _sana(diffusers.SanaVideoPipeline)


@case("SanaImageToVideoPipeline", size="32x32", num_frames=5, option=_PLAIN, image=Still())
def sana_of_a_picture() -> Any:
    """Sana-Video of a picture."""
    return _sana(diffusers.SanaImageToVideoPipeline)


@case(
    "SanaWMPipeline",
    size="32x32", num_frames=9, image=Still(),
    option={
        **SHORT, "action": "w-8", "intrinsics": [20.0, 20.0, 12.0, 10.0], "chi_prompt": ["x"],
    },
)  # fmt: skip
def sana_wm() -> Any:
    """Sana-WM: a picture, through which a camera moves."""
    transformer = diffusers.SanaWMTransformer3DModel(
        in_channels=4, num_layers=2, hidden_size=32, num_attention_heads=2, linear_head_dim=16,
        caption_channels=16, softmax_every_n=2, chunk_plucker_post_attn_blocks=2,
        chunk_plucker_channels=12,
    )  # fmt: skip
    gemma = transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(
            hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, head_dim=8, vocab_size=VOCABULARY, pad_token_id=0,
        )
    )  # fmt: skip
    return diffusers.SanaWMPipeline(
        transformer=made(transformer), vae=ltx2_vae(4), text_encoder=made(gemma),
        tokenizer=tokenizer(), scheduler=flow(),
    )  # fmt: skip


def _motif(cls: Any, **more: Any) -> Any:
    transformer = diffusers.MotifVideoTransformer3DModel(
        in_channels=33, out_channels=16, num_attention_heads=2, attention_head_dim=12,
        num_layers=1, num_single_layers=1, num_decoder_layers=0, patch_size=2, patch_size_t=1,
        text_embed_dim=16, rope_axes_dim=(4, 4, 4), **more,
    )  # fmt: skip
    sight = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 8, "patch_size": 4,
    }  # fmt: skip
    encoder = transformers.T5Gemma2Encoder(
        transformers.T5Gemma2EncoderConfig(
            text_config={
                "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
                "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
                "vocab_size": VOCABULARY, "pad_token_id": 0, "dropout_rate": 0.0,
            },
            vision_config=sight, mm_tokens_per_image=4, image_token_index=4,
        )
    )  # fmt: skip
    return cls(
        transformer=made(transformer), vae=wan.vae(), text_encoder=made(encoder),
        tokenizer=tokenizer(), scheduler=flow(),
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=4.0),
        feature_extractor=sees()["feature_extractor"],
    )  # fmt: skip


@case("MotifVideoPipeline", size="16x16", num_frames=5, option=SHORT)
def motif() -> Any:
    """Motif-Video of a text."""
    return _motif(diffusers.MotifVideoPipeline)


@case("MotifVideoImage2VideoPipeline", size="16x16", num_frames=5, option=SHORT, image=Still())
def motif_of_a_picture() -> Any:
    """Motif-Video of a picture."""
    return _motif(diffusers.MotifVideoImage2VideoPipeline, image_embed_dim=16)


@case("Kandinsky6TI2VAPipeline", size="16x16", num_frames=5, option={"sample_audio": False})
def kandinsky6() -> Any:
    """Kandinsky 6, without its sound."""
    transformer = diffusers.Kandinsky6Transformer3DModel(
        in_visual_dim=4, out_visual_dim=4, in_text_dim=16, in_text_dim2=8, time_dim=16,
        patch_size=(1, 2, 2), model_dim=16, ff_dim=32, num_text_blocks=1, num_visual_blocks=1,
        axes_dims=(2, 2, 4), visual_cond=True, in_audio_dim=4, out_audio_dim=4, model_dim_a=16,
        time_dim_a=16, ff_dim_a=32, axes_dims_a=(8,),
    )  # fmt: skip
    return diffusers.Kandinsky6TI2VAPipeline(
        transformer=made(transformer), vae=hunyuan_parts()["vae"], text_encoder=qwen_vl(),
        tokenizer=tokenizer(1024), text_encoder_2=clip(8), tokenizer_2=tokenizer(77),
        scheduler=flow(),
    )  # fmt: skip


@case(
    "Kandinsky6SRPipeline",
    prompt=None, option={"video": Clip(5, 64), "resolution_scale": 2},
)  # fmt: skip
def kandinsky6_larger() -> Any:
    """Kandinsky 6's larger video of a smaller one."""
    transformer = diffusers.Kandinsky6SRTransformer3DModel(
        in_visual_dim=4, out_visual_dim=4, time_dim=16, patch_size=(1, 1, 1), model_dim=16,
        ff_dim=32, num_visual_blocks=1, axes_dims=(2, 2, 4), tile_sizes=((128, 128),),
    )  # fmt: skip
    vae = diffusers.Kandinsky6SRVAE(
        latent_channels=4, encoder_block_out_channels=(8, 8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8, 8), layers_per_block=1,
    )  # fmt: skip
    return diffusers.Kandinsky6SRPipeline(
        transformer=made(transformer), vae=made(vae), scheduler=flow()
    )
