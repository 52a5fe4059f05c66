"""Original names of autoencoders' modules, for the modules that a model has.

Each function returns the renames of one layout. Sources: the original checkpoints and diffusers'
converters (`loaders/single_file_utils.py`, `scripts/convert_wan_to_diffusers.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from everyframe.adapters.name_maps import Rename, count_children

Renames = Callable[[Collection[str]], Iterator[Rename]]
"""Renames of a layout for a model with these modules."""


def _has(modules: Collection[str], before: str) -> bool:
    return any(name.startswith(f"{before}.") for name in modules)


# --------------------------------------------------------------------------------------------- Wan

_WAN_ENDS = {
    "conv1": "quant_conv",
    "conv2": "post_quant_conv",
    **{
        f"{side}.{original}": f"{side}.{target}"
        for side in ("encoder", "decoder")
        for original, target in (
            ("conv1", "conv_in"), ("head.0.gamma", "norm_out.gamma"), ("head.2", "conv_out"),
            ("middle.1.norm.gamma", "mid_block.attentions.0.norm.gamma"),
            ("middle.1.to_qkv", "mid_block.attentions.0.to_qkv"),
            ("middle.1.proj", "mid_block.attentions.0.proj"),
        )
    },
}  # fmt: skip
_WAN_RESNET = {
    "residual.0.gamma": "norm1.gamma",
    "residual.2": "conv1",
    "residual.3.gamma": "norm2.gamma",
    "residual.6": "conv2",
    "shortcut": "conv_shortcut",
}


def wan_renames(modules: Collection[str]) -> Iterator[Rename]:
    """Wan 2.1's and 2.2's names (`wan/modules/vae.py`, `vae2_2.py`)."""
    for original, target in _WAN_ENDS.items():
        yield Rename(original, (target,))
    for side in ("encoder", "decoder"):
        yield from _wan_resnet(f"{side}.middle.0", f"{side}.mid_block.resnets.0")
        yield from _wan_resnet(f"{side}.middle.2", f"{side}.mid_block.resnets.1")
    for side, blocks, layers, sampler in (
        ("encoder", "down_blocks", "downsamples", "downsampler"),
        ("decoder", "up_blocks", "upsamples", "upsampler"),
    ):
        number = 0
        for level in range(count_children(modules, f"{side}.{blocks}")):
            block = f"{side}.{blocks}.{level}"
            is_nested = _has(modules, f"{block}.{sampler}") or _is_last_nested(
                modules, side, blocks, sampler
            )
            if not _has(modules, f"{block}.resnets"):  # 2.1's encoder, which has no levels
                yield from _wan_resnet(f"{side}.{layers}.{level}", block)
                yield Rename(f"{side}.{layers}.{level}.**", (f"{block}.**",))
                continue
            number = 0 if is_nested else number
            before = f"{side}.{layers}.{level}.{layers}" if is_nested else f"{side}.{layers}"
            for layer in range(count_children(modules, f"{block}.resnets")):
                yield from _wan_resnet(f"{before}.{number}", f"{block}.resnets.{layer}")
                number += 1
            own = f"{block}.{sampler}" if is_nested else f"{block}.{sampler}s.0"
            if _has(modules, own):
                yield Rename(f"{before}.{number}.**", (f"{own}.**",))
                number += 1


def _is_last_nested(modules: Collection[str], side: str, blocks: str, sampler: str) -> bool:
    """Whether the last level is nested (2.2), by the first level: the last has no sampler."""
    return _has(modules, f"{side}.{blocks}.0.{sampler}")


def _wan_resnet(original: str, target: str) -> Iterator[Rename]:
    for name, own in _WAN_RESNET.items():
        yield Rename(f"{original}.{name}", (f"{target}.{own}",))


# --------------------------------------------------------------------------------------------- LTX

_LTX_ENCODERS = {
    "0.9": ("down_blocks.0", "down_blocks.0.downsamplers.0", "down_blocks.0.conv_out",
            "down_blocks.1", "down_blocks.1.downsamplers.0", "down_blocks.1.conv_out",
            "down_blocks.2", "down_blocks.2.downsamplers.0", "down_blocks.3", "mid_block"),
    "0.9.5": ("down_blocks.0", "down_blocks.0.downsamplers.0",
              "down_blocks.1", "down_blocks.1.downsamplers.0",
              "down_blocks.2", "down_blocks.2.downsamplers.0",
              "down_blocks.3", "down_blocks.3.downsamplers.0", "mid_block"),
}  # fmt: skip
_LTX_DECODERS = {
    "0.9": ("mid_block", "up_blocks.0", "up_blocks.1.upsamplers.0", "up_blocks.1",
            "up_blocks.2.conv_in", "up_blocks.2.upsamplers.0", "up_blocks.2",
            "up_blocks.3.conv_in", "up_blocks.3.upsamplers.0", "up_blocks.3"),
    "0.9.1": ("mid_block", "up_blocks.0.upsamplers.0", "up_blocks.0", "up_blocks.1.upsamplers.0",
              "up_blocks.1", "up_blocks.2.upsamplers.0", "up_blocks.2", "up_blocks.3.upsamplers.0",
              "up_blocks.3"),
}  # fmt: skip
#: (encoder's layout, decoder's) of each version.
_LTX_VERSIONS = (("0.9", "0.9"), ("0.9", "0.9.1"), ("0.9.5", "0.9.1"))
#: Targets that are one layer.
_SINGLE = ("conv_in", "conv_out")
_LTX_RESNET = {"conv_shortcut": "conv_shortcut.conv", "norm3.norm": "norm3"}
_LTX_ENDS = {
    "per_channel_statistics.mean-of-means": "latents_mean",
    "per_channel_statistics.std-of-means": "latents_std",
    "decoder.last_time_embedder.**": "decoder.time_embedder.**",
    "decoder.last_scale_shift_table": "decoder.scale_shift_table",
}


def _ltx_renames(encoder: str, decoder: str) -> Renames:
    def renames(modules: Collection[str]) -> Iterator[Rename]:
        for original, target in _LTX_ENDS.items():
            yield Rename(original, (target,))
        for side, blocks, targets in (
            ("encoder", "down_blocks", _LTX_ENCODERS[encoder]),
            ("decoder", "up_blocks", _LTX_DECODERS[decoder]),
        ):
            for number, target in enumerate(targets):
                before, own = f"{side}.{blocks}.{number}", f"{side}.{target}"
                layers = ("", "") if target.endswith(_SINGLE) else (".res_blocks.*", ".resnets.*")
                for old, new in {("", ""), layers}:
                    yield Rename(f"{before}{old}.**", (f"{own}{new}.**",))
                    for theirs, ours in _LTX_RESNET.items():
                        yield Rename(f"{before}{old}.{theirs}", (f"{own}{new}.{ours}",))

    return renames


# -------------------------------------------------------------------------------------- CompVis'

_LDM_RESNET = {"nin_shortcut.**": "conv_shortcut.**", "nin_shortcut": "conv_shortcut",
               "**": "**"}  # fmt: skip
_LDM_ATTENTION = {
    "norm": ("group_norm", "norm"),
    "q": ("to_q",), "k": ("to_k",), "v": ("to_v",), "proj_out": ("to_out.0",),
    "q.conv": ("to_q",), "k.conv": ("to_k",), "v.conv": ("to_v",), "proj_out.conv": ("to_out.0",),
}  # fmt: skip


def ldm_renames(modules: Collection[str]) -> Iterator[Rename]:
    """Names of CompVis' autoencoder, which HunyuanVideo's and CogVideoX' have in ComfyUI."""
    levels = count_children(modules, "decoder.up_blocks")
    for side in ("encoder", "decoder"):
        yield Rename(f"{side}.norm_out.**", (f"{side}.conv_norm_out.**",))
        yield Rename(f"{side}.norm_out", (f"{side}.conv_norm_out",))
        yield from _ldm_resnet(f"{side}.mid.block_1", f"{side}.mid_block.resnets.0")
        yield from _ldm_resnet(f"{side}.mid.block_2", f"{side}.mid_block.resnets.1")
        for original, targets in _LDM_ATTENTION.items():
            for target in targets:
                yield Rename(f"{side}.mid.attn_1.{original}",
                             (f"{side}.mid_block.attentions.0.{target}",))  # fmt: skip
    for level in range(count_children(modules, "encoder.down_blocks")):
        yield from _ldm_level(f"encoder.down.{level}", f"encoder.down_blocks.{level}", "down")
    for level in range(levels):
        own = f"decoder.up_blocks.{level}"
        yield from _ldm_level(f"decoder.up.{levels - 1 - level}", own, "up")


def _ldm_level(original: str, block: str, way: str) -> Iterator[Rename]:
    yield from _ldm_resnet(f"{original}.block.*", f"{block}.resnets.*")
    yield Rename(f"{original}.{way}sample.**", (f"{block}.{way}samplers.0.**",))


def _ldm_resnet(original: str, target: str) -> Iterator[Rename]:
    for name, own in _LDM_RESNET.items():
        yield Rename(f"{original}.{name}", (f"{target}.{own}",))


_LTX = tuple(_ltx_renames(*version) for version in _LTX_VERSIONS)

#: Layouts by the class of diffusers' autoencoder, besides its own names.
AUTOENCODERS: Mapping[str, tuple[Renames, ...]] = {
    "AutoencoderKLWan": (wan_renames,),
    "AutoencoderKLLTXVideo": _LTX,
    "AutoencoderKLLTX2Video": _LTX,
    "AutoencoderKLHunyuanVideo": (ldm_renames,),
    "AutoencoderKLCogVideoX": (ldm_renames,),
    "AutoencoderKL": (ldm_renames,),
}
