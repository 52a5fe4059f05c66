"""A tiny video UNet as a target of trials, and a kernel that crashes.

They have a module of their own, because the processes of trials import functions by name.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from everyframe.core.facts import DeviceFacts
from everyframe.core.plan import Precision
from everyframe.dry_run.call import DryRunCall
from everyframe.families.svd import unet
from everyframe.fast_paths.benchmark import Comparison
from everyframe.fast_paths.certification import trials
from everyframe.fast_paths.certification.target import CertificationTarget, TargetCall
from everyframe.fast_paths.registry import CATALOGUE, FastPath
from everyframe.ops.native import kernels

CPU = DeviceFacts("a processor", "cpu", None, 10**9, 10**9)

SIZES: dict[str, Any] = {
    "block_out_channels": (32, 64), "layers_per_block": 1, "cross_attention_dim": 16,
    "num_attention_heads": (2, 4), "projection_class_embeddings_input_dim": 24,
    "addition_time_embed_dim": 8, "num_frames": 3,
    "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
    "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
}  # fmt: skip


def answer(modules: Mapping[str, Any], device: str) -> Tensor:
    """One call of the UNet on fixed inputs."""
    model = modules["unet"]
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 3, 8, 8, 8, generator=generator).to(device)
    picture = torch.randn(2, 16, generator=generator).to(device)
    context = model.context(picture, torch.tensor([[6.0, 127.0, 0.02]] * 2, device=device), 3)
    made: Tensor = model(x, torch.tensor([1.6, 1.6], device=device), context)
    return made


@cache
def empty() -> dict[str, Any]:
    """The UNet without weights."""
    with torch.device("meta"):
        return {"unet": unet.build(SIZES)}


def outputs(name: str, module: Any) -> tuple[str, ...]:
    """Its last layer."""
    return ("conv_out",)


def subject() -> CertificationTarget:
    """The UNet in float32, in this process and in others."""
    whole = Precision("float32", "float32")
    call = DryRunCall("denoise", "unet", ("unet",), empty, answer, 1, "key", outputs)
    target = TargetCall(call, {"unet": whole})
    return CertificationTarget("unet", CPU, 1, whole, "plan", "device", calls=(target,))


def crashing(subject: CertificationTarget, path: FastPath) -> Iterator[Comparison]:
    """The trial of group norm, with a kernel that reads where there is nothing."""
    kernels.call = lambda name, *given, output: ctypes.string_at(0)  # type: ignore[assignment,misc]
    yield from trials.modules(subject, CATALOGUE["native-norm"])


CRASHING = replace(CATALOGUE["native-norm"], trial=f"{__name__}:crashing")
