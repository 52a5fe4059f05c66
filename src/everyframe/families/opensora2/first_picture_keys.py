"""Names of FLUX.1's autoencoder: Black Forest Labs' file to diffusers' module. No torch here."""

from __future__ import annotations

from everyframe.checkpoints.key_map import KeyMap
from everyframe.checkpoints.reshape import TensorReshape

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
