"""A tiny random ControlNet inpainting pipeline, written to disk by diffusers' `save_pretrained`.

Four levels in the autoencoder, as in the released one, so a latent is 8 pixels; two in the UNet.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
from diffusers import AutoencoderKL, ControlNetModel, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from helpers.tiny_checkpoints import opensora as tiny_opensora

#: What Stable Diffusion 1.5 was saved with; every scheduler takes what it knows of it.
NOISE: dict[str, Any] = {
    "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear",
    "num_train_timesteps": 1000,
}  # fmt: skip
WORDS = ("a", "red", "blue", "ball", "dog", "grey", "street")


def inpaint(
    folder: Path, *, seed: int = 0, channels: int = 9, num_controlnets: int = 1, **controlnet: Any
) -> Path:
    """A folder with a whole pipeline, and ``controlnet_1`` … beside it for more than one."""
    sizes: dict[str, Any] = {
        "block_out_channels": (32, 64), "layers_per_block": 1, "cross_attention_dim": 16,
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "attention_head_dim": 4,
    }  # fmt: skip
    unet = UNet2DConditionModel(
        **sizes, sample_size=32, in_channels=channels, out_channels=4,
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    vae = AutoencoderKL(
        block_out_channels=(32, 32, 32, 32), latent_channels=4, layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
    )  # fmt: skip
    nets = [
        ControlNetModel(**sizes, conditioning_embedding_out_channels=(16, 16, 16, 16), **controlnet)
        for _ in range(num_controlnets)
    ]
    words = tokenizer(folder / "tokenizer")
    text = CLIPTextModel(
        CLIPTextConfig(
            hidden_size=16, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4,
            vocab_size=len(words), max_position_embeddings=12, bos_token_id=0, eos_token_id=1,
            pad_token_id=1,
        )
    )  # fmt: skip
    for number, module in enumerate((unet, vae, text, *nets)):
        tiny_opensora.randomise(module, seed + number)
    diffusers.StableDiffusionControlNetInpaintPipeline(
        vae=vae, text_encoder=text, tokenizer=words, unet=unet, controlnet=nets[0],
        scheduler=diffusers.PNDMScheduler(**NOISE, skip_prk_steps=True, steps_offset=1),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    ).save_pretrained(folder)  # fmt: skip
    for number, net in enumerate(nets[1:], start=1):
        net.save_pretrained(folder / f"controlnet_{number}")
    return folder


def tokenizer(folder: Path) -> CLIPTokenizer:
    """A tokenizer of single letters and a few words, in CLIP's own two files."""
    folder.mkdir(parents=True)
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    merges = [f"{word[:i]} {word[i]}" for word in WORDS for i in range(1, len(word))]
    whole = [line.replace(" ", "") for line in merges]
    names = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{c}</w>" for c in letters), *whole]
    vocabulary = {name: number for number, name in enumerate(dict.fromkeys(names))}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *dict.fromkeys(merges)]))
    return CLIPTokenizer.from_pretrained(str(folder), model_max_length=12)


def with_scheduler(folder: Path, name: str, **changed: Any) -> None:
    """Give the pipeline in `folder` that scheduler of diffusers."""
    kind = getattr(diffusers, name)
    kind(**NOISE, **changed).save_pretrained(folder / "scheduler")
    index = json.loads((folder / "model_index.json").read_text())
    index["scheduler"] = ["diffusers", name]
    (folder / "model_index.json").write_text(json.dumps(index))
