"""Key maps from checkpoint tensor names to module parameter names, as tables.

diffusers' folders use nearly the modules' own names. Stability's single files use those of
Stability-AI/generative-models (denoiser, autoencoder) and open_clip (image encoder): blocks are
numbered consecutively, decoder levels run from last to first, and query, key and value share one
matrix. Loading is in `everyframe.checkpoints.strict_load`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from everyframe.checkpoints.key_map import OLD_VAE_ATTENTION, KeyMap
from everyframe.checkpoints.reshape import TensorReshape
from everyframe.families.svd.config import TEMPORAL_VAE
from everyframe.families.svd.single_file import CLIP, DECODER, DENOISER, PICTURE_ENCODER

Renames = tuple[tuple[str, str], ...]

VAE_KEYS = KeyMap(rename=OLD_VAE_ATTENTION)
UNET_KEYS = KeyMap()
#: transformers before 4.31 stored the position ids 0, 1, 2 …
IMAGE_ENCODER_KEYS = KeyMap(ignore=(r"vision_model\.embeddings\.position_ids",))
#: Key maps of the components of a diffusers folder.
FOLDER_KEYS = {"image_encoder": IMAGE_ENCODER_KEYS, "vae": VAE_KEYS, "unet": UNET_KEYS}

#: Unused tensors of single files: one half of each of two autoencoders, and CLIP's text half.
_UNUSED = (
    re.escape(DECODER) + r"(encoder|quant_conv)\..*",
    re.escape(PICTURE_ENCODER) + r"(decoder|post_quant_conv)\..*",
    r"conditioner\.embedders\.0\.open_clip\.model\.(?!visual\.).*",
)

_ATTENTION = f"({re.escape(PICTURE_ENCODER)}encoder|{re.escape(DECODER)}decoder)" + r"\.mid\.attn_1"
_IN_PROJ = f"({re.escape(CLIP)}" + r"transformer\.resblocks\.\d+)\.attn\.in_proj_(weight|bias)"
#: Tensors of single files that are split differently in the modules.
SINGLE_FILE_CUTS = (
    TensorReshape(
        _ATTENTION + r"\.(q|k|v|proj_out)\.weight", (r"\1.mid.attn_1.\2.weight",), is_kernel=True
    ),
    TensorReshape(_IN_PROJ, (r"\1.attn.q_proj.\2", r"\1.attn.k_proj.\2", r"\1.attn.v_proj.\2")),
    TensorReshape(re.escape(f"{CLIP}proj"), (f"{CLIP}proj.weight",), transposed=True),
)

_RESNET: Renames = (
    (r"\.in_layers\.0\.", ".norm1."),
    (r"\.in_layers\.2\.", ".conv1."),
    (r"\.emb_layers\.1\.", ".time_emb_proj."),
    (r"\.out_layers\.0\.", ".norm2."),
    (r"\.out_layers\.3\.", ".conv2."),
    (r"\.(skip_connection|nin_shortcut)\.", ".conv_shortcut."),
)
#: Renames in the denoiser, applied after those of the blocks.
_DENOISER: Renames = (
    (r"^time_embed\.0\.", "time_embedding.linear_1."),
    (r"^time_embed\.2\.", "time_embedding.linear_2."),
    (r"^label_emb\.0\.0\.", "add_embedding.linear_1."),
    (r"^label_emb\.0\.2\.", "add_embedding.linear_2."),
    (r"^out\.0\.", "conv_norm_out."),
    (r"^out\.2\.", "conv_out."),
    (r"(\.resnets\.\d+)\.(?!time_stack|time_mixer)", r"\1.spatial_res_block."),
    (r"(\.resnets\.\d+)\.time_stack\.", r"\1.temporal_res_block."),
    (r"(\.attentions\.\d+)\.time_stack\.", r"\1.temporal_transformer_blocks."),
    (r"\.time_pos_embed\.0\.", ".time_pos_embed.linear_1."),
    (r"\.time_pos_embed\.2\.", ".time_pos_embed.linear_2."),
    *_RESNET,
)
#: Renames in both halves of the autoencoder.
_AUTOENCODER: Renames = (
    (r"\.down\.(\d+)\.block\.(\d+)\.", r".down_blocks.\1.resnets.\2."),
    (r"\.down\.(\d+)\.downsample\.", r".down_blocks.\1.downsamplers.0."),
    (r"\.mid\.block_1\.", ".mid_block.resnets.0."),
    (r"\.mid\.block_2\.", ".mid_block.resnets.1."),
    (r"\.mid\.attn_1\.norm\.", ".mid_block.attentions.0.group_norm."),
    (r"\.mid\.attn_1\.(q|k|v)\.", r".mid_block.attentions.0.to_\1."),
    (r"\.mid\.attn_1\.proj_out\.", ".mid_block.attentions.0.to_out.0."),
    (r"\.norm_out\.", ".conv_norm_out."),
    (r"^decoder\.conv_out\.time_mix_conv\.", "decoder.time_conv_out."),
)
#: Renames in a temporal decoder.
_TEMPORAL_DECODER: Renames = (
    (r"^(decoder\..*\.resnets\.\d+)\.mix_factor", r"\1.time_mixer.mix_factor"),
    (r"^(decoder\..*\.resnets\.\d+)\.(?!time_stack|time_mixer)", r"\1.spatial_res_block."),
    (r"^(decoder\..*\.resnets\.\d+)\.time_stack\.", r"\1.temporal_res_block."),
)
_CLIP_NAMES: Renames = (
    (r"^class_embedding$", "vision_model.embeddings.class_embedding"),
    (r"^positional_embedding$", "vision_model.embeddings.position_embedding.weight"),
    (r"^conv1\.", "vision_model.embeddings.patch_embedding."),
    (r"^ln_pre\.", "vision_model.pre_layrnorm."),
    (r"^ln_post\.", "vision_model.post_layernorm."),
    (r"^proj\.", "visual_projection."),
    (r"^transformer\.resblocks\.", "vision_model.encoder.layers."),
    (r"\.attn\.", ".self_attn."),
    (r"\.ln_(1|2)\.", r".layer_norm\1."),
    (r"\.c_fc\.", ".fc1."),
    (r"\.c_proj\.", ".fc2."),
)


def single_file_keys(configs: Mapping[str, Mapping[str, Any]]) -> Mapping[str, KeyMap]:
    """Key map of each component for a single file, given the components' `configs`."""
    vae = configs["vae"]
    temporal = _TEMPORAL_DECODER if vae["_class_name"] == TEMPORAL_VAE else ()
    names = {
        "unet": (*_blocks(configs["unet"]), *_DENOISER),
        "vae": (*_AUTOENCODER, *_decoder_levels(vae), *temporal, *_RESNET),
        "image_encoder": _CLIP_NAMES,
    }
    prefixes = {
        "unet": (DENOISER,),
        "vae": (PICTURE_ENCODER, DECODER),
        "image_encoder": (CLIP,),
    }
    every = {prefix for each in prefixes.values() for prefix in each}
    return {
        part: KeyMap(
            rename=(*((f"^{re.escape(prefix)}", "") for prefix in prefixes[part]), *renames),
            # Tensors of the other components; unknown ones are an error for each.
            ignore=(
                *_UNUSED,
                *(f"{re.escape(other)}.*" for other in sorted(every - set(prefixes[part]))),
            ),
        )
        for part, renames in names.items()
    }


