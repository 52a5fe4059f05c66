"""Module names in original checkpoints and in diffusers, as data, by the denoiser's class.

A `Rename` maps an original module to the diffusers modules that hold its rows, in order. In a
template, ``*`` is one part of a dotted name and a final ``**`` is any rest. `WeightSites` expands
the templates for the modules that a model has, so a rename without a module has no effect. Sources:
diffusers' converters (`loaders/single_file_utils.py`, `scripts/convert_cogvideox_to_diffusers.py`)
and ComfyUI's names (`comfy/lora.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Rename:
    """One original module and the modules of diffusers that hold its rows.

    Attributes:
        original: template of the original name.
        targets: templates; the rename applies only if all of them exist.
        chunks: for each target, the indices of its rows among `num_chunks` equal chunks of the
            original's rows, in the target's order. Empty: targets hold consecutive rows.
    """

    original: str
    targets: tuple[str, ...]
    chunks: tuple[tuple[int, ...], ...] = ()
    num_chunks: int = 0


def count_children(modules: Collection[str], before: str) -> int:
    """Number of children of a module, among modules by dotted name."""
    start = f"{before}."
    return len({name[len(start) :].split(".")[0] for name in modules if name.startswith(start)})


def _plain(table: Mapping[str, str], before: str = "", after: str = "") -> tuple[Rename, ...]:
    return tuple(Rename(before + name, (after + target,)) for name, target in table.items())


def _qkv(original: str, where: str, names: tuple[str, ...] = ("to_q", "to_k", "to_v")) -> Rename:
    return Rename(original, tuple(f"{where}.{name}" for name in names))


def _halves_swapped(original: str, target: str) -> Rename:
    """Rename with swapped halves: scale and shift, or gate and value."""
    return Rename(original, (target,), ((1, 0),), 2)


_ADDED = ("add_q_proj", "add_k_proj", "add_v_proj")

_WAN_BLOCK = {
    "modulation": "scale_shift_table",
    "self_attn.q": "attn1.to_q",
    "self_attn.k": "attn1.to_k",
    "self_attn.v": "attn1.to_v",
    "self_attn.o": "attn1.to_out.0",
    "self_attn.norm_q": "attn1.norm_q",
    "self_attn.norm_k": "attn1.norm_k",
    "cross_attn.q": "attn2.to_q",
    "cross_attn.k": "attn2.to_k",
    "cross_attn.v": "attn2.to_v",
    "cross_attn.o": "attn2.to_out.0",
    "cross_attn.norm_q": "attn2.norm_q",
    "cross_attn.norm_k": "attn2.norm_k",
    "cross_attn.k_img": "attn2.add_k_proj",
    "cross_attn.v_img": "attn2.add_v_proj",
    "cross_attn.norm_k_img": "attn2.norm_added_k",
    "norm3": "norm2",
    "ffn.0": "ffn.net.0.proj",
    "ffn.2": "ffn.net.2",
    "before_proj": "proj_in",
    "after_proj": "proj_out",
}
_WAN = (
    *_plain({
        "time_embedding.0": "condition_embedder.time_embedder.linear_1",
        "time_embedding.2": "condition_embedder.time_embedder.linear_2",
        "time_projection.1": "condition_embedder.time_proj",
        "text_embedding.0": "condition_embedder.text_embedder.linear_1",
        "text_embedding.2": "condition_embedder.text_embedder.linear_2",
        "img_emb.proj.0": "condition_embedder.image_embedder.norm1",
        "img_emb.proj.1": "condition_embedder.image_embedder.ff.net.0.proj",
        "img_emb.proj.3": "condition_embedder.image_embedder.ff.net.2",
        "img_emb.proj.4": "condition_embedder.image_embedder.norm2",
        "img_emb.emb_pos": "condition_embedder.image_embedder.pos_embed",
        "head.head": "proj_out",
        "head.modulation": "scale_shift_table",
        "face_adapter.fuser_blocks.*.linear1_q": "face_adapter.*.to_q",
        "face_adapter.fuser_blocks.*.linear2": "face_adapter.*.to_out",
        "face_adapter.fuser_blocks.*.q_norm": "face_adapter.*.norm_q",
        "face_adapter.fuser_blocks.*.k_norm": "face_adapter.*.norm_k",
    }),
    _qkv("face_adapter.fuser_blocks.*.linear1_kv", "face_adapter.*", ("to_k", "to_v")),
    *_plain(_WAN_BLOCK, "blocks.*.", "blocks.*."),
    *_plain(_WAN_BLOCK, "vace_blocks.*.", "vace_blocks.*."),
)  # fmt: skip

_LTX = _plain({
    "patchify_proj": "proj_in",
    "adaln_single.**": "time_embed.**",
    "transformer_blocks.*.*.q_norm": "transformer_blocks.*.*.norm_q",
    "transformer_blocks.*.*.k_norm": "transformer_blocks.*.*.norm_k",
})  # fmt: skip
_LTX2 = (
    *_LTX,
    *_plain({
        "audio_patchify_proj": "audio_proj_in",
        "audio_adaln_single.**": "audio_time_embed.**",
        "prompt_adaln_single.**": "prompt_adaln.**",
        "audio_prompt_adaln_single.**": "audio_prompt_adaln.**",
        "av_ca_video_scale_shift_adaln_single.**": "av_cross_attn_video_scale_shift.**",
        "av_ca_audio_scale_shift_adaln_single.**": "av_cross_attn_audio_scale_shift.**",
        "av_ca_a2v_gate_adaln_single.**": "av_cross_attn_video_a2v_gate.**",
        "av_ca_v2a_gate_adaln_single.**": "av_cross_attn_audio_v2a_gate.**",
        "transformer_blocks.*.scale_shift_table_a2v_ca_video":
            "transformer_blocks.*.video_a2v_cross_attn_scale_shift_table",
        "transformer_blocks.*.scale_shift_table_a2v_ca_audio":
            "transformer_blocks.*.audio_a2v_cross_attn_scale_shift_table",
    }),
)  # fmt: skip

#: Tencent's names and ComfyUI's for the same: (within a double block, of picture or text tokens).
_HUNYUAN_STREAMS = (
    ("img", ("to_q", "to_k", "to_v"), "attn.to_out.0", "norm1.linear", "ff", ("norm_q", "norm_k")),
    ("txt", _ADDED, "attn.to_add_out", "norm1_context.linear", "ff_context",
     ("norm_added_q", "norm_added_k")),
)  # fmt: skip


def _hunyuan_stream(
    name: str, qkv: tuple[str, ...], out: str, mod: str, ff: str, norms: tuple[str, str]
) -> tuple[Rename, ...]:
    before, after = f"double_blocks.*.{name}_", "transformer_blocks.*."
    return (
        *(_qkv(before + each, f"{after}attn", qkv) for each in ("attn_qkv", "attn.qkv")),
        *_plain({
            "attn_proj": out, "attn.proj": out, "mod.linear": mod, "mod.lin": mod,
            "mlp.fc1": f"{ff}.net.0.proj", "mlp.0": f"{ff}.net.0.proj",
            "mlp.fc2": f"{ff}.net.2", "mlp.2": f"{ff}.net.2",
            "attn_q_norm": f"attn.{norms[0]}", "attn.norm.query_norm": f"attn.{norms[0]}",
            "attn_k_norm": f"attn.{norms[1]}", "attn.norm.key_norm": f"attn.{norms[1]}",
        }, before, after),
    )  # fmt: skip


_REFINER = "txt_in.individual_token_refiner.blocks.*."
_REFINED = "context_embedder.token_refiner.refiner_blocks.*."
_HUNYUAN = (
    *_plain({
        "img_in.proj": "x_embedder.proj",
        "txt_in.input_embedder": "context_embedder.proj_in",
        "txt_in.c_embedder.linear_1": "context_embedder.time_text_embed.text_embedder.linear_1",
        "txt_in.c_embedder.linear_2": "context_embedder.time_text_embed.text_embedder.linear_2",
        "txt_in.c_embedder.in_layer": "context_embedder.time_text_embed.text_embedder.linear_1",
        "txt_in.c_embedder.out_layer": "context_embedder.time_text_embed.text_embedder.linear_2",
        "vector_in.in_layer": "time_text_embed.text_embedder.linear_1",
        "vector_in.out_layer": "time_text_embed.text_embedder.linear_2",
        "final_layer.linear": "proj_out",
        "single_blocks.*.linear2": "single_transformer_blocks.*.proj_out",
        "single_blocks.*.modulation.linear": "single_transformer_blocks.*.norm.linear",
        "single_blocks.*.modulation.lin": "single_transformer_blocks.*.norm.linear",
        "single_blocks.*.q_norm": "single_transformer_blocks.*.attn.norm_q",
        "single_blocks.*.k_norm": "single_transformer_blocks.*.attn.norm_k",
        "single_blocks.*.norm.query_norm": "single_transformer_blocks.*.attn.norm_q",
        "single_blocks.*.norm.key_norm": "single_transformer_blocks.*.attn.norm_k",
    }),
    *(
        Rename(f"{original}.{layer}", (f"{target}.linear_{number}",))
        for original, target in (
            ("time_in", "time_text_embed.timestep_embedder"),
            ("guidance_in", "time_text_embed.guidance_embedder"),
            ("txt_in.t_embedder", "context_embedder.time_text_embed.timestep_embedder"),
        )
        for layer, number in (("mlp.0", 1), ("mlp.2", 2), ("in_layer", 1), ("out_layer", 2))
    ),
    *(rename for stream in _HUNYUAN_STREAMS for rename in _hunyuan_stream(*stream)),
    *(_qkv(_REFINER + each, f"{_REFINED}attn") for each in ("self_attn_qkv", "self_attn.qkv")),
    *_plain({
        "self_attn_proj": "attn.to_out.0", "self_attn.proj": "attn.to_out.0",
        "mlp.fc1": "ff.net.0.proj", "mlp.0": "ff.net.0.proj",
        "mlp.fc2": "ff.net.2", "mlp.2": "ff.net.2",
        "adaLN_modulation.1": "norm_out.linear",
        "norm1": "norm1", "norm2": "norm2",
    }, _REFINER, _REFINED),
    Rename("single_blocks.*.linear1", tuple(
        f"single_transformer_blocks.*.{name}"
        for name in ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")
    )),
    _halves_swapped("final_layer.adaLN_modulation.1", "norm_out.linear"),
)  # fmt: skip

_COGVIDEOX = (
    _qkv("transformer.layers.*.attention.query_key_value", "transformer_blocks.*.attn1"),
    *_plain({
        "attention.dense": "attn1.to_out.0",
        "mlp.dense_h_to_4h": "ff.net.0.proj",
        "mlp.dense_4h_to_h": "ff.net.2",
        "input_layernorm": "norm1.norm",
        "post_attention_layernorm": "norm2.norm",
    }, "transformer.layers.*.", "transformer_blocks.*."),
    *_plain({
        "transformer.final_layernorm": "norm_final",
        "time_embed.0": "time_embedding.linear_1",
        "time_embed.2": "time_embedding.linear_2",
        "ofs_embed.0": "ofs_embedding.linear_1",
        "ofs_embed.2": "ofs_embedding.linear_2",
        "mixins.patch_embed.proj": "patch_embed.proj",
        "mixins.patch_embed.text_proj": "patch_embed.text_proj",
        "mixins.adaln_layer.query_layernorm_list.*": "transformer_blocks.*.attn1.norm_q",
        "mixins.adaln_layer.key_layernorm_list.*": "transformer_blocks.*.attn1.norm_k",
        "mixins.final_layer.norm_final": "norm_out.norm",
        "mixins.final_layer.linear": "proj_out",
        "mixins.final_layer.adaLN_modulation.1": "norm_out.linear",
    }),
    Rename(
        "mixins.adaln_layer.adaLN_modulations.*.1",
        ("transformer_blocks.*.norm1.linear", "transformer_blocks.*.norm2.linear"),
        ((0, 1, 2, 6, 7, 8), (3, 4, 5, 9, 10, 11)),
        12,
    ),
)  # fmt: skip

_MOCHI = (
    *_plain({
        "x_embedder.proj": "patch_embed.proj",
        "t_embedder.mlp.0": "time_embed.timestep_embedder.linear_1",
        "t_embedder.mlp.2": "time_embed.timestep_embedder.linear_2",
        "t5_y_embedder.to_kv": "time_embed.pooler.to_kv",
        "t5_y_embedder.to_q": "time_embed.pooler.to_q",
        "t5_y_embedder.to_out": "time_embed.pooler.to_out",
        "t5_yproj": "time_embed.caption_proj",
        "final_layer.linear": "proj_out",
    }),
    *_plain({
        "mod_x": "norm1.linear",
        "mod_y": "norm1_context.linear",
        "attn.q_norm_x": "attn1.norm_q",
        "attn.k_norm_x": "attn1.norm_k",
        "attn.proj_x": "attn1.to_out.0",
        "attn.q_norm_y": "attn1.norm_added_q",
        "attn.k_norm_y": "attn1.norm_added_k",
        "attn.proj_y": "attn1.to_add_out",
        "mlp_x.w2": "ff.net.2",
        "mlp_y.w2": "ff_context.net.2",
    }, "blocks.*.", "transformer_blocks.*."),
    Rename("blocks.*.mod_y", ("transformer_blocks.*.norm1_context.linear_1",)),
    _qkv("blocks.*.attn.qkv_x", "transformer_blocks.*.attn1"),
    _qkv("blocks.*.attn.qkv_y", "transformer_blocks.*.attn1", _ADDED),
    _halves_swapped("blocks.*.mlp_x.w1", "transformer_blocks.*.ff.net.0.proj"),
    _halves_swapped("blocks.*.mlp_y.w1", "transformer_blocks.*.ff_context.net.0.proj"),
    _halves_swapped("final_layer.mod", "norm_out.linear"),
)  # fmt: skip

#: Original names by the class of diffusers' denoiser.
NAME_MAPS: Mapping[str, tuple[Rename, ...]] = {
    **dict.fromkeys(
        (
            "WanTransformer3DModel", "WanVACETransformer3DModel", "WanAnimateTransformer3DModel",
            "SkyReelsV2Transformer3DModel", "ChronoEditTransformer3DModel",
            "AnyFlowTransformer3DModel",
        ),
        _WAN,
    ),
    "LTXVideoTransformer3DModel": _LTX,
    "LTX2VideoTransformer3DModel": _LTX2,
    "HunyuanVideoTransformer3DModel": _HUNYUAN,
    "HunyuanVideoFramepackTransformer3DModel": _HUNYUAN,
    "CogVideoXTransformer3DModel": _COGVIDEOX,
    "MochiTransformer3DModel": _MOCHI,
}  # fmt: skip
