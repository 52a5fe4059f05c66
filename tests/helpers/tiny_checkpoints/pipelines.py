"""Tiny random checkpoints of diffusers' video pipelines, written by their own `save_pretrained`.

`TINY` has one function per pipeline, `CALLS` the request of each. Read next:
`pipeline_components.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import transformers

from helpers.tiny_checkpoints.pipeline_components import (
    VOCABULARY,
    animatediff_parts,
    cogvideox_parts,
    hunyuan15_parts,
    hunyuan_parts,
    latte_parts,
    ltx2_parts,
    ltx_parts,
    made,
    mochi_parts,
    tokenizer,
)


def wan(folder: Path, cls: Any = None, in_channels: int = 16) -> None:
    """Wan 2.2: two experts, one for much noise and one for little."""

    def expert(seed: int) -> Any:
        return made(
            diffusers.WanTransformer3DModel(
                patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12,
                in_channels=in_channels, out_channels=16, text_dim=32, freq_dim=32, ffn_dim=32,
                num_layers=2, cross_attn_norm=True, qk_norm="rms_norm_across_heads",
                rope_max_seq_len=32,
            ),
            seed,
        )  # fmt: skip

    umt5 = transformers.UMT5EncoderModel(
        transformers.UMT5Config(
            d_model=32, d_kv=8, d_ff=37, num_layers=1, num_heads=4, vocab_size=VOCABULARY
        )
    )
    vae = diffusers.AutoencoderKLWan(
        base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
        temperal_downsample=[False, True, True],
    )  # fmt: skip
    (cls or diffusers.WanPipeline)(
        transformer=expert(0), transformer_2=expert(1), vae=made(vae), text_encoder=made(umt5),
        tokenizer=tokenizer(), scheduler=diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ), boundary_ratio=0.9,
    ).save_pretrained(folder)  # fmt: skip


def wan_of_a_picture(folder: Path) -> None:
    """Wan 2.2, from a picture: its latents and a mask beside the noise."""
    wan(folder, diffusers.WanImageToVideoPipeline, in_channels=36)


def ltx2(folder: Path) -> None:
    """LTX-2: picture and sound together."""
    diffusers.LTX2Pipeline(**ltx2_parts()).save_pretrained(folder)


def ltx25(folder: Path) -> None:
    """LTX-2.5: modular, and frames are denoised out of their latents."""
    decoder = diffusers.LTX2VideoDiffusionDecoderModel(
        latent_channels=4, patch_size=4, decoder_head_dim=16,
        decoder_stage_channels=(64, 32, 16, 16, 16), decoder_stage_depths=(1, 1, 1, 1, 1),
        decoder_stage_kernels=((1, 1, 1),) * 4, decoder_upsample_channel_reductions=(2, 2, 1, 1),
        decoder_stage5_kernel=(3, 3, 3), decoder_t_emb_dim=32, spatial_compression_ratio=32,
        temporal_compression_ratio=8,
    )  # fmt: skip
    pipe = diffusers.LTX25ModularPipeline()
    parts = ltx2_parts()
    parts.pop("vae")
    pipe.update_components(**parts, diffusion_decoder=made(decoder))
    pipe.save_pretrained(str(folder), overwrite_modular_index=True)


def ltx(folder: Path) -> None:
    """LTX-Video: tokens from the start, and guidance in one batch."""
    diffusers.LTXPipeline(**ltx_parts()).save_pretrained(folder)


def minimax_h3(folder: Path) -> None:
    """MiniMax-H3: modular, picture and sound out of one sequence, no guidance."""
    qwen = transformers.Qwen3VLForConditionalGeneration(
        transformers.Qwen3VLConfig(
            text_config={
                "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 51,
                "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
                "vocab_size": VOCABULARY, "pad_token_id": 0,
                "rope_scaling": {"mrope_section": [2, 1, 1], "rope_type": "default"},
            },
            vision_config={
                "hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2,
                "out_hidden_size": 16, "deepstack_visual_indexes": [0],
                "num_position_embeddings": 16,
            },
            image_token_id=4, video_token_id=5, vision_start_token_id=6, vision_end_token_id=7,
        )
    )  # fmt: skip
    transformer = diffusers.MiniMaxH3Transformer3DModel(
        num_attention_heads=2, attention_head_dim=16, hidden_size=32, num_layers=1,
        num_refiner_layers=1, ffn_dim=32, in_channels=4, audio_in_channels=4, text_dim=16,
        freq_dim=16, time_embed_hidden_dim=32, time_embed_dim=16, rope_freq_dim=2,
    )  # fmt: skip
    vae = diffusers.AutoencoderKLMiniMaxH3(
        latent_channels=4, block_out_channels=(8, 8, 8, 8, 8, 8), layers_per_block=1,
        norm_num_groups=4, decoder_num_layers=1, decoder_num_attention_heads=2,
        decoder_attention_head_dim=16, latents_mean=(0.0,) * 4, latents_std=(1.0,) * 4,
    )  # fmt: skip
    audio_vae = diffusers.AutoencoderKLMiniMaxH3Audio(
        encoder_dim=4, encoder_rates=(2, 2), latent_dim=16, latent_channels=4,
        num_attention_heads=2, decoder_dim=16, decoder_rates=(2, 2), decoder_kernel_sizes=(4, 4),
        resblock_kernel_sizes=(3,), resblock_dilation_sizes=((1, 3, 5),), sampling_rate=160,
        latents_mean=(0.0,) * 4, latents_std=(1.0,) * 4,
    )  # fmt: skip
    words = tokenizer()
    words.image_token, words.image_token_id = "<image>", 4
    words.video_token, words.video_token_id = "<video>", 5
    words.vision_start_token, words.vision_end_token = "<vision>", "</vision>"
    words.vision_start_token_id, words.vision_end_token_id = 6, 7
    pipe = diffusers.MiniMaxH3ModularPipeline()
    pipe.update_components(
        transformer=made(transformer), vae=made(vae), audio_vae=made(audio_vae),
        scheduler=diffusers.MiniMaxH3Scheduler(), audio_scheduler=diffusers.MiniMaxH3Scheduler(),
        text_encoder=made(qwen), tokenizer=words,
        # In place of Qwen3VLProcessor, which needs torchvision; a text asks for nothing but token
        # types of it, which are in the base class.
        processor=transformers.LlavaProcessor(
            image_processor=transformers.CLIPImageProcessorPil(), tokenizer=words, patch_size=14,
            vision_feature_select_strategy="default",
        ),
    )  # fmt: skip
    pipe.save_pretrained(str(folder), overwrite_modular_index=True)


def hunyuan(folder: Path) -> None:
    """HunyuanVideo: two text encoders, and guidance that is an input."""
    diffusers.HunyuanVideoPipeline(**hunyuan_parts()).save_pretrained(folder)


def hunyuan15(folder: Path) -> None:
    """HunyuanVideo-1.5: no step callback, and guidance in a component."""
    diffusers.HunyuanVideo15Pipeline(**hunyuan15_parts()).save_pretrained(folder)


def cogvideox(folder: Path) -> None:
    """CogVideoX: guidance in one batch, a scheduler without an index of its own."""
    diffusers.CogVideoXPipeline(**cogvideox_parts()).save_pretrained(folder)


def mochi(folder: Path) -> None:
    """Mochi: timesteps the other way round, frames in sixes."""
    diffusers.MochiPipeline(**mochi_parts()).save_pretrained(folder)


def latte(folder: Path) -> None:
    """Latte: its own names for length and number, pictures decoded one by one."""
    diffusers.LattePipeline(**latte_parts()).save_pretrained(folder)


def animatediff(folder: Path) -> None:
    """AnimateDiff: a UNet of pictures with motion put between its layers."""
    diffusers.AnimateDiffPipeline(**animatediff_parts()).save_pretrained(folder)


TINY: Mapping[str, Callable[[Path], None]] = {
    "wan": wan,
    "ltx2": ltx2,
    "hunyuan15": hunyuan15,
    "cogvideox": cogvideox,
    "ltx": ltx,
    "ltx25": ltx25,
    "minimax_h3": minimax_h3,
    "hunyuan": hunyuan,
    "mochi": mochi,
    "latte": latte,
    "animatediff": animatediff,
    "wan_of_a_picture": wan_of_a_picture,
}


#: A text of few tokens, for those that pad it.
SHORT = {"max_sequence_length": 16}


#: What each is asked for: options of ours, and parameters of its own under ``option``.
CALLS: Mapping[str, dict[str, Any]] = {
    "wan": {"size": "16x16", "num_frames": 5, "option": SHORT},
    "wan_of_a_picture": {"size": "16x16", "num_frames": 5, "option": SHORT},
    "ltx2": {
        "size": "32x32", "num_frames": 5,
        "option": {**SHORT, "spatio_temporal_guidance_blocks": [0]},
    },
    "ltx": {"size": "32x32", "num_frames": 9, "option": SHORT},
    "ltx25": {"size": "32x32", "num_frames": 9, "option": SHORT},
    "minimax_h3": {"size": "32x32", "num_frames": 124},
    "hunyuan": {"size": "16x16", "num_frames": 5, "option": SHORT},
    "hunyuan15": {"size": "16x16", "num_frames": 5},
    "cogvideox": {"size": "16x16", "num_frames": 9, "option": SHORT},
    "mochi": {"size": "16x16", "num_frames": 7, "option": SHORT},
    "latte": {"size": "16x16", "num_frames": 2, "option": {"clean_caption": False}},
    "animatediff": {"size": "16x16", "num_frames": 3},
}  # fmt: skip


def loaded(folder: Path) -> Any:
    """Diffusers' own pipeline of a checkpoint."""
    if (folder / "modular_model_index.json").is_file():
        modular = diffusers.ModularPipeline.from_pretrained(folder)
        modular.load_components()
        return modular
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe
