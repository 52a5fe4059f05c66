"""Tiny checkpoints of Cosmos, with stand-ins for Nvidia's content checks.

Cosmos 1 to 2.5 need the packages cosmos_guardrail, whose models are gated, and torchvision, for one
resampling of a mask. Within `with_packages` a guard that accepts everything and torch's own
resampling replace them.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import diffusers
import torch
import torch.nn.functional as F
from torch import nn

from helpers.tiny_checkpoints.diffusers import wan
from helpers.tiny_checkpoints.diffusers.cases import Clip, Still, case
from helpers.tiny_checkpoints.diffusers.hunyuan import qwen_vl
from helpers.tiny_checkpoints.pipeline_components import flow, made, t5, tokenizer
from helpers.tiny_checkpoints.pipelines import SHORT

_HOMES = (
    "cosmos_text2world", "cosmos_video2world", "cosmos2_video2world", "cosmos2_5_predict",
    "cosmos2_5_transfer",
)  # fmt: skip


class _Guard(nn.Module):
    """Lets everything pass."""

    device, dtype = torch.device("cpu"), torch.float32

    def check_text_safety(self, prompt: str) -> bool:
        """Whether a text may be asked for."""
        return bool(prompt) or True

    def check_video_safety(self, frames: Any) -> Any:
        """The frames, with what may not be shown made unrecognisable."""
        return frames

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Itself: it has nothing to be moved."""
        return self


@contextmanager
def with_packages() -> Iterator[None]:
    """Within, both packages seem to be installed."""
    with ExitStack() as stack:
        for name in _HOMES:
            home = importlib.import_module(f"diffusers.pipelines.cosmos.pipeline_{name}")
            stack.enter_context(patch.object(home, "CosmosSafetyChecker", _Guard))
        for name in ("transformers.transformer_cosmos", "controlnets.controlnet_cosmos"):
            home = importlib.import_module(f"diffusers.models.{name}")
            stack.enter_context(patch.object(home, "transforms", _TRANSFORMS, create=True))
        yield


def _resize(mask: torch.Tensor, size: list[int], interpolation: str) -> torch.Tensor:
    return F.interpolate(mask, size=size, mode=interpolation)


_TRANSFORMS = SimpleNamespace(
    functional=SimpleNamespace(resize=_resize), InterpolationMode=SimpleNamespace(NEAREST="nearest")
)


def _transformer(**more: Any) -> Any:
    sizes = {
        "in_channels": 16, "out_channels": 16, "num_attention_heads": 2, "attention_head_dim": 16,
        "num_layers": 2, "mlp_ratio": 2, "text_embed_dim": 32, "adaln_lora_dim": 4,
        "max_size": (8, 32, 32), "patch_size": (1, 2, 2), "rope_scale": (2.0, 1.0, 1.0),
        "concat_padding_mask": True, "extra_pos_embed_type": "learnable",
    }  # fmt: skip
    return made(diffusers.CosmosTransformer3DModel(**{**sizes, **more}))


def _first(cls: Any, **more: Any) -> Any:
    vae = diffusers.AutoencoderKLCosmos(
        latent_channels=16, encoder_block_out_channels=(8, 8, 8, 8), num_layers=1,
        decode_block_out_channels=(8, 8, 8, 8), attention_resolutions=(8,), resolution=64,
        patch_size=4, patch_type="haar", spatial_compression_ratio=4, temporal_compression_ratio=4,
        latents_mean=None, latents_std=None,
    )  # fmt: skip
    return cls(
        transformer=_transformer(in_channels=16 + more.pop("beside", 0)), vae=made(vae),
        text_encoder=t5(), tokenizer=tokenizer(), scheduler=diffusers.EDMEulerScheduler(
            sigma_min=0.002, sigma_max=80, sigma_data=0.5, sigma_schedule="karras",
            num_train_timesteps=1000, prediction_type="epsilon", rho=7.0,
            final_sigmas_type="sigma_min",
        ), safety_checker=_Guard(),
    )  # fmt: skip


