"""Modules that several benchmarks measure, with random weights: Wan, STDiT3 and SVD's UNet.

Each is made twice where it exists twice: as diffusers has it, and ours with the same weights. Sizes
are those of the released models with fewer blocks, or a part of them on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from everyframe.core.plan import Precision
from everyframe.dry_run.call import DryRunCall
from everyframe.families.opensora.components import DENOISER_ISLANDS
from everyframe.families.opensora.config import STDiT3Config
from everyframe.families.opensora.stdit3 import STDiT3
from everyframe.fast_paths.apply import apply_fast_paths, swap_modules
from everyframe.precision import cast_hooks

#: What is called, with nothing left to give.
Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Stack:
    """A model with its inputs.

    Attributes:
        name: of the model, with its sizes.
        blocks: names of the lists that hold its blocks.
        theirs: makes diffusers' module, or the model as it is written where diffusers has none.
        ours: makes ours in a dtype, with these fast paths.
        inputs: makes arguments for `theirs`, as a tuple of tensors, in a dtype.
        call: calls either one.
        islands: modules of ours that stay in float32 in half precision.
        outputs: last modules of ours, whose results stay as wide as the sampler's.
    """

    name: str
    blocks: tuple[str, ...]
    theirs: Callable[[torch.dtype], nn.Module]
    ours: Callable[[torch.dtype, tuple[str, ...]], nn.Module]
    inputs: Callable[[torch.dtype], tuple[Tensor, ...]]
    call: Callable[[nn.Module, tuple[Tensor, ...]], Tensor]
    islands: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ("",)


def precision_of(dtype: torch.dtype, islands: tuple[str, ...]) -> Precision:
    """Precision of a model of ours in that dtype."""
    name = str(dtype).removeprefix("torch.")
    return Precision(name, name, () if dtype == torch.float32 else islands)


def fill(module: nn.Module) -> nn.Module:
    """The same random weights for every candidate, so large that values stay near 1."""
    device = next(module.parameters()).device
    generator = torch.Generator("cpu" if device.type == "meta" else device).manual_seed(0)
    for name, parameter in module.named_parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=0.8 * parameter[0].numel() ** -0.5, generator=generator)
        elif name.endswith("bias"):
            parameter.normal_(std=0.05, generator=generator)
    return module.eval().requires_grad_(False)


def cached_context(model: nn.Module, make: Callable[[], Any]) -> Any:
    """What a model computes of its prompt once in a run."""
    own = vars(model)
    if "benchmark_context" not in own:
        own["benchmark_context"] = make()
    return own["benchmark_context"]


def forget_context(model: nn.Module) -> None:
    """Let the next call compute it again, in that call's precision."""
    vars(model).pop("benchmark_context", None)


def wan(heads: int, layers: int, frames: int, height: int, width: int, device: str) -> Stack:
    """Wan 2.1: `heads` of 128, latents of (frames, height, width), a text of 512 tokens, guided."""
    from diffusers import WanTransformer3DModel

    size = heads * 128
    config: dict[str, Any] = {
        "num_attention_heads": heads, "attention_head_dim": 128, "num_layers": layers,
        "ffn_dim": size * 35 // 6 // 16 * 16, "text_dim": 4096,
    }  # fmt: skip

    def theirs(dtype: torch.dtype) -> nn.Module:
        with torch.device(device):
            model = fill(WanTransformer3DModel(**config))
        # As `from_pretrained` casts: what diffusers keeps in float32 stays so.
        islands = [rf"{name}" for name in WanTransformer3DModel._keep_in_fp32_modules]
        for name, parameter in model.named_parameters():
            if not any(island in name for island in islands):
                parameter.data = parameter.data.to(dtype)
        return model

    def ours(dtype: torch.dtype, paths: tuple[str, ...]) -> nn.Module:
        model = theirs(dtype)
        swap_modules(model, paths)
        apply_fast_paths(model, paths or None, compiles=True)
        return model

    def inputs(dtype: torch.dtype) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(2, 16, frames, height, width, generator=generator)
        text = torch.randn(2, 512, 4096, generator=generator)
        t = torch.full((2,), 637.0)
        return x.to(device, dtype), t.to(device), text.to(device, dtype)

    def call(model: nn.Module, given: tuple[Tensor, ...]) -> Tensor:
        out: Tensor = model(*given, return_dict=False)[0]
        return out

    name = f"Wan 2.1, {heads} heads of 128, {layers} blocks, latents 2x16x{frames}x{height}x{width}"
    return Stack(name, ("blocks",), theirs, ours, inputs, call)


