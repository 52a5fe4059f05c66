"""A tiny Stable Video Diffusion in one file, as Stability-AI/generative-models stores it.

It is made from a diffusers folder by walking its modules and naming each tensor as that code does
(`VideoUNet`, `AutoencodingEngine` or `AutoencoderKL`, `GeneralConditioner` with open_clip's ViT).
It is independent of our key map, which goes the other way.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]

_NORMS_AND_CONVOLUTIONS = {
    "norm1": "in_layers.0", "conv1": "in_layers.2", "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0", "conv2": "out_layers.3", "conv_shortcut": "skip_connection",
}  # fmt: skip


def write(folder: Path, file: Path, dtype: torch.dtype = torch.float32) -> Path:
    """The diffusers model in `folder` as one file."""
    made = {
        **{f"model.diffusion_model.{n}": t for n, t in _denoiser(_load(folder, "unet")).items()},
        **_autoencoder(_load(folder, "vae")),
        **_clip(_load(folder, "image_encoder", "model")),
    }
    save_file({name: tensor.to(dtype).contiguous() for name, tensor in made.items()}, file)
    return file


def _load(folder: Path, part: str, name: str = "diffusion_pytorch_model") -> Tensors:
    return load_file(folder / part / f"{name}.safetensors")


class _Mover:
    """Takes tensors out of one dict and puts them into another under new prefixes."""

    def __init__(self, tensors: Tensors) -> None:
        self.left = dict(tensors)
        self.made: Tensors = {}

    def has(self, prefix: str) -> bool:
        return any(name.startswith(f"{prefix}.") for name in self.left)

    def move(self, old: str, new: str) -> None:
        names = [name for name in self.left if name == old or name.startswith(f"{old}.")]
        assert names, old
        for name in names:
            self.made[new + name[len(old) :]] = self.left.pop(name)

    def done(self) -> Tensors:
        assert not self.left, sorted(self.left)
        return self.made


def _denoiser(tensors: Tensors) -> Tensors:
    mover = _Mover(tensors)
    for old, new in {
        "conv_in": "input_blocks.0.0", "conv_norm_out": "out.0", "conv_out": "out.2",
        "time_embedding.linear_1": "time_embed.0", "time_embedding.linear_2": "time_embed.2",
        "add_embedding.linear_1": "label_emb.0.0", "add_embedding.linear_2": "label_emb.0.2",
    }.items():  # fmt: skip
        mover.move(old, new)
    count, num_levels = 1, 0
    while mover.has(f"down_blocks.{num_levels}"):
        block, layer = f"down_blocks.{num_levels}", 0
        while mover.has(f"{block}.resnets.{layer}"):
            _layer(mover, block, layer, f"input_blocks.{count}")
            count, layer = count + 1, layer + 1
        if mover.has(f"{block}.downsamplers"):
            mover.move(f"{block}.downsamplers.0.conv", f"input_blocks.{count}.0.op")
            count += 1
        num_levels += 1
    _resnet(mover, "mid_block.resnets.0", "middle_block.0")
    _attention(mover, "mid_block.attentions.0", "middle_block.1")
    _resnet(mover, "mid_block.resnets.1", "middle_block.2")
    count = 0
    for level in range(num_levels):
        block, layer = f"up_blocks.{level}", 0
        while mover.has(f"{block}.resnets.{layer}"):
            children = _layer(mover, block, layer, f"output_blocks.{count}")
            count, layer = count + 1, layer + 1
        if mover.has(f"{block}.upsamplers"):
            place = f"output_blocks.{count - 1}.{children}.conv"
            mover.move(f"{block}.upsamplers.0.conv", place)
    return mover.done()


def _layer(mover: _Mover, block: str, layer: int, new: str) -> int:
    """How many children the new block has."""
    _resnet(mover, f"{block}.resnets.{layer}", f"{new}.0")
    if not mover.has(f"{block}.attentions.{layer}"):
        return 1
    _attention(mover, f"{block}.attentions.{layer}", f"{new}.1")
    return 2


def _resnet(mover: _Mover, old: str, new: str) -> None:
    for kind, place in (("spatial_res_block", new), ("temporal_res_block", f"{new}.time_stack")):
        for name, index in _NORMS_AND_CONVOLUTIONS.items():
            if mover.has(f"{old}.{kind}.{name}"):
                mover.move(f"{old}.{kind}.{name}", f"{place}.{index}")
    mover.move(f"{old}.time_mixer", f"{new}.time_mixer")


def _attention(mover: _Mover, old: str, new: str) -> None:
    mover.move(f"{old}.temporal_transformer_blocks", f"{new}.time_stack")
    mover.move(f"{old}.time_pos_embed.linear_1", f"{new}.time_pos_embed.0")
    mover.move(f"{old}.time_pos_embed.linear_2", f"{new}.time_pos_embed.2")
    mover.move(old, new)


def _autoencoder(tensors: Tensors) -> Tensors:
    mover = _Mover(tensors)
    picture, video = "conditioner.embedders.3.encoder", "first_stage_model"
    mover.move("quant_conv", f"{picture}.quant_conv")
    temporal = mover.has("decoder.time_conv_out")
    if temporal:
        mover.move("decoder.time_conv_out", f"{video}.decoder.conv_out.time_mix_conv")
    else:
        mover.move("post_quant_conv", f"{video}.post_quant_conv")
    for old, new in (("encoder", f"{picture}.encoder"), ("decoder", f"{video}.decoder")):
        mover.move(f"{old}.conv_in", f"{new}.conv_in")
        mover.move(f"{old}.conv_out", f"{new}.conv_out")
        mover.move(f"{old}.conv_norm_out", f"{new}.norm_out")
        in_time = temporal and old == "decoder"
        for number in (0, 1):
            place = f"{new}.mid.block_{number + 1}"
            _vae_resnet(mover, f"{old}.mid_block.resnets.{number}", place, in_time)
        attention = f"{old}.mid_block.attentions.0"
        for name, letter in {"to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}.items():
            kernel = f"{attention}.{name}.weight"
            mover.left[kernel] = mover.left[kernel][:, :, None, None]
            mover.move(f"{attention}.{name}", f"{new}.mid.attn_1.{letter}")
        mover.move(f"{attention}.group_norm", f"{new}.mid.attn_1.norm")
    for level in range(4):
        _vae_level(mover, "encoder.down_blocks", level, f"{picture}.encoder.down.{level}", False)
        _vae_level(mover, "decoder.up_blocks", level, f"{video}.decoder.up.{3 - level}", temporal)
    # Halves that lie in the real files and that nobody asks for.
    mover.made[f"{picture}.decoder.conv_in.weight"] = torch.zeros(3)
    mover.made[f"{picture}.post_quant_conv.weight"] = torch.zeros(3)
    mover.made[f"{video}.encoder.conv_in.weight"] = torch.zeros(3)
    return mover.done()


def _vae_level(mover: _Mover, blocks: str, level: int, new: str, in_time: bool) -> None:
    layer = 0
    while mover.has(f"{blocks}.{level}.resnets.{layer}"):
        _vae_resnet(mover, f"{blocks}.{level}.resnets.{layer}", f"{new}.block.{layer}", in_time)
        layer += 1
    for sampler in ("downsample", "upsample"):
        if mover.has(f"{blocks}.{level}.{sampler}rs"):
            mover.move(f"{blocks}.{level}.{sampler}rs.0", f"{new}.{sampler}")


def _vae_resnet(mover: _Mover, old: str, new: str, in_time: bool) -> None:
    if in_time:
        mover.move(f"{old}.time_mixer.mix_factor", f"{new}.mix_factor")
        for name, index in _NORMS_AND_CONVOLUTIONS.items():
            if mover.has(f"{old}.temporal_res_block.{name}"):
                mover.move(f"{old}.temporal_res_block.{name}", f"{new}.time_stack.{index}")
        old = f"{old}.spatial_res_block"
    if mover.has(f"{old}.conv_shortcut"):
        mover.move(f"{old}.conv_shortcut", f"{new}.nin_shortcut")
    mover.move(old, new)


def _clip(tensors: Tensors) -> Tensors:
    mover = _Mover(tensors)
    new = "conditioner.embedders.0.open_clip.model.visual"
    old = "vision_model"
    mover.left["visual_projection.weight"] = mover.left["visual_projection.weight"].T
    for name, moved in {
        "visual_projection.weight": "proj",
        f"{old}.embeddings.class_embedding": "class_embedding",
        f"{old}.embeddings.position_embedding.weight": "positional_embedding",
        f"{old}.embeddings.patch_embedding": "conv1",
        f"{old}.pre_layrnorm": "ln_pre",
        f"{old}.post_layernorm": "ln_post",
    }.items():
        mover.move(name, f"{new}.{moved}")
    number = 0
    while mover.has(f"{old}.encoder.layers.{number}"):
        layer, block = f"{old}.encoder.layers.{number}", f"{new}.transformer.resblocks.{number}"
        for kind in ("weight", "bias"):
            three = [mover.left.pop(f"{layer}.self_attn.{letter}_proj.{kind}") for letter in "qkv"]
            mover.made[f"{block}.attn.in_proj_{kind}"] = torch.cat(three)
        mover.move(f"{layer}.self_attn.out_proj", f"{block}.attn.out_proj")
        mover.move(f"{layer}.layer_norm1", f"{block}.ln_1")
        mover.move(f"{layer}.layer_norm2", f"{block}.ln_2")
        mover.move(f"{layer}.mlp.fc1", f"{block}.mlp.c_fc")
        mover.move(f"{layer}.mlp.fc2", f"{block}.mlp.c_proj")
        number += 1
    text: dict[str, Any] = {"logit_scale": (), "text_projection": (2, 2), "ln_final.bias": (2,)}
    for name, shape in text.items():
        mover.made[f"conditioner.embedders.0.open_clip.model.{name}"] = torch.zeros(shape)
    return mover.done()
