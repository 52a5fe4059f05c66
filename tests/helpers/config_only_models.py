"""Models of every family for dry runs, built from configs only: no file is written or read.

Sizes are tiny, but the structure is that of the released models.
"""

from __future__ import annotations

from typing import Any

from everyframe.core.plan import Settings
from everyframe.families.inpaint.checkpoint import InpaintFiles
from everyframe.families.inpaint.components import InpaintBuilder
from everyframe.families.inpaint.config import InpaintConfig, released
from everyframe.families.inpaint.options import InpaintOptions
from everyframe.families.inpaint.spec import InpaintSpec
from everyframe.families.opensora.checkpoint import OpenSoraFiles
from everyframe.families.opensora.components import OpenSoraBuilder
from everyframe.families.opensora.config import OpenSoraConfig, STDiT3Config, STDiTConfig
from everyframe.families.opensora.options import OpenSoraOptions
from everyframe.families.opensora.spec import OpenSoraSpec
from everyframe.families.opensora.vae_config import ImageVAEConfig, VideoVAEConfig
from everyframe.families.opensora2.checkpoint import OpenSora2Files
from everyframe.families.opensora2.components import OpenSora2Builder
from everyframe.families.opensora2.config import OpenSora2Config
from everyframe.families.opensora2.options import OpenSora2Options
from everyframe.families.opensora2.spec import OpenSora2Spec
from everyframe.families.stepvideo.checkpoint import StepVideoFiles
from everyframe.families.stepvideo.components import StepVideoBuilder
from everyframe.families.stepvideo.config import (
    StepLLMConfig,
    StepVideoConfig,
    StepVideoModelConfig,
)
from everyframe.families.stepvideo.options import StepVideoOptions
from everyframe.families.stepvideo.spec import StepVideoSpec
from everyframe.families.svd.checkpoint import SVDFiles
from everyframe.families.svd.components import SVDBuilder
from everyframe.families.svd.config import SVDConfig
from everyframe.families.svd.config import released as released_svd
from everyframe.families.svd.options import SVDOptions
from everyframe.families.svd.spec import SVDSpec
from everyframe.runtime.components.component_files import ComponentSource
from helpers.tiny_checkpoints import opensora as tiny_opensora
from helpers.tiny_checkpoints import opensora2 as tiny_opensora2
from helpers.tiny_checkpoints import stepvideo as tiny_stepvideo

T5 = {
    "model_type": "t5", "d_model": 16, "d_ff": 32, "d_kv": 8, "num_heads": 2, "num_layers": 2,
    "vocab_size": 40, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
}  # fmt: skip
TEXT = {"caption_channels": 16, "model_max_length": 24}
UNET = {
    "block_out_channels": [32, 64], "layers_per_block": 1, "num_frames": 4,
    "down_block_types": ["CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"],
    "up_block_types": ["UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"],
    "cross_attention_dim": 16, "num_attention_heads": 2,
    "projection_class_embeddings_input_dim": 24, "addition_time_embed_dim": 8,
}  # fmt: skip
CLIP = {
    "hidden_size": 32, "projection_dim": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 56, "intermediate_size": 37, "patch_size": 14,
}  # fmt: skip


def nowhere(*components: str) -> dict[str, ComponentSource]:
    """Sources of these components, which are on no disk."""
    return dict.fromkeys(components, ComponentSource("nowhere", None))


def opensora(version: str, *, options: OpenSoraOptions | None = None, **sizes: Any) -> Any:
    """An Open-Sora of that version; `sizes` are the denoiser's."""
    tiny_sizes = {"hidden_size": 32, "depth": 2, "num_heads": 2, **TEXT, **sizes}
    spatial = ImageVAEConfig(autoencoder=tiny_opensora.AUTOENCODER)
    if version == "1.0":
        config: Any = STDiTConfig.from_json({"input_size": [16, 4, 4], **tiny_sizes})
        vae: Any = spatial
    else:
        config = STDiT3Config.from_json(tiny_sizes)
        vae = VideoVAEConfig.from_json(
            {
                "vae_2d": {"config": tiny_opensora.AUTOENCODER},
                "vae_temporal": {"type": "VAE_Temporal_SD", **tiny_opensora.TEMPORAL},
            }
        )
    files = OpenSoraFiles(nowhere(*OpenSoraFiles.table), version)
    builder = OpenSoraBuilder(OpenSoraConfig(version, config, vae, T5, square=32))
    return OpenSoraSpec(
        "small", f"Open-Sora {version}", options or OpenSoraOptions(), files, builder
    )


