"""Tiny random components of diffusers' video pipelines, with random weights, none of them zero.

Tokenizers are made here, letter by letter, so nothing is fetched. Sizes are the smallest that each
architecture takes. Read next: `pipelines.py`, which writes them.
"""

from __future__ import annotations

from typing import Any

import diffusers
import transformers
from diffusers.pipelines.ltx2 import LTX2TextConnectors
from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import nn

from helpers.tiny_checkpoints import opensora as tiny_opensora

_SPECIAL = ("<pad>", "</s>", "<s>", "<unk>", "<image>", "<video>", "<vision>", "</vision>")


VOCABULARY = 256 + len(_SPECIAL)


#: The simplest template that keeps each role apart.
_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


def tokenizer(max_length: int = 64, cls: Any = transformers.PreTrainedTokenizerFast) -> Any:
    """A tokenizer with a token a byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: number for number, word in enumerate((*_SPECIAL, *letters))}
    bare = Tokenizer(models.BPE(vocab=words, merges=[]))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    bare.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", words["</s>"])]
    )
    return cls(
        tokenizer_object=bare, pad_token="<pad>", eos_token="</s>", bos_token="<s>",
        unk_token="<unk>", model_max_length=max_length, chat_template=_TEMPLATE,
    )  # fmt: skip


def made(module: nn.Module, seed: int = 0) -> Any:
    """The module with random weights, none of them zero."""
    # Smaller than usual, so that deep stacks of unnormed layers stay finite.
    tiny_opensora.randomise(module, seed)
    return module.eval()


def t5(width: int = 32) -> Any:
    """An encoder of T5's kind."""
    return made(
        transformers.T5EncoderModel(
            transformers.T5Config(
                d_model=width, d_kv=8, d_ff=37, num_layers=1, num_heads=4, vocab_size=400,
                feed_forward_proj="gated-gelu",
            )
        )
    )  # fmt: skip


def clip(width: int = 32) -> Any:
    """A text encoder of CLIP's kind."""
    return made(
        transformers.CLIPTextModel(
            transformers.CLIPTextConfig(
                hidden_size=width, intermediate_size=37, num_attention_heads=4,
                num_hidden_layers=2, vocab_size=VOCABULARY, projection_dim=width,
                eos_token_id=1, bos_token_id=2, pad_token_id=0,
            )
        )
    )  # fmt: skip


def flow(**more: Any) -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(**more)


def image_vae() -> Any:
    """The autoencoder of still pictures."""
    return made(
        diffusers.AutoencoderKL(
            block_out_channels=(8, 8), down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4, norm_num_groups=4,
        )
    )  # fmt: skip


def gemma() -> Any:
    sizes = {
        "hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "vocab_size": VOCABULARY, "pad_token_id": 0,
    }  # fmt: skip
    sight = {
        "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    return made(
        transformers.Gemma3ForConditionalGeneration(
            transformers.Gemma3Config(
                text_config=sizes, vision_config=sight, mm_tokens_per_image=4,
                image_token_index=4, boi_token_index=6, eoi_token_index=7,
            )
        )
    )  # fmt: skip


def ltx2_parts(latent_channels: int = 4) -> dict[str, Any]:
    transformer = diffusers.LTX2VideoTransformer3DModel(
        in_channels=latent_channels, out_channels=latent_channels, patch_size=1, patch_size_t=1,
        num_attention_heads=2, attention_head_dim=8, cross_attention_dim=16, audio_in_channels=4,
        audio_out_channels=4, audio_num_attention_heads=2, audio_attention_head_dim=4,
        audio_cross_attention_dim=8, num_layers=2, qk_norm="rms_norm_across_heads",
        caption_channels=32, rope_double_precision=False, rope_type="split",
    )  # fmt: skip
    both: dict[str, Any] = {
        f"{kind}_connector_{name}": value
        for kind in ("video", "audio")
        for name, value in (
            ("num_attention_heads", 4), ("attention_head_dim", 8), ("num_layers", 1),
            ("num_learnable_registers", None),
        )
    }  # fmt: skip
    connectors = LTX2TextConnectors(
        caption_channels=32, text_proj_in_factor=3, connector_rope_base_seq_len=32,
        rope_theta=10000.0, rope_double_precision=False, causal_temporal_positioning=False,
        rope_type="split", **both,
    )  # fmt: skip
    audio_vae = diffusers.AutoencoderKLLTX2Audio(
        base_channels=4, output_channels=2, ch_mult=(1,), num_res_blocks=1, attn_resolutions=None,
        in_channels=2, resolution=32, latent_channels=2, norm_type="pixel",
        causality_axis="height", dropout=0.0, mid_block_add_attention=False, sample_rate=16000,
        mel_hop_length=160, is_causal=True, mel_bins=8,
    )  # fmt: skip
    vocoder = LTX2Vocoder(
        in_channels=16, hidden_channels=32, out_channels=2, upsample_kernel_sizes=[4, 4],
        upsample_factors=[2, 2], resnet_kernel_sizes=[3], resnet_dilations=[[1, 3, 5]],
        leaky_relu_negative_slope=0.1, output_sampling_rate=16000,
    )  # fmt: skip
    return {
        "transformer": made(transformer), "connectors": made(connectors),
        "audio_vae": made(audio_vae), "vocoder": made(vocoder), "vae": ltx2_vae(latent_channels),
        "scheduler": flow(), "text_encoder": gemma(), "tokenizer": tokenizer(),
    }  # fmt: skip


