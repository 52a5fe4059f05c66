"""Tiny autoencoders and text encoders, with their tensors under other programs' names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from helpers.loras import files as lora_files
from helpers.loras.original_names import ORIGINAL
from helpers.tiny_checkpoints import pipeline_components
from helpers.tiny_checkpoints.diffusers import wan as tiny_wan

State = dict[str, Tensor]


def _wan_vae() -> Any:
    """Wan 2.1's, with as many levels and layers as the released one."""
    return pipeline_components.made(
        diffusers.AutoencoderKLWan(
            base_dim=3, z_dim=4, dim_mult=[1, 2, 4, 4], num_res_blocks=2,
            temperal_downsample=[False, True, True], latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
        )
    )  # fmt: skip


def _wan22_vae() -> Any:
    return tiny_wan.vae(
        z_dim=48, in_channels=12, out_channels=12, is_residual=True, patch_size=2,
        latents_mean=[0.0] * 48, latents_std=[1.0] * 48, scale_factor_spatial=16,
        scale_factor_temporal=4,
    )  # fmt: skip


def _ltx_vae(**more: Any) -> Any:
    sizes = {
        "latent_channels": 8, "block_out_channels": (4, 8, 8, 8),
        "decoder_block_out_channels": (4, 8, 8, 8), "layers_per_block": (1, 1, 1, 1, 1),
        "decoder_layers_per_block": (1, 1, 1, 1, 1),
        "spatio_temporal_scaling": (True, True, True, False),
        "decoder_spatio_temporal_scaling": (True, True, True, False),
        "decoder_inject_noise": (False,) * 5, "upsample_residual": (False,) * 4,
        "upsample_factor": (1,) * 4, "timestep_conditioning": False, "patch_size": 1,
        "patch_size_t": 1, "encoder_causal": True, "decoder_causal": False,
    }  # fmt: skip
    return pipeline_components.made(diffusers.AutoencoderKLLTXVideo(**{**sizes, **more}))


@cache
def module(name: str) -> nn.Module:
    """A tiny component in float32; not to be changed."""
    if name in ("wan", "wan_of_a_picture", "ltx", "hunyuan", "cogvideox", "mochi"):
        return lora_files.denoiser(name)
    makers: Mapping[str, Callable[[], Any]] = {
        "wan_vae": _wan_vae,
        "wan22_vae": _wan22_vae,
        "ltx_vae": _ltx_vae,
        "hunyuan_vae": lambda: pipeline_components.hunyuan_parts()["vae"],
        "umt5": tiny_wan.umt5,
        "umt5_llama_cpp": tiny_wan.umt5,
        "llama": lambda: pipeline_components.hunyuan_parts()["text_encoder"],
        "clip": lambda: pipeline_components.hunyuan_parts()["text_encoder_2"],
    }
    made: nn.Module = makers[name]()
    return made


def state_of(name: str) -> State:
    """Its parameters and persistent buffers, tied ones under their first name alone."""
    once: dict[int, str] = {}
    state = module(name).state_dict(keep_vars=True)
    for key, each in state.items():
        once.setdefault(id(each), key)
    return {key: state[key].detach() for key in once.values()}


def _renamed(state: Mapping[str, Tensor], rules: tuple[tuple[str, str], ...]) -> State:
    found = {}
    for key, each in state.items():
        for pattern, replacement in rules:
            key = re.sub(pattern, replacement, key)
        found[key] = each
    return found


_WAN_RESNET = (
    (r"\.norm1\.gamma$", ".residual.0.gamma"), (r"\.conv1\.(?=weight|bias)", ".residual.2."),
    (r"\.norm2\.gamma$", ".residual.3.gamma"), (r"\.conv2\.(?=weight|bias)", ".residual.6."),
    (r"\.conv_shortcut\.", ".shortcut."),
)  # fmt: skip
_WAN_ENDS = (
    (r"^(en|de)coder\.conv_in\.", r"\1coder.conv1."),
    (r"^(en|de)coder\.norm_out\.", r"\1coder.head.0."),
    (r"^(en|de)coder\.conv_out\.", r"\1coder.head.2."),
    (r"\.mid_block\.resnets\.0\.", ".middle.0."), (r"\.mid_block\.resnets\.1\.", ".middle.2."),
    (r"\.mid_block\.attentions\.0\.", ".middle.1."),
)  # fmt: skip
_WAN_QUANT = ((r"^quant_conv\.", "conv1."), (r"^post_quant_conv\.", "conv2."))