def opensora(hidden: int, depth: int, frames: int, side: int, device: str) -> Stack:
    """Open-Sora 1.2: latents of (frames, side, side), a text of 300 tokens, guided."""
    config = STDiT3Config(hidden_size=hidden, num_heads=hidden // 72, depth=depth)

    def bare() -> nn.Module:
        with torch.device(device):
            return fill(STDiT3(config))

    def theirs(dtype: torch.dtype) -> nn.Module:
        return ours(dtype, ())

    def ours(dtype: torch.dtype, paths: tuple[str, ...]) -> nn.Module:
        model = bare()
        swap_modules(model, paths)
        cast_hooks.add_cast_hooks(model, precision_of(dtype, DENOISER_ISLANDS))
        apply_fast_paths(model, paths or None, compiles=True)
        return model

    def inputs(dtype: torch.dtype) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(2, 4, frames, side, side, generator=generator)
        text = torch.randn(2, 300, config.caption_channels, generator=generator)
        return x.to(device), torch.full((2,), 637.5, device=device), text.to(device)

    def call(model: nn.Module, given: tuple[Tensor, ...]) -> Tensor:
        assert isinstance(model, STDiT3)
        x, t, text = given
        context = cached_context(model, lambda: model.context(text))
        side_in_pixels = float(side * 8)
        out: Tensor = model(
            x, t, context, fps=24.0, height=side_in_pixels, width=side_in_pixels,
        )  # fmt: skip
        return out

    name = (
        f"Open-Sora 1.2, width {hidden}, {depth}+{depth} blocks, latents 2x4x{frames}x{side}x{side}"
    )
    blocks = ("spatial_blocks", "temporal_blocks")
    return Stack(name, blocks, theirs, ours, inputs, call, DENOISER_ISLANDS)


def svd(widths: tuple[int, ...], frames: int, height: int, width: int, device: str) -> Stack:
    """Stable Video Diffusion's UNet: latents of (frames, height, width), guided."""
    from diffusers import UNetSpatioTemporalConditionModel

    from everyframe.families.svd import unet
    from everyframe.families.svd.components import UNET_ISLANDS

    config: dict[str, Any] = {
        "block_out_channels": widths,
        "num_attention_heads": tuple(max(1, each // 64) for each in widths),
        "num_frames": frames,
    }

    def theirs(dtype: torch.dtype) -> nn.Module:
        with torch.device(device):
            model = fill(UNetSpatioTemporalConditionModel(**config))
        return model.to(device, dtype)

    def ours(dtype: torch.dtype, paths: tuple[str, ...]) -> nn.Module:
        with torch.device(device):
            model = fill(unet.build(config))
        model.to(device)
        swap_modules(model, paths)
        cast_hooks.add_cast_hooks(model, precision_of(dtype, UNET_ISLANDS), ("conv_out",))
        apply_fast_paths(model, paths or None, compiles=True)
        return model

    def inputs(dtype: torch.dtype) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(2, frames, 8, height, width, generator=generator)
        picture = torch.randn(2, 1, 1024, generator=generator)
        picture[0] = 0
        time_ids = torch.tensor([[6.0, 127.0, 0.02]] * 2)
        t = torch.full((2,), 1.3)
        return tuple(each.to(device, dtype) for each in (x, t, picture, time_ids))

    def call(model: nn.Module, given: tuple[Tensor, ...]) -> Tensor:
        x, t, picture, time_ids = given
        if isinstance(model, unet.VideoUNet):
            context = cached_context(
                model, lambda: model.context(picture[:, 0].float(), time_ids.float(), frames)
            )
            out: Tensor = model(x.float(), t.float(), context)
            return out
        found: Tensor = model(x, t, picture, time_ids, return_dict=False)[0]
        return found

    name = f"SVD, widths {widths}, {frames} frames of {height}x{width} latents, batch 2"
    blocks = ("down_blocks", "up_blocks")
    return Stack(name, blocks, theirs, ours, inputs, call, UNET_ISLANDS, ("conv_out",))


#: Sizes of each model: a part of it for a CPU, the released one for a card.
SIZES: dict[str, dict[str, Callable[[str], Stack]]] = {
    "wan": {
        "cpu": lambda device: wan(4, 4, 3, 32, 32, device),
        "cuda": lambda device: wan(12, 10, 21, 60, 104, device),
    },
    "opensora": {
        "cpu": lambda device: opensora(576, 4, 4, 32, device),
        "cuda": lambda device: opensora(1152, 28, 15, 60, device),
    },
    "svd": {
        "cpu": lambda device: svd((64, 128, 256, 256), 14, 16, 16, device),
        "cuda": lambda device: svd((320, 640, 1280, 1280), 25, 72, 128, device),
    },
}


@cache
def _empty(model: str, kind: str) -> Mapping[str, Any]:
    """The denoiser without weights."""
    return {"denoiser": SIZES[model][kind]("meta").ours(torch.float32, ())}


def _answer(model: str, kind: str, modules: Mapping[str, Any], device: str) -> object:
    """One call of it."""
    stack = SIZES[model][kind](device)
    # The module is called in several precisions, and its context has that of the first.
    forget_context(modules["denoiser"])
    return stack.call(modules["denoiser"], stack.inputs(torch.float32))


def _outputs(model: str, kind: str, name: str, module: Any) -> tuple[str, ...]:
    """Its last modules."""
    return SIZES[model][kind]("meta").outputs


def dry_run_call(model: str, kind: str) -> DryRunCall:
    """One call of a model of `SIZES` on a kind of device, for a dry run and for trials."""
    given = (model, kind)
    return DryRunCall("denoise", "denoiser", ("denoiser",), partial(_empty, *given),
                      partial(_answer, *given), 1, given, partial(_outputs, *given))  # fmt: skip
