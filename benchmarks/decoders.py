"""Autoencoders whose decoders `decode.py` measures, as wide as released, with random weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from everyframe.core.plan import FLOAT32, Precision
from everyframe.dry_run.call import DryRunCall
from everyframe.precision.islands import outside_of


@dataclass(frozen=True)
class Decoder:
    """An autoencoder, with what decodes its latents.

    Attributes:
        name: of the model, with its sizes.
        build: makes it without values.
        latents: their shape.
        decode: latents to pixels.
    """

    name: str
    build: Callable[[], nn.Module]
    latents: tuple[int, ...]
    decode: Callable[[Any, Tensor], Tensor]


def svd() -> Decoder:
    widths = (128, 256, 512, 512)
    levels = ("DownEncoderBlock2D",) * len(widths)

    def decode(vae: Any, latents: Tensor) -> Tensor:
        pixels: Tensor = vae.decode(latents, num_frames=len(latents)).sample
        return pixels

    return Decoder(
        "SVD, 8 frames of 128x128",
        lambda: diffusers.AutoencoderKLTemporalDecoder(
            block_out_channels=widths, down_block_types=levels, layers_per_block=2
        ),
        (8, 4, 16, 16),
        decode,
    )


def of_diffusers(name: str, class_name: str, latents: tuple[int, ...]) -> Decoder:
    """An autoencoder of diffusers by its defaults, which are those of the released one."""

    def decode(vae: Any, latents: Tensor) -> Tensor:
        pixels: Tensor = vae.decode(latents).sample
        return pixels

    return Decoder(name, getattr(diffusers, class_name), latents, decode)


def opensora() -> Decoder:
    from everyframe.families.opensora.vae import VideoVAE
    from everyframe.families.opensora.vae_config import VideoVAEConfig

    return Decoder(
        "Open-Sora 1.2, 17 frames of 128x128",
        lambda: VideoVAE(VideoVAEConfig()),
        (1, 4, 5, 16, 16),
        lambda vae, latents: vae.decode(latents, 17),
    )


MODELS: dict[str, Callable[[], Decoder]] = {
    "svd": svd,
    "wan": partial(
        of_diffusers, "Wan 2.1, 9 frames of 128x128", "AutoencoderKLWan", (1, 16, 3, 16, 16)
    ),
    "opensora": opensora,
    "cogvideox": partial(
        of_diffusers, "CogVideoX, 9 frames of 128x128", "AutoencoderKLCogVideoX", (1, 16, 3, 16, 16)
    ),
    "mochi": partial(
        of_diffusers, "Mochi, 7 frames of 128x128", "AutoencoderKLMochi", (1, 12, 2, 16, 16)
    ),
    "hunyuanvideo": partial(
        of_diffusers, "HunyuanVideo, 5 frames of 128x128", "AutoencoderKLHunyuanVideo",
        (1, 16, 2, 16, 16),
    ),
    "hunyuanvideo15": partial(
        of_diffusers, "HunyuanVideo 1.5, 5 frames of 128x128", "AutoencoderKLHunyuanVideo15",
        (1, 32, 2, 8, 8),
    ),
    "ltx": partial(
        of_diffusers, "LTX, 17 frames of 256x384", "AutoencoderKLLTXVideo", (1, 128, 3, 8, 12)
    ),
}  # fmt: skip


@cache
def _empty(model: str) -> Mapping[str, Any]:
    """The autoencoder without weights."""
    with torch.device("meta"):
        return {"vae": MODELS[model]().build().requires_grad_(False)}


def _answer(model: str, modules: Mapping[str, Any], device: str) -> object:
    """One call of it, for its dry run."""
    decoder = MODELS[model]()
    return decoder.decode(modules["vae"], torch.zeros(decoder.latents, device=device))


def outputs(name: str, module: nn.Module) -> tuple[str, ...]:
    """The decoders in an autoencoder, whose results are frames or become them."""
    is_decoder = {each for each, _ in module.named_modules() if each.split(".")[-1] == "decoder"}
    return tuple(sorted(is_decoder))


def precision_in(model: str, dtype: str) -> Precision:
    """All in float32, or the decoder alone in `dtype`."""
    if dtype == "float32":
        return FLOAT32
    names = [name for name, _ in _empty(model)["vae"].named_parameters()]
    return Precision(dtype, dtype, outside_of("decoder", names))


def dry_run_call(model: str) -> DryRunCall:
    """One call of a model of `MODELS`, for a dry run and for trials."""
    return DryRunCall("decode", "vae", ("vae",), partial(_empty, model), partial(_answer, model),
                      1, model, outputs)  # fmt: skip