@case("CosmosTextToWorldPipeline", size="32x32", num_frames=9, option=SHORT, within=with_packages)
def text_to_world() -> Any:
    """Cosmos 1 of a text."""
    return _first(diffusers.CosmosTextToWorldPipeline)


@case(
    "CosmosVideoToWorldPipeline",
    size="32x32", num_frames=9, option={**SHORT, "video": Clip(5)}, within=with_packages,
)  # fmt: skip
def video_to_world() -> Any:
    """Cosmos 1 of a video, which goes on."""
    return _first(diffusers.CosmosVideoToWorldPipeline, beside=1)


@case(
    "Cosmos2VideoToWorldPipeline",
    size="32x32", num_frames=9, option=SHORT, image=Still(), within=with_packages,
)  # fmt: skip
def second_video_to_world() -> Any:
    """Cosmos 2 of a picture."""
    return diffusers.Cosmos2VideoToWorldPipeline(
        transformer=_transformer(in_channels=17), vae=wan.vae(), text_encoder=t5(),
        tokenizer=tokenizer(), scheduler=flow(use_karras_sigmas=True), safety_checker=_Guard(),
    )  # fmt: skip


def _later(cls: Any, **more: Any) -> Any:
    return cls(
        vae=wan.vae(), text_encoder=qwen_vl(), tokenizer=tokenizer(512),
        scheduler=diffusers.UniPCMultistepScheduler(), safety_checker=_Guard(), **more,
    )  # fmt: skip


@case(
    "Cosmos2_5_PredictBasePipeline",
    size="32x32", num_frames=5, option=SHORT, within=with_packages,
)  # fmt: skip
def predict() -> Any:
    """Cosmos 2.5 of a text."""
    return _later(diffusers.Cosmos2_5_PredictBasePipeline, transformer=_transformer(in_channels=17))


@case(
    "Cosmos2_5_TransferPipeline",
    size="32x32", num_frames=5, within=with_packages,
    option={**SHORT, "controls": Clip(5), "num_frames_per_chunk": 13},
)  # fmt: skip
def transfer() -> Any:
    """Cosmos 2.5, led by a video of edges or depths."""
    seen = {"img_context_dim_in": 32, "img_context_dim_out": 32}
    control = diffusers.CosmosControlNetModel(
        n_controlnet_blocks=2, in_channels=18, latent_channels=18, model_channels=32,
        num_attention_heads=2, attention_head_dim=16, mlp_ratio=2, text_embed_dim=32,
        adaln_lora_dim=4, patch_size=(1, 2, 2), max_size=(4, 32, 32), rope_scale=(2.0, 1.0, 1.0),
        extra_pos_embed_type="learnable", **seen,
    )  # fmt: skip
    return _later(
        diffusers.Cosmos2_5_TransferPipeline,
        transformer=_transformer(
            in_channels=17, controlnet_block_every_n=1, img_context_num_tokens=4, **seen
        ),
        controlnet=made(control),
    )


@case(
    "Cosmos3OmniPipeline",
    size="16x16", num_frames=5,
    option={
        "use_system_prompt": False, "add_resolution_template": False, "enable_safety_check": False,
        "add_duration_template": False,
    },
)  # fmt: skip
def omni() -> Any:
    """Cosmos 3: text and video in one transformer."""
    model = diffusers.Cosmos3OmniTransformer(
        head_dim=6, hidden_size=6, intermediate_size=12, latent_channel=16, latent_patch_size=1,
        num_attention_heads=1, num_hidden_layers=1, num_key_value_heads=1, patch_latent_dim=16,
        rms_norm_eps=1e-5, rope_axes_dim=[1, 1, 1], vocab_size=400, dtype="float32",
    )  # fmt: skip
    words = tokenizer(1024)
    words.add_special_tokens({"additional_special_tokens": ["<|vision_start|>", "<|vision_end|>"]})
    return diffusers.Cosmos3OmniPipeline(
        transformer=made(model).to(torch.float32), text_tokenizer=words, vae=wan.vae(),
        scheduler=diffusers.UniPCMultistepScheduler(), enable_safety_checker=False,
    )  # fmt: skip
