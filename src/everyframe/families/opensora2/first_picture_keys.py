"""Key maps of FLUX.1: diffusers' denoiser to ours, Black Forest Labs' autoencoder to diffusers'.

Names in the other layout match nothing and stay. No torch here.
"""

from __future__ import annotations

from everyframe.checkpoints.key_map import KeyMap
from everyframe.checkpoints.reshape import TensorReshape

_SINGLE, _DOUBLE = r"^single_transformer_blocks\.(\d+)\.", r"^transformer_blocks\.(\d+)\."
#: Modules of the joint attention for each stream; those of the text are called added.
_STREAMS = (("img", "", "to_", "to_out.0"), ("txt", "added_", "add_", "to_add_out"))
FLUX_KEYS = KeyMap(
    rename=(
        (r"^x_embedder\.", "img_in."),
        (r"^context_embedder\.", "txt_in."),
        (r"^time_text_embed\.timestep_embedder\.", "time_in."),
        (r"^time_text_embed\.text_embedder\.", "vector_in."),
        (r"^time_text_embed\.guidance_embedder\.", "guidance_in."),
        (r"^(\w+_in)\.linear_1\.", r"\1.in_layer."),
        (r"^(\w+_in)\.linear_2\.", r"\1.out_layer."),
        (r"^proj_out\.", "final_layer.linear."),
        (r"^norm_out\.linear\.", "final_layer.adaLN_modulation.1."),
        (_SINGLE + r"norm\.linear\.", r"single_blocks.\1.modulation.lin."),
        (_SINGLE + r"proj_mlp\.", r"single_blocks.\1.mlp_in."),
        (_SINGLE + r"proj_out\.", r"single_blocks.\1.linear2."),
        (_SINGLE + r"attn\.to_([qkv])\.", r"single_blocks.\1.\2_proj."),
        (_SINGLE + r"attn\.norm_([qk])\.", r"single_blocks.\1.norm.\2_norm."),
        (_DOUBLE + r"norm1\.linear\.", r"double_blocks.\1.img_mod.lin."),
        (_DOUBLE + r"norm1_context\.linear\.", r"double_blocks.\1.txt_mod.lin."),
        (_DOUBLE + r"ff\.net\.", r"double_blocks.\1.img_mlp."),
        (_DOUBLE + r"ff_context\.net\.", r"double_blocks.\1.txt_mlp."),
        (r"(_mlp\.0)\.proj\.", r"\1."),
        *(
            pair
            for stream, added, to, out in _STREAMS
            for pair in (
                (_DOUBLE + rf"attn\.{out}\.", rf"double_blocks.\1.{stream}_attn.proj."),
                (_DOUBLE + rf"attn\.{to}([qkv])(?:_proj)?\.",
                 rf"double_blocks.\1.{stream}_attn.\2_proj."),
                (_DOUBLE + rf"attn\.norm_{added}([qk])\.",
                 rf"double_blocks.\1.{stream}_attn.norm.\2_norm."),
            )
        ),
        (r"\.norm\.q_norm\.weight$", ".norm.query_norm.scale"),
        (r"\.norm\.k_norm\.weight$", ".norm.key_norm.scale"),
    )
)  # fmt: skip

#: Attention of the file has kernels of one position where diffusers has matrices.
FLUX_VAE_RESHAPES = (
    TensorReshape(
        r"((?:en|de)coder\.mid\.attn_1\.(?:q|k|v|proj_out)\.weight)", (r"\1",), is_kernel=True
    ),
)
_MIDDLE = (
    (r"\.mid\.block_1\.", ".mid_block.resnets.0."),
    (r"\.mid\.block_2\.", ".mid_block.resnets.1."),
    (r"\.mid\.attn_1\.norm\.", ".mid_block.attentions.0.group_norm."),
    (r"\.mid\.attn_1\.proj_out\.", ".mid_block.attentions.0.to_out.0."),
    (r"\.mid\.attn_1\.([qkv])\.", r".mid_block.attentions.0.to_\1."),
)
#: The file counts the decoder's levels from the last.
_LEVELS = tuple(
    (rf"^decoder\.up\.{level}\.", f"decoder.up_blocks.{3 - level}.") for level in range(4)
)
FLUX_VAE_KEYS = KeyMap(
    rename=(
        *_MIDDLE,
        *_LEVELS,
        (r"^encoder\.down\.(\d+)\.", r"encoder.down_blocks.\1."),
        (r"_blocks\.(\d+)\.block\.(\d+)\.", r"_blocks.\1.resnets.\2."),
        (r"\.nin_shortcut\.", ".conv_shortcut."),
        (r"\.downsample\.", ".downsamplers.0."),
        (r"\.upsample\.", ".upsamplers.0."),
        (r"\.norm_out\.", ".conv_norm_out."),
    )
)