def _blocks(unet: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Names of the denoiser's blocks, which the file numbers consecutively down and up."""
    layers, kinds = list(unet["layers_per_block"]), list(unet["down_block_types"])
    yield r"^input_blocks\.0\.0\.", "conv_in."
    number = 1
    for level, depth in enumerate(layers):
        for layer in range(depth):
            yield from _layer(f"input_blocks.{number}", f"down_blocks.{level}", layer)
            number += 1
        if level < len(layers) - 1:
            yield rf"^input_blocks\.{number}\.0\.op\.", f"down_blocks.{level}.downsamplers.0.conv."
            number += 1
    for index, place in enumerate(("resnets.0", "attentions.0", "resnets.1")):
        yield rf"^middle_block\.{index}\.", f"mid_block.{place}."
    number = 0
    for level, depth in enumerate(reversed(layers)):
        attends = kinds[len(layers) - 1 - level].startswith("CrossAttn")
        for layer in range(depth + 1):
            if layer == depth and level < len(layers) - 1:
                name = rf"^output_blocks\.{number}\.{2 if attends else 1}\.conv\."
                yield name, f"up_blocks.{level}.upsamplers.0.conv."
            yield from _layer(f"output_blocks.{number}", f"up_blocks.{level}", layer)
            number += 1


def _layer(counted: str, block: str, layer: int) -> Iterator[tuple[str, str]]:
    """Names of one layer's convolutions, and of its attention if it has one."""
    yield rf"^{re.escape(counted)}\.0\.(?!op\.)", f"{block}.resnets.{layer}."
    yield rf"^{re.escape(counted)}\.1\.(?!conv\.)", f"{block}.attentions.{layer}."


def _decoder_levels(vae: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Names of the decoder's levels, which the file numbers from the image on."""
    last = len(vae["block_out_channels"]) - 1
    for level in range(last + 1):
        block = f"up_blocks.{last - level}"
        yield rf"\.up\.{level}\.block\.(\d+)\.", rf".{block}.resnets.\1."
        yield rf"\.up\.{level}\.upsample\.", f".{block}.upsamplers.0."
