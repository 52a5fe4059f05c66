"""A tiny decoder of Wan as a target of trials; its convolutions are over frames too.

It has a module of its own, because trial processes import functions by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from everyframe.core.plan import Precision
from everyframe.dry_run.call import DryRunCall
from everyframe.fast_paths.certification.target import CertificationTarget, TargetCall
from helpers.native_paths import CPU

SIZES: dict[str, Any] = {
    "base_dim": 32, "z_dim": 4, "dim_mult": [1, 2], "num_res_blocks": 1,
    "temperal_downsample": [True], "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4,
}  # fmt: skip


def build() -> Any:
    """The autoencoder, with weights where no device says otherwise."""
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan(**SIZES).eval().requires_grad_(False)


def answer(modules: Mapping[str, Any], device: str) -> Tensor:
    """Decode three latent frames, each by a call of its own that hands frames to the next."""
    z = torch.randn(1, 4, 3, 24, 20, generator=torch.Generator().manual_seed(1))
    vae = modules["vae"]
    made: Tensor = vae.decode(z.to(device, next(vae.parameters()).dtype)).sample
    return made


@cache
def empty() -> dict[str, Any]:
    """The autoencoder without weights."""
    with torch.device("meta"):
        return {"vae": build()}


def outputs(name: str, module: Any) -> tuple[str, ...]:
    """Its last layer."""
    return ("decoder.conv_out",)


def subject() -> CertificationTarget:
    """The decoder in float32, in this process and in others."""
    whole = Precision("float32", "float32")
    call = DryRunCall("decode", "vae", ("vae",), empty, answer, 1, "key", outputs)
    target = TargetCall(call, {"vae": whole})
    return CertificationTarget("vae", CPU, 1, whole, "plan", "device", calls=(target,))
