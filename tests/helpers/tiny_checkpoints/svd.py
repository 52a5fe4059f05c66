"""A tiny random Stable Video Diffusion, written to disk by diffusers' own `save_pretrained`.

Four levels in the autoencoder, as in the released one, so a latent is 8 pixels; two in the UNet.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diffusers import (
    AutoencoderKL,
    AutoencoderKLTemporalDecoder,
    EulerDiscreteScheduler,
    StableVideoDiffusionPipeline,
    UNetSpatioTemporalConditionModel,
)
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModelWithProjection

from helpers.tiny_checkpoints import opensora as tiny_opensora

#: What the released models were saved with.
SCHEDULER: dict[str, Any] = {
    "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear",
    "interpolation_type": "linear", "num_train_timesteps": 1000, "steps_offset": 1,
    "prediction_type": "v_prediction", "sigma_max": 700.0, "sigma_min": 0.002,
    "timestep_spacing": "leading", "timestep_type": "continuous", "use_karras_sigmas": True,
}  # fmt: skip


def svd(
    folder: Path,
    *,
    seed: int = 0,
    num_frames: int = 4,
    image_vae: bool = False,
    heads_as_released: bool = False,
) -> Path:
    """A folder with a whole pipeline; `image_vae` for a decoder of single pictures.

    `heads_as_released` gives attention heads the released widths, 64 and in CLIP 80, and the
    autoencoder as many layers as Stability's can have.
    """
    wide = heads_as_released
    unet = UNetSpatioTemporalConditionModel(
        block_out_channels=(64, 128) if wide else (32, 64), layers_per_block=1,
        sample_size=32, num_frames=num_frames,
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        cross_attention_dim=16, num_attention_heads=(1, 2) if wide else 2,
        projection_class_embeddings_input_dim=24, addition_time_embed_dim=8,
    )  # fmt: skip
    sizes: dict[str, Any] = {
        "block_out_channels": (32, 32, 32, 32), "latent_channels": 4,
        "layers_per_block": 2 if wide else 1,
        "down_block_types": ("DownEncoderBlock2D",) * 4,
    }  # fmt: skip
    if image_vae:
        vae = AutoencoderKL(**sizes, up_block_types=("UpDecoderBlock2D",) * 4)
    else:
        vae = AutoencoderKLTemporalDecoder(**sizes)
    encoder = CLIPVisionModelWithProjection(
        CLIPVisionConfig(
            hidden_size=160 if wide else 32, projection_dim=16, num_hidden_layers=2,
            num_attention_heads=2 if wide else 4, image_size=224, intermediate_size=37,
            patch_size=56, hidden_act="gelu" if wide else "quick_gelu",
        )
    )  # fmt: skip
    for number, module in enumerate((unet, vae, encoder)):
        tiny_opensora.randomise(module, seed + number)
    StableVideoDiffusionPipeline(
        vae=vae,
        image_encoder=encoder,
        unet=unet,
        scheduler=EulerDiscreteScheduler(**SCHEDULER),
        feature_extractor=CLIPImageProcessor(crop_size=224, size=224),
    ).save_pretrained(folder)
    return folder