def wan_vae(state: Mapping[str, Tensor]) -> State:
    """Wan 2.1's names; four modules a level of the decoder, the last an upsampler."""
    found = {}
    rules = (*_WAN_RESNET, *_WAN_ENDS, (r"^encoder\.down_blocks\.", "encoder.downsamples."))
    for key, each in _renamed(state, rules).items():
        match = re.fullmatch(r"decoder\.up_blocks\.(\d)\.(resnets|upsamplers)\.(\d)\.(.*)", key)
        if match:
            place = 4 * int(match[1]) + (int(match[3]) if match[2] == "resnets" else 3)
            key = f"decoder.upsamples.{place}.{match[4]}"
        found[key] = each
    return _renamed(found, _WAN_QUANT)


def wan22_vae(state: Mapping[str, Tensor]) -> State:
    """Wan 2.2's names: each level is a module, of one layer in this encoder."""
    rules = (
        *_WAN_RESNET,
        *_WAN_ENDS,
        (
            r"^encoder\.down_blocks\.(\d)\.resnets\.(\d)\.",
            r"encoder.downsamples.\1.downsamples.\2.",
        ),
        (r"^encoder\.down_blocks\.(\d)\.downsampler\.", r"encoder.downsamples.\1.downsamples.1."),
        (r"^decoder\.up_blocks\.(\d)\.resnets\.(\d)\.", r"decoder.upsamples.\1.upsamples.\2."),
        (r"^decoder\.up_blocks\.(\d)\.upsampler\.", r"decoder.upsamples.\1.upsamples.2."),
    )
    return _renamed(_renamed(state, rules), _WAN_QUANT)


def ltx_vae(state: Mapping[str, Tensor]) -> State:
    """Names of LTX-Video 0.9: samplers and layers that widen are blocks of their own."""
    down = ("0", "1", None), ("3", "4", None), ("6", "7", None), ("8", None, None)
    rules: list[tuple[str, str]] = [
        (r"^latents_mean$", "per_channel_statistics.mean-of-means"),
        (r"^latents_std$", "per_channel_statistics.std-of-means"),
    ]
    outs = {0: "2", 1: "5"}
    for level, (own, sampler, _) in enumerate(down):
        rules += [
            (rf"^encoder\.down_blocks\.{level}\.resnets\.", f"encoder.DOWN.{own}.res_blocks."),
            (rf"^encoder\.down_blocks\.{level}\.downsamplers\.0\.", f"encoder.DOWN.{sampler}."),
            (rf"^encoder\.down_blocks\.{level}\.conv_out\.", f"encoder.DOWN.{outs.get(level)}."),
        ]
    rules += [(r"^encoder\.mid_block\.resnets\.", "encoder.DOWN.9.res_blocks.")]
    up = {0: ("1", None, None), 1: ("3", "2", None), 2: ("6", "5", "4"), 3: ("9", "8", "7")}
    for level, (own, sampler, wide) in up.items():
        rules += [
            (rf"^decoder\.up_blocks\.{level}\.resnets\.", f"decoder.UP.{own}.res_blocks."),
            (rf"^decoder\.up_blocks\.{level}\.upsamplers\.0\.", f"decoder.UP.{sampler}."),
            (rf"^decoder\.up_blocks\.{level}\.conv_in\.", f"decoder.UP.{wide}."),
        ]
    rules += [
        (r"^decoder\.mid_block\.resnets\.", "decoder.UP.0.res_blocks."),
        (r"\.conv_shortcut\.conv\.", ".conv_shortcut."),
        (r"\.norm3\.", ".norm3.norm."),
        ("DOWN", "down_blocks"),
        ("UP", "up_blocks"),
    ]
    return _renamed(state, tuple(rules))


def hunyuan_vae(state: Mapping[str, Tensor]) -> State:
    """CompVis' names in ComfyUI's file; attention has kernels of one position."""
    found = _renamed(
        state,
        (
            (r"^(en|de)coder\.conv_norm_out\.", r"\1coder.norm_out."),
            (r"\.mid_block\.resnets\.0\.", ".mid.block_1."),
            (r"\.mid_block\.resnets\.1\.", ".mid.block_2."),
            (r"\.mid_block\.attentions\.0\.group_norm\.", ".mid.attn_1.norm."),
            (r"\.mid_block\.attentions\.0\.to_(q|k|v)\.", r".mid.attn_1.\1.conv."),
            (r"\.mid_block\.attentions\.0\.to_out\.0\.", ".mid.attn_1.proj_out.conv."),
            (r"\.conv_shortcut\.", ".nin_shortcut."),
            (r"\.down_blocks\.(\d)\.resnets\.", r".down.\1.block."),
            (r"\.down_blocks\.(\d)\.downsamplers\.0\.", r".down.\1.downsample."),
            *((rf"\.up_blocks\.{n}\.resnets\.", rf".up.{3 - n}.block.") for n in range(4)),
            *((rf"\.up_blocks\.{n}\.upsamplers\.0\.", rf".up.{3 - n}.upsample.") for n in range(4)),
        ),
    )
    return {
        key: each[:, :, None, None, None] if re.search(r"attn_1.*conv\.weight", key) else each
        for key, each in found.items()
    }