def ltx2_vae(latent_channels: int) -> Any:
    return made(
        diffusers.AutoencoderKLLTX2Video(
            in_channels=3, out_channels=3, latent_channels=latent_channels,
            block_out_channels=(8,), decoder_block_out_channels=(8,), layers_per_block=(1,),
            decoder_layers_per_block=(1, 1), spatio_temporal_scaling=(True,),
            decoder_spatio_temporal_scaling=(True,), decoder_inject_noise=(False, False),
            downsample_type=("spatiotemporal",), upsample_residual=(False,), upsample_factor=(1,),
            timestep_conditioning=False, patch_size=1, patch_size_t=1, encoder_causal=True,
            decoder_causal=False,
        )
    )  # fmt: skip


def ltx_parts() -> dict[str, Any]:
    """What all of LTX-Video's pipelines have."""
    transformer = diffusers.LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, patch_size=1, patch_size_t=1, num_attention_heads=3,
        attention_head_dim=8, cross_attention_dim=24, num_layers=2, caption_channels=32,
    )  # fmt: skip
    vae = diffusers.AutoencoderKLLTXVideo(
        latent_channels=8, block_out_channels=(8, 8, 8, 8), decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1,) * 5, decoder_layers_per_block=(1,) * 5,
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        decoder_inject_noise=(False,) * 5, upsample_residual=(False,) * 4, upsample_factor=(1,) * 4,
        timestep_conditioning=False, patch_size=1, patch_size_t=1, encoder_causal=True,
        decoder_causal=False,
    )  # fmt: skip
    return {
        "transformer": made(transformer), "vae": made(vae), "text_encoder": t5(),
        "tokenizer": tokenizer(), "scheduler": flow(),
    }  # fmt: skip


def hunyuan_parts(cls: Any = None, **more: Any) -> dict[str, Any]:
    """What all of HunyuanVideo's pipelines have; `more` are sizes of the transformer."""
    sizes: dict[str, Any] = {
        "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 10,
        "num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1, "patch_size": 1,
        "patch_size_t": 1, "guidance_embeds": True, "text_embed_dim": 16,
        "pooled_projection_dim": 8, "rope_axes_dim": (2, 4, 4),
    }  # fmt: skip
    transformer = (cls or diffusers.HunyuanVideoTransformer3DModel)(**{**sizes, **more})
    vae = diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=4, block_out_channels=(8, 8, 8, 8), layers_per_block=1,
        down_block_types=("HunyuanVideoDownBlock3D",) * 4, norm_num_groups=4,
        up_block_types=("HunyuanVideoUpBlock3D",) * 4, mid_block_add_attention=True,
    )  # fmt: skip
    llama = transformers.LlamaModel(
        transformers.LlamaConfig(
            hidden_size=16, intermediate_size=37, num_attention_heads=4, num_hidden_layers=4,
            vocab_size=VOCABULARY, pad_token_id=0,
        )
    )  # fmt: skip
    return {
        "transformer": made(transformer), "vae": made(vae), "text_encoder": made(llama),
        "tokenizer": tokenizer(), "text_encoder_2": clip(8), "tokenizer_2": tokenizer(77),
        "scheduler": flow(shift=7.0),
    }  # fmt: skip


