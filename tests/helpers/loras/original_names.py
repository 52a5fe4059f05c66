"""Checkpoints of diffusers' denoisers under their original names, for tests of LoRA names.

They follow upstream's module names, independently of `everyframe.adapters.name_maps`. Each function
takes a state dict with diffusers' names. `tests/adapters/test_weight_sites.py` compares those of
Wan, LTX-Video and HunyuanVideo with diffusers' own converters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

State = dict[str, Tensor]
_Names = tuple[tuple[str, str], ...]


def _renamed(state: Mapping[str, Tensor], names: _Names) -> State:
    found = {}
    for name, tensor in state.items():
        for pattern, replacement in names:
            name = re.sub(pattern, replacement, name)
        found[name] = tensor
    return found


def _joined(state: State, pattern: str, parts: tuple[str, ...], whole: str) -> State:
    """The tensors whose names match `pattern` with each of `parts` in it, one after the other."""
    found = {}
    for name, tensor in state.items():
        match = re.fullmatch(pattern.replace("PART", f"({'|'.join(map(re.escape, parts))})"), name)
        if match is None:
            found[name] = tensor
        elif match["part"] == parts[0]:
            others = [name.replace(f".{parts[0]}.", f".{part}.") for part in parts]
            found[name.replace(f".{parts[0]}.", f".{whole}.")] = torch.cat(
                [state[each] for each in others]
            )
    return found


def wan(state: Mapping[str, Tensor]) -> State:
    """Names of Wan-Video/Wan2.1, `wan/modules/model.py`."""
    return _renamed(
        state,
        (
            (r"^scale_shift_table$", "head.modulation"),
            (r"^proj_out\.", "head.head."),
            (r"^condition_embedder\.time_embedder\.linear_1", "time_embedding.0"),
            (r"^condition_embedder\.time_embedder\.linear_2", "time_embedding.2"),
            (r"^condition_embedder\.text_embedder\.linear_1", "text_embedding.0"),
            (r"^condition_embedder\.text_embedder\.linear_2", "text_embedding.2"),
            (r"^condition_embedder\.time_proj", "time_projection.1"),
            (r"^condition_embedder\.image_embedder\.norm1", "img_emb.proj.0"),
            (r"^condition_embedder\.image_embedder\.ff\.net\.0\.proj", "img_emb.proj.1"),
            (r"^condition_embedder\.image_embedder\.ff\.net\.2", "img_emb.proj.3"),
            (r"^condition_embedder\.image_embedder\.norm2", "img_emb.proj.4"),
            (r"\.scale_shift_table$", ".modulation"),
            (r"\.attn1\.", ".self_attn."),
            (r"\.attn2\.", ".cross_attn."),
            (r"\.to_(q|k|v)\.", r".\1."),
            (r"\.to_out\.0\.", ".o."),
            (r"\.add_(k|v)_proj\.", r".\1_img."),
            (r"\.norm_added_k\.", ".norm_k_img."),
            (r"\.norm2\.", ".norm3."),
            (r"\.ffn\.net\.0\.proj\.", ".ffn.0."),
            (r"\.ffn\.net\.2\.", ".ffn.2."),
        ),
    )


def ltx(state: Mapping[str, Tensor]) -> State:
    """Names of Lightricks/LTX-Video, `ltx_video/models/transformers/transformer3d.py`."""
    return _renamed(
        state,
        (
            (r"^proj_in\.", "patchify_proj."),
            (r"^time_embed\.", "adaln_single."),
            (r"\.norm_(q|k)\.", r".\1_norm."),
        ),
    )


def hunyuan(state: Mapping[str, Tensor]) -> State:
    """Names of Tencent/HunyuanVideo, `hyvideo/modules/models.py`."""
    qkv, added = ("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj")
    state = dict(state)
    for kind in ("weight", "bias"):
        scale, shift = state[f"norm_out.linear.{kind}"].chunk(2)
        state[f"norm_out.linear.{kind}"] = torch.cat([shift, scale])
    for name in [name for name in state if re.search(r"single.*\.proj_mlp\.", name)]:
        state[name.replace("proj_mlp", "attn.proj_mlp")] = state.pop(name)
    state = _joined(state, r"single.*\.attn\.(?P<part>PART)\..*", (*qkv, "proj_mlp"), "linear1")
    state = _joined(state, r"transformer_blocks\..*\.(?P<part>PART)\..*", qkv, "img_attn_qkv")
    state = _joined(state, r"transformer_blocks\..*\.(?P<part>PART)\..*", added, "txt_attn_qkv")
    state = _joined(state, r"context_embedder.*\.(?P<part>PART)\..*", qkv, "self_attn_qkv")
    return _renamed(
        state,
        (
            (r"^norm_out\.linear\.", "final_layer.adaLN_modulation.1."),
            (r"^proj_out\.", "final_layer.linear."),
            (r"^x_embedder\.", "img_in."),
            (r"^context_embedder\.proj_in", "txt_in.input_embedder"),
            (r"^context_embedder\.time_text_embed\.text_embedder", "txt_in.c_embedder"),
            (r"^context_embedder\.time_text_embed\.timestep_embedder", "txt_in.t_embedder"),
            (r"^context_embedder\.token_refiner\.refiner_blocks",
             "txt_in.individual_token_refiner.blocks"),
            (r"^time_text_embed\.text_embedder\.linear_1", "vector_in.in_layer"),
            (r"^time_text_embed\.text_embedder\.linear_2", "vector_in.out_layer"),
            (r"^time_text_embed\.timestep_embedder", "time_in"),
            (r"^time_text_embed\.guidance_embedder", "guidance_in"),
            (r"^(time_in|guidance_in|txt_in\.t_embedder)\.linear_1", r"\1.mlp.0"),
            (r"^(time_in|guidance_in|txt_in\.t_embedder)\.linear_2", r"\1.mlp.2"),
            (r"^(txt_in.*)\.attn\.self_attn_qkv", r"\1.self_attn_qkv"),
            (r"^(txt_in.*)\.attn\.to_out\.0", r"\1.self_attn_proj"),
            (r"^(txt_in.*)\.ff\.net\.0\.proj", r"\1.mlp.fc1"),
            (r"^(txt_in.*)\.ff\.net\.2", r"\1.mlp.fc2"),
            (r"^(txt_in.*)\.norm_out\.linear", r"\1.adaLN_modulation.1"),
            (r"^single_transformer_blocks", "single_blocks"),
            (r"^(single_blocks\.\d+)\.attn\.linear1", r"\1.linear1"),
            (r"^(single_blocks\.\d+)\.proj_out", r"\1.linear2"),
            (r"^(single_blocks\.\d+)\.norm\.linear", r"\1.modulation.linear"),
            (r"^(single_blocks\.\d+)\.attn\.norm_(q|k)", r"\1.\2_norm"),
            (r"^transformer_blocks", "double_blocks"),
            (r"^(double_blocks\.\d+)\.attn\.(img|txt)_attn_qkv", r"\1.\2_attn_qkv"),
            (r"^(double_blocks\.\d+)\.attn\.norm_(q|k)", r"\1.img_attn_\2_norm"),
            (r"^(double_blocks\.\d+)\.attn\.norm_added_(q|k)", r"\1.txt_attn_\2_norm"),
            (r"^(double_blocks\.\d+)\.attn\.to_out\.0", r"\1.img_attn_proj"),
            (r"^(double_blocks\.\d+)\.attn\.to_add_out", r"\1.txt_attn_proj"),
            (r"^(double_blocks\.\d+)\.norm1\.linear", r"\1.img_mod.linear"),
            (r"^(double_blocks\.\d+)\.norm1_context\.linear", r"\1.txt_mod.linear"),
            (r"^(double_blocks\.\d+)\.ff\.net\.0\.proj", r"\1.img_mlp.fc1"),
            (r"^(double_blocks\.\d+)\.ff\.net\.2", r"\1.img_mlp.fc2"),
            (r"^(double_blocks\.\d+)\.ff_context\.net\.0\.proj", r"\1.txt_mlp.fc1"),
            (r"^(double_blocks\.\d+)\.ff_context\.net\.2", r"\1.txt_mlp.fc2"),
        ),
    )  # fmt: skip


def cogvideox(state: Mapping[str, Tensor]) -> State:
    """Names of zai-org/CogVideo's SAT checkpoints, `sat/dit_video_concat.py`."""
    state = dict(state)
    for name in [name for name in state if re.search(r"blocks.*norm1\.linear", name)]:
        one, two = state.pop(name).chunk(2), state.pop(name.replace("norm1", "norm2")).chunk(2)
        state[name.replace("norm1.linear", "adaLN")] = torch.cat([one[0], two[0], one[1], two[1]])
    qkv = ("to_q", "to_k", "to_v")
    state = _joined(state, r"transformer_blocks.*\.(?P<part>PART)\..*", qkv, "query_key_value")
    return _renamed(
        state,
        (
            (r"^time_embedding\.linear_1", "time_embed.0"),
            (r"^time_embedding\.linear_2", "time_embed.2"),
            (r"^patch_embed\.", "mixins.patch_embed."),
            (r"^norm_out\.norm", "mixins.final_layer.norm_final"),
            (r"^norm_out\.linear", "mixins.final_layer.adaLN_modulation.1"),
            (r"^proj_out", "mixins.final_layer.linear"),
            (r"^norm_final", "transformer.final_layernorm"),
            (r"^transformer_blocks\.(\d+)\.adaLN",
             r"mixins.adaln_layer.adaLN_modulations.\1.1"),
            (r"^transformer_blocks\.(\d+)\.attn1\.norm_q",
             r"mixins.adaln_layer.query_layernorm_list.\1"),
            (r"^transformer_blocks\.(\d+)\.attn1\.norm_k",
             r"mixins.adaln_layer.key_layernorm_list.\1"),
            (r"^transformer_blocks", "transformer.layers"),
            (r"\.attn1\.query_key_value", ".attention.query_key_value"),
            (r"\.attn1\.to_out\.0", ".attention.dense"),
            (r"\.ff\.net\.0\.proj", ".mlp.dense_h_to_4h"),
            (r"\.ff\.net\.2", ".mlp.dense_4h_to_h"),
            (r"\.norm1\.norm", ".input_layernorm"),
            (r"\.norm2\.norm", ".post_attention_layernorm"),
        ),
    )  # fmt: skip


