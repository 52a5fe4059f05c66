"""Module names of text encoders in files of other programs than transformers, as data.

Sources: Wan-Video/Wan2.1 (`wan/modules/t5.py`), and llama.cpp's names in GGUF files
(`gguf/tensor_mapping.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

from everyframe.adapters.name_maps import Rename

_BLOCK, _ATTENTION, _FEED = "encoder.block.*", "layer.0.SelfAttention", "layer.1.DenseReluDense"


def _block(before: str, table: Mapping[str, str], after: str) -> tuple[Rename, ...]:
    return tuple(Rename(f"{before}.{name}", (f"{after}.{own}",)) for name, own in table.items())


_WAN_T5 = (
    Rename("token_embedding", ("shared",)),
    Rename("norm", ("encoder.final_layer_norm",)),
    *_block("blocks.*", {
        "norm1": "layer.0.layer_norm", "norm2": "layer.1.layer_norm",
        **{f"attn.{name}": f"{_ATTENTION}.{name}" for name in "qkvo"},
        "pos_embedding.embedding": f"{_ATTENTION}.relative_attention_bias",
        "ffn.gate.0": f"{_FEED}.wi_0", "ffn.fc1": f"{_FEED}.wi_1", "ffn.fc2": f"{_FEED}.wo",
    }, _BLOCK),
)  # fmt: skip
_LLAMA_CPP_T5 = (
    Rename("token_embd", ("shared",)),
    Rename("enc.output_norm", ("encoder.final_layer_norm",)),
    *_block("enc.blk.*", {
        "attn_norm": "layer.0.layer_norm", "ffn_norm": "layer.1.layer_norm",
        **{f"attn_{name}": f"{_ATTENTION}.{name}" for name in "qkvo"},
        "attn_rel_b": f"{_ATTENTION}.relative_attention_bias",
        "ffn_gate": f"{_FEED}.wi_0", "ffn_up": f"{_FEED}.wi_1", "ffn_down": f"{_FEED}.wo",
    }, _BLOCK),
)  # fmt: skip
_LLAMA_CPP = (
    Rename("token_embd", ("embed_tokens",)),
    Rename("output_norm", ("norm",)),
    *_block("blk.*", {
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
        **{f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"},
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }, "layers.*"),
)  # fmt: skip

#: Layouts by the class of transformers' encoder, besides its own names.
TEXT_ENCODERS: Mapping[str, tuple[tuple[Rename, ...], ...]] = {
    "T5EncoderModel": (_WAN_T5, _LLAMA_CPP_T5),
    "UMT5EncoderModel": (_WAN_T5, _LLAMA_CPP_T5),
    "LlamaModel": (_LLAMA_CPP,),
}
_HEADS = "llama.attention.head_count"
#: By class, layers whose rows llama.cpp has in another order than transformers, and the keys of a
#: file's metadata that may say in how many heads; the first that is there counts.
PERMUTED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "LlamaModel": {"attn_q": (_HEADS,), "attn_k": (f"{_HEADS}_kv", _HEADS)},
}