_FEED = r"\.layer\.1\.DenseReluDense\."


def umt5(state: Mapping[str, Tensor]) -> State:
    """Names of Wan's own file, `wan/modules/t5.py`."""
    return _renamed(
        state,
        (
            (r"^shared\.", "token_embedding."), (r"^encoder\.final_layer_norm\.", "norm."),
            (r"^encoder\.block\.", "blocks."),
            (r"\.layer\.0\.SelfAttention\.(q|k|v|o)\.", r".attn.\1."),
            (r"\.layer\.0\.SelfAttention\.relative_attention_bias\.", ".pos_embedding.embedding."),
            (r"\.layer\.0\.layer_norm\.", ".norm1."), (r"\.layer\.1\.layer_norm\.", ".norm2."),
            (_FEED + r"wi_0\.", ".ffn.gate.0."), (_FEED + r"wi_1\.", ".ffn.fc1."),
            (_FEED + r"wo\.", ".ffn.fc2."),
        ),
    )  # fmt: skip


def umt5_llama_cpp(state: Mapping[str, Tensor]) -> State:
    """llama.cpp's names."""
    return _renamed(
        state,
        (
            (r"^shared\.", "token_embd."), (r"^encoder\.final_layer_norm\.", "enc.output_norm."),
            (r"^encoder\.block\.", "enc.blk."),
            (r"\.layer\.0\.SelfAttention\.(q|k|v|o)\.", r".attn_\1."),
            (r"\.layer\.0\.SelfAttention\.relative_attention_bias\.", ".attn_rel_b."),
            (r"\.layer\.0\.layer_norm\.", ".attn_norm."),
            (r"\.layer\.1\.layer_norm\.", ".ffn_norm."),
            (_FEED + r"wi_0\.", ".ffn_gate."), (_FEED + r"wi_1\.", ".ffn_up."),
            (_FEED + r"wo\.", ".ffn_down."),
        ),
    )  # fmt: skip


def llama(state: Mapping[str, Tensor]) -> State:
    """llama.cpp's names and its order of rows, for four heads of each kind."""
    found = _renamed(
        state,
        (
            (r"^embed_tokens\.", "token_embd."), (r"^norm\.", "output_norm."),
            (r"^layers\.", "blk."), (r"\.input_layernorm\.", ".attn_norm."),
            (r"\.post_attention_layernorm\.", ".ffn_norm."),
            (r"\.self_attn\.(q|k|v)_proj\.", r".attn_\1."),
            (r"\.self_attn\.o_proj\.", ".attn_output."),
            (r"\.mlp\.(gate|up|down)_proj\.", r".ffn_\1."),
        ),
    )  # fmt: skip
    for key, each in found.items():
        if re.search(r"attn_(q|k)\.weight", key):  # as `convert_hf_to_gguf.py` permutes
            heads = each.reshape(4, 2, len(each) // 8, *each.shape[1:])
            found[key] = heads.swapaxes(1, 2).reshape(each.shape)
    return found


def clip(state: Mapping[str, Tensor]) -> State:
    """transformers' older names."""
    return {f"text_model.{key}": each for key, each in state.items()}


OTHER_NAMES: Mapping[str, Callable[[Mapping[str, Tensor]], State]] = {
    **{name: ORIGINAL[name.split("_")[0]] for name in (
        "wan", "wan_of_a_picture", "ltx", "hunyuan", "cogvideox", "mochi",
    )},
    "wan_vae": wan_vae, "wan22_vae": wan22_vae, "ltx_vae": ltx_vae, "hunyuan_vae": hunyuan_vae,
    "umt5": umt5, "umt5_llama_cpp": umt5_llama_cpp, "llama": llama, "clip": clip,
}  # fmt: skip


def original_state(name: str) -> State:
    """Its tensors by the names of its authors' or another program's file."""
    return {key: each.contiguous() for key, each in OTHER_NAMES[name](state_of(name)).items()}


def wide(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in float64."""
    return {key: each.to(torch.float64) for key, each in state.items()}