def mochi(state: Mapping[str, Tensor]) -> State:
    """Names of genmoai/mochi, `genmo/mochi_preview/dit/joint_model/asymm_models_joint.py`."""
    state = dict(state)
    swapped = r"(ff|ff_context)\.net\.0\.proj|^norm_out\.linear"
    for name in [name for name in state if re.search(swapped, name)]:
        first, second = state[name].chunk(2)
        state[name] = torch.cat([second, first])
    qkv, added = ("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj")
    state = _joined(state, r"transformer_blocks.*\.(?P<part>PART)\..*", qkv, "qkv_x")
    state = _joined(state, r"transformer_blocks.*\.(?P<part>PART)\..*", added, "qkv_y")
    return _renamed(
        state,
        (
            (r"^patch_embed\.", "x_embedder."),
            (r"^time_embed\.timestep_embedder\.linear_1", "t_embedder.mlp.0"),
            (r"^time_embed\.timestep_embedder\.linear_2", "t_embedder.mlp.2"),
            (r"^time_embed\.pooler", "t5_y_embedder"),
            (r"^time_embed\.caption_proj", "t5_yproj"),
            (r"^norm_out\.linear", "final_layer.mod"),
            (r"^proj_out", "final_layer.linear"),
            (r"^transformer_blocks", "blocks"),
            (r"\.norm1\.linear", ".mod_x"),
            (r"\.norm1_context\.linear(_1)?", ".mod_y"),
            (r"\.attn1\.qkv", ".attn.qkv"),
            (r"\.attn1\.norm_added_(q|k)", r".attn.\1_norm_y"),
            (r"\.attn1\.norm_(q|k)", r".attn.\1_norm_x"),
            (r"\.attn1\.to_out\.0", ".attn.proj_x"),
            (r"\.attn1\.to_add_out", ".attn.proj_y"),
            (r"\.ff\.net\.0\.proj", ".mlp_x.w1"),
            (r"\.ff_context\.net\.0\.proj", ".mlp_y.w1"),
            (r"\.ff\.net\.2", ".mlp_x.w2"),
            (r"\.ff_context\.net\.2", ".mlp_y.w2"),
        ),
    )


ORIGINAL: Mapping[str, Callable[[Mapping[str, Tensor]], State]] = {
    "wan": wan,
    "ltx": ltx,
    "hunyuan": hunyuan,
    "cogvideox": cogvideox,
    "mochi": mochi,
}
