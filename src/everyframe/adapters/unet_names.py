"""Original names of UNets: CompVis' blocks, numbered consecutively through all levels.

Original checkpoints of Stable Diffusion and Stable Video Diffusion use them, as do LoRA files of
LyCORIS and ComfyUI. The numbers depend on the model's layers, so they are counted in its modules.
Layout: Stability-AI/generative-models, `sgm/modules/diffusionmodules/openaimodel.py` and
`video_model.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from everyframe.adapters.name_maps import Rename, count_children

_TOP = {
    "time_embed.0": "time_embedding.linear_1",
    "time_embed.2": "time_embedding.linear_2",
    "label_emb.0.0": "add_embedding.linear_1",
    "label_emb.0.2": "add_embedding.linear_2",
    "input_blocks.0.0": "conv_in",
    "out.0": "conv_norm_out",
    "out.2": "conv_out",
}
_RESNET = {
    "in_layers.0": "norm1",
    "in_layers.2": "conv1",
    "emb_layers.1": "time_emb_proj",
    "out_layers.0": "norm2",
    "out_layers.3": "conv2",
    "skip_connection": "conv_shortcut",
}
#: Halves of a layer of a video model, and the whole of one of a picture model.
_RESNETS = {"": "", "spatial_res_block.": "", "temporal_res_block.": "time_stack."}
_ATTENTION = {
    "time_stack.**": "temporal_transformer_blocks.**",
    "time_pos_embed.0": "time_pos_embed.linear_1",
    "time_pos_embed.2": "time_pos_embed.linear_2",
    "time_mixer.mix_factor": "time_mixer.mix_factor",
    "transformer_blocks.**": "transformer_blocks.**",
    "norm": "norm",
    "proj_in": "proj_in",
    "proj_out": "proj_out",
}


def unet_renames(modules: Collection[str]) -> Iterator[Rename]:
    """Renames of a UNet with these modules; none for any other model."""
    if not any(name.startswith("down_blocks.0.resnets.0.") for name in modules):
        return
    for original, target in _TOP.items():
        yield Rename(original, (target,))
    number = 1
    for level in range(count_children(modules, "down_blocks")):
        block = f"down_blocks.{level}"
        for layer in range(count_children(modules, f"{block}.resnets")):
            yield from _layer(f"input_blocks.{number}", block, layer)
            number += 1
        if f"{block}.downsamplers.0.conv" in modules:
            yield Rename(f"input_blocks.{number}.0.op", (f"{block}.downsamplers.0.conv",))
            number += 1
    yield from _resnet("middle_block.0", "mid_block.resnets.0")
    yield from _attention("middle_block.1", "mid_block.attentions.0")
    yield from _resnet("middle_block.2", "mid_block.resnets.1")
    number = 0
    for level in range(count_children(modules, "up_blocks")):
        block = f"up_blocks.{level}"
        has_attention = count_children(modules, f"{block}.attentions") > 0
        for layer in range(count_children(modules, f"{block}.resnets")):
            yield from _layer(f"output_blocks.{number}", block, layer)
            number += 1
        last = f"output_blocks.{number - 1}.{2 if has_attention else 1}.conv"
        yield Rename(last, (f"{block}.upsamplers.0.conv",))


def _layer(original: str, block: str, layer: int) -> Iterator[Rename]:
    yield from _resnet(f"{original}.0", f"{block}.resnets.{layer}")
    yield from _attention(f"{original}.1", f"{block}.attentions.{layer}")


def _resnet(original: str, target: str) -> Iterator[Rename]:
    yield Rename(f"{original}.time_mixer.mix_factor", (f"{target}.time_mixer.mix_factor",))
    for ours, theirs in _RESNETS.items():
        for name, own in _RESNET.items():
            yield Rename(f"{original}.{theirs}{name}", (f"{target}.{ours}{own}",))


def _attention(original: str, target: str) -> Iterator[Rename]:
    for name, own in _ATTENTION.items():
        yield Rename(f"{original}.{name}", (f"{target}.{own}",))