def hunyuan15_parts(task_type: str = "t2v") -> dict[str, Any]:
    """What both of HunyuanVideo-1.5's pipelines have."""
    transformer = diffusers.HunyuanVideo15Transformer3DModel(
        in_channels=9, out_channels=4, num_attention_heads=2, attention_head_dim=8, num_layers=1,
        num_refiner_layers=1, mlp_ratio=2.0, patch_size=1, patch_size_t=1, text_embed_dim=16,
        text_embed_2_dim=32, image_embed_dim=12, rope_axes_dim=(2, 2, 4), target_size=16,
        task_type=task_type,
    )  # fmt: skip
    vae = diffusers.AutoencoderKLHunyuanVideo15(
        latent_channels=4, block_out_channels=(16, 16), layers_per_block=1,
        spatial_compression_ratio=4, temporal_compression_ratio=2, downsample_match_channel=False,
        upsample_match_channel=False,
    )  # fmt: skip
    qwen = transformers.Qwen2_5_VLTextModel(
        transformers.Qwen2_5_VLTextConfig(
            hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, vocab_size=VOCABULARY, pad_token_id=0,
            rope_scaling={"mrope_section": [1, 1, 2], "rope_type": "default", "type": "default"},
        )
    )  # fmt: skip
    return {
        "transformer": made(transformer), "vae": made(vae), "text_encoder": made(qwen),
        "tokenizer": tokenizer(), "text_encoder_2": t5(),
        "tokenizer_2": transformers.ByT5Tokenizer(), "scheduler": flow(shift=7.0),
        "guider": diffusers.ClassifierFreeGuidance(guidance_scale=2.0),
    }  # fmt: skip


def cogvideox_parts(in_channels: int = 4) -> dict[str, Any]:
    """What all of CogVideoX's pipelines have."""
    transformer = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=4, attention_head_dim=8, in_channels=in_channels, out_channels=4,
        time_embed_dim=2, text_embed_dim=32, num_layers=1, sample_width=2, sample_height=2,
        sample_frames=9, patch_size=2, temporal_compression_ratio=4, max_text_seq_length=16,
    )  # fmt: skip
    vae = diffusers.AutoencoderKLCogVideoX(
        down_block_types=("CogVideoXDownBlock3D",) * 4, up_block_types=("CogVideoXUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8), latent_channels=4, layers_per_block=1, norm_num_groups=2,
        temporal_compression_ratio=4,
    )  # fmt: skip
    return {
        "transformer": made(transformer), "vae": made(vae), "text_encoder": t5(),
        "tokenizer": tokenizer(), "scheduler": diffusers.CogVideoXDDIMScheduler(),
    }  # fmt: skip


def mochi_parts() -> dict[str, Any]:
    """What Mochi's pipeline has."""
    transformer = diffusers.MochiTransformer3DModel(
        patch_size=2, num_attention_heads=2, attention_head_dim=8, num_layers=2,
        pooled_projection_dim=16, in_channels=12, out_channels=None, qk_norm="rms_norm",
        text_embed_dim=32, time_embed_dim=4, activation_fn="swiglu", max_sequence_length=16,
    )  # fmt: skip
    vae = diffusers.AutoencoderKLMochi(
        latent_channels=12, out_channels=3, encoder_block_out_channels=(32, 32, 32, 32),
        decoder_block_out_channels=(32, 32, 32, 32), layers_per_block=(1, 1, 1, 1, 1),
    )  # fmt: skip
    return {
        "transformer": made(transformer), "vae": made(vae), "text_encoder": t5(),
        "tokenizer": tokenizer(), "scheduler": flow(invert_sigmas=True),
    }  # fmt: skip


def latte_parts() -> dict[str, Any]:
    """What Latte's pipeline has."""
    transformer = diffusers.LatteTransformer3DModel(
        sample_size=8, video_length=2, num_layers=1, patch_size=2, attention_head_dim=8,
        num_attention_heads=3, caption_channels=32, in_channels=4, cross_attention_dim=24,
        out_channels=8, attention_bias=True, activation_fn="gelu-approximate",
        num_embeds_ada_norm=1000, norm_type="ada_norm_single", norm_elementwise_affine=False,
        norm_eps=1e-6,
    )  # fmt: skip
    return {
        "transformer": made(transformer), "vae": image_vae(), "text_encoder": t5(),
        "tokenizer": tokenizer(), "scheduler": diffusers.DDIMScheduler(),
    }  # fmt: skip


def animatediff_parts() -> dict[str, Any]:
    """What all of AnimateDiff's pipelines have, but that for the larger model."""
    unet = diffusers.UNet2DConditionModel(
        block_out_channels=(8, 8), layers_per_block=2, sample_size=8, norm_num_groups=2,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), cross_attention_dim=32,
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), attention_head_dim=2,
    )  # fmt: skip
    motion = diffusers.MotionAdapter(
        block_out_channels=(8, 8), motion_layers_per_block=2, motion_norm_num_groups=2,
        motion_num_attention_heads=4,
    )  # fmt: skip
    return {
        "unet": made(unet), "motion_adapter": made(motion), "vae": image_vae(),
        "text_encoder": clip(), "tokenizer": tokenizer(77),
        "scheduler": diffusers.DDIMScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="linear", clip_sample=False
        ),
    }  # fmt: skip