def opensora2(*, is_deep: bool = False, first: bool = False) -> Any:
    """An Open-Sora 2.0, with the DC-AE or with FLUX before it."""
    config = OpenSora2Config(
        tiny_opensora2.DEEP if is_deep else tiny_opensora2.VIDEO,
        tiny_opensora2.DCAE if is_deep else tiny_opensora2.HUNYUAN,
        T5,
        {**tiny_opensora2.CLIP_TEXT, "vocab_size": 40, "bos_token_id": 1, "eos_token_id": 2},
        tiny_opensora2.FIRST if first else None,
        tiny_opensora2.FIRST_VAE if first else {},
    )
    files = OpenSora2Files(nowhere(*OpenSora2Files.table))
    options = OpenSora2Options(first_frame="flux" if first else None)
    return OpenSora2Spec("small", "Open-Sora 2.0", options, files, OpenSora2Builder(config))


def svd(*, options: SVDOptions | None = None, **changes: Any) -> Any:
    """A Stable Video Diffusion; `changes` are whole configs of parts."""
    vae = {
        **released_svd()["vae"], "block_out_channels": [32, 32, 32, 32], "layers_per_block": 1,
    }  # fmt: skip
    configs = {
        **released_svd(),
        "unet": {**released_svd()["unet"], **UNET},
        "vae": vae,
        "image_encoder": CLIP,
    }
    config = SVDConfig.from_json("small", {**configs, **changes})
    files = SVDFiles(nowhere(*SVDFiles.table), "nowhere")
    return SVDSpec("small", "SVD", options or SVDOptions(), files, SVDBuilder(config))


def inpaint(channels: int, *, options: InpaintOptions | None = None) -> Any:
    """ControlNet inpainting with a UNet of 9 or of 4 channels."""
    shared = {
        "block_out_channels": [32, 64], "layers_per_block": 1, "cross_attention_dim": 32,
        "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"], "attention_head_dim": 4,
    }  # fmt: skip
    configs = {name: dict(config) for name, config in released(channels).items()}
    configs["unet"] |= {**shared, "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"]}
    configs["vae"] |= {"block_out_channels": [32, 32, 32, 32], "layers_per_block": 1}
    configs["text_encoder"] |= {
        "hidden_size": 32, "intermediate_size": 37, "num_attention_heads": 4,
        "num_hidden_layers": 2, "vocab_size": 60, "max_position_embeddings": 12,
    }  # fmt: skip
    net = {**shared, "conditioning_embedding_out_channels": [16, 16, 16, 16]}
    config = InpaintConfig.from_json("small", configs, (("net", net),))
    files = InpaintFiles(nowhere(*InpaintFiles.table, "controlnet"), "nowhere")
    return InpaintSpec(
        "small", "inpaint", options or InpaintOptions(), files, InpaintBuilder(config)
    )


def stepvideo(*, options: StepVideoOptions | None = None, **sizes: Any) -> Any:
    """A Step-Video; `sizes` are the denoiser's."""
    denoiser = StepVideoModelConfig.from_json({**tiny_stepvideo.DENOISER, **sizes})
    llm = StepLLMConfig.from_json(tiny_stepvideo.LLM)
    builder = StepVideoBuilder(
        StepVideoConfig(denoiser, llm, tiny_stepvideo.CLIP, tiny_stepvideo.VAE)
    )
    files = StepVideoFiles(nowhere(*StepVideoFiles.table), False)
    return StepVideoSpec("small", "Step-Video", options or StepVideoOptions(), files, builder)


def settings(
    height: int = 64, width: int = 64, num_frames: int = 17, guidance: float = 3.0, **more: Any
) -> Settings:
    """Settings with every option that a family here asks for."""
    options = {
        "motion_bucket_id": 127, "noise_aug_strength": 0.02, "min_guidance_scale": 1.0,
        "max_guidance_scale": guidance, "decode_chunk_size": num_frames, "fit": "crop",
        "strength": 1.0, "frames_at_once": 2, "guess_mode": False,
        "time_shift": 13.0, "pos_magic": "", "llm_bias": "sqrt",
        "motion_score": 4.0, "image_guidance_scale": 3.0, "text_oscillation": True,
        "image_oscillation": True, "image_fading": True, "flow_shift": None, "given_clip": 0,
        "clip_at": "head", "first_frame": None,
        **more.pop("options", {}),
    }  # fmt: skip
    return Settings(
        "a", None, height, width, num_frames, 24.0, 4, guidance, 0,
        options=tuple(options.items()), **more,
    )  # fmt: skip


def all_models() -> dict[str, Any]:
    """Every family and version by a name for a test."""
    return {
        "opensora-1.0": opensora("1.0"),
        "opensora-1.2": opensora("1.2"),
        "opensora2": opensora2(first=True),
        "opensora2-dcae": opensora2(is_deep=True),
        "svd": svd(),
        "inpaint-9": inpaint(9),
        "inpaint-4": inpaint(4),
        "stepvideo": stepvideo(),
    }
