"""Forecasts of memory against the bytes that are really alive at the peak.

Modules of realistic widths run on fake tensors, which have sizes and no numbers, while every
storage that is made is counted until it is gone. What kernels take inside of themselves is not
seen, which is why a forecast may lie above the count: by at most `ABOVE`, and never below it by
more than `BELOW`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from everyframe.core.facts import DeviceFacts
from everyframe.core.plan import Precision, Settings
from everyframe.families.opensora.components import Sizes, components
from everyframe.families.opensora.config import STDiT3Config, STDiTConfig
from everyframe.families.opensora.vae_config import SDXL_VAE_SIZES, ImageVAEConfig, VideoVAEConfig
from everyframe.planning.forecast import describe_bytes, fits
from everyframe.precision import edges

BELOW, ABOVE = 0.95, 3.0
T5 = {
    "model_type": "t5", "d_model": 512, "d_ff": 1280, "d_kv": 64, "num_heads": 8, "num_layers": 2,
    "vocab_size": 100, "feed_forward_proj": "gated-gelu",
}  # fmt: skip
SOURCES = dict.fromkeys(("text_encoder", "denoiser", "vae"), "")
IMAGE = ImageVAEConfig(autoencoder={**SDXL_VAE_SIZES, "layers_per_block": 1})


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of every storage made while it is entered, as long as it lives."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Weights come in as arguments: known, and not counted.
        self._see((args, kwargs or {}), counts=False)
        answer = func(*args, **(kwargs or {}))
        self._see(answer, counts=True)
        return answer

    def _see(self, values: Any, *, counts: bool) -> None:
        for value in tree_leaves(values):
            if not isinstance(value, Tensor) or id(value.untyped_storage()) in self._seen:
                continue
            storage = value.untyped_storage()
            size, key = storage.nbytes() if counts else 0, id(storage)
            self.now += size
            self.peak = max(self.peak, self.now)
            self._seen[key] = weakref.ref(storage, lambda _, k=key, n=size: self._gone(k, n))

    def _gone(self, key: int, size: int) -> None:
        del self._seen[key]
        self.now -= size


def settings(height: int, width: int, num_frames: int, guidance: float = 7.0) -> Settings:
    return Settings("a", None, height, width, num_frames, 24.0, 2, guidance, 0)


def sizes_of(version: str) -> Sizes:
    if version == "1.0":
        return Sizes(STDiTConfig(depth=1, caption_channels=512), IMAGE, T5)
    vae = VideoVAEConfig(spatial=IMAGE)
    return Sizes(STDiT3Config(depth=1, caption_channels=512), vae, T5)


def peak(module: nn.Module, dtype: str, islands: tuple[str, ...], call: Callable[[], Any]) -> int:
    module.eval().requires_grad_(False)
    edges.apply(module, Precision(dtype, dtype, islands if dtype != "float32" else ()))
    with LiveBytes() as live, torch.no_grad():
        call()
    return live.peak


def check(sizes: Sizes, wanted: Settings, name: str, dtype: str, run: Any) -> None:
    part = next(p for p in components(sizes, wanted, SOURCES, "bfloat16") if p.name == name)
    forecast = part.working_bytes(2 if dtype == "bfloat16" else 4)
    with FakeTensorMode():
        module, call = run(sizes)
        measured = peak(module, dtype, part.needs.islands, call)
    assert BELOW < forecast / measured < ABOVE, f"{forecast / 1e6:.0f} MB, is {measured / 1e6:.0f}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("version", "wanted"),
    [
        ("1.2", settings(240, 424, 51)),
        ("1.2", settings(64, 64, 17)),
        ("1.2", settings(360, 640, 34, guidance=1.0)),
        ("1.0", settings(256, 256, 16)),
    ],
)
def test_denoiser(version: str, wanted: Settings, dtype: str) -> None:
    def run(sizes: Sizes) -> Any:
        model = sizes.build_denoiser()
        branches = 1 if wanted.guidance_scale == 1 else 2
        size = sizes.vae.latent_size(wanted.num_frames, wanted.height, wanted.width)
        x = torch.zeros(branches, 4, *size)
        told: dict[str, float] = {}
        if version == "1.2":
            told = {"fps": 24.0, "height": wanted.height, "width": wanted.width}

        def call() -> Tensor:
            text = torch.zeros(branches, sizes.denoiser.model_max_length, 512)
            answer: Tensor = model(x, torch.full((branches,), 5.0), model.context(text), **told)
            return answer

        return model, call

    check(sizes_of(version), wanted, "denoiser", dtype, run)


@pytest.mark.parametrize(
    ("version", "wanted"),
    [
        ("1.2", settings(240, 424, 34)),
        ("1.2", settings(240, 424, 1)),
        ("1.0", settings(256, 256, 8)),
    ],
)
@pytest.mark.parametrize("way", ["decode", "encode"])
def test_autoencoder(version: str, wanted: Settings, way: str) -> None:
    def run(sizes: Sizes) -> Any:
        vae = sizes.build_vae()

        def call() -> None:
            size = (wanted.num_frames, wanted.height, wanted.width)
            if way == "encode":
                # What is encoded are given frames: a piece at most.
                vae.encode(torch.zeros(1, 3, min(size[0], 17), *size[1:]))
                return
            latents = torch.zeros(1, 4, *vae.latent_size(*size))
            list(vae.decode_pieces(latents, size[0]))

        return vae, call

    check(sizes_of(version), wanted, "vae", "float32", run)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_text_encoder(dtype: str) -> None:
    def run(sizes: Sizes) -> Any:
        encoder = sizes.build_text()
        ids = torch.zeros(1, 300, dtype=torch.long)
        return encoder, lambda: encoder(input_ids=ids, attention_mask=torch.ones_like(ids))

    check(sizes_of("1.2"), settings(64, 64, 17), "text_encoder", dtype, run)


def test_guidance_doubles_the_stream() -> None:
    sizes = sizes_of("1.2")
    one, two = (
        components(sizes, settings(240, 424, 51, scale), SOURCES, "bfloat16")[1].working_bytes(4)
        for scale in (1.0, 7.0)
    )
    assert two == 2 * one


def test_what_fits_leaves_a_margin() -> None:
    device = DeviceFacts("x", "cpu", None, 2000, 1000)
    assert fits(900, device)
    assert not fits(950, device)
    assert not fits(900, replace(device, free_memory=800))


@pytest.mark.parametrize(
    ("size", "text"), [(18_400_000_000, "18.4 GB"), (52_000_000, "52 MB"), (1500, "2 kB")]
)
def test_amounts(size: int, text: str) -> None:
    assert describe_bytes(size) == text
