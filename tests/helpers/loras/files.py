"""LoRA files of random factors, and the weights of a manual merge in float64.

A `Lora` of these tests is a mapping of tensors. `hand_merged` uses no names of files, only the
modules that the factors are for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from everyframe.adapters.patches import PatchSet, match_loras
from everyframe.adapters.weight_sites import WeightTable
from everyframe.core.lora import Lora
from helpers.loras.original_names import ORIGINAL
from helpers.tiny_checkpoints import pipeline_components
from helpers.tiny_checkpoints.diffusers import wan as tiny_wan

State = dict[str, Tensor]


@cache
def denoiser(name: str) -> nn.Module:
    """A tiny denoiser of diffusers, in float32; not to be changed."""
    makers: Mapping[str, Callable[[], Any]] = {
        "wan": tiny_wan.transformer,
        "wan_of_a_picture": lambda: tiny_wan.transformer(in_channels=36, image_dim=4),
        "ltx": lambda: pipeline_components.ltx_parts()["transformer"],
        "hunyuan": lambda: pipeline_components.hunyuan_parts()["transformer"],
        "cogvideox": lambda: pipeline_components.cogvideox_parts()["transformer"],
        "mochi": lambda: pipeline_components.mochi_parts()["transformer"],
    }
    made: nn.Module = makers[name]()
    return made


def state_of(name: str) -> State:
    """Its parameters by diffusers' names."""
    return {key: each.detach().float() for key, each in denoiser(name).named_parameters()}


def original_state(name: str) -> State:
    """Its parameters by its authors' names."""
    return ORIGINAL[name.split("_")[0]](state_of(name))


def table(name: str) -> WeightTable:
    """Its parameters as `match_loras` takes them."""
    module = denoiser(name)
    shapes = {key: tuple(each.shape) for key, each in module.named_parameters()}
    return WeightTable(type(module).__name__, shapes, is_denoiser=True)


@dataclass(frozen=True)
class Factors:
    """A pair of random factors, with alpha."""

    down: Tensor
    up: Tensor
    alpha: float | None = None

    @property
    def scale(self) -> float:
        """Alpha over rank."""
        return 1.0 if self.alpha is None else self.alpha / self.down.shape[0]

    def delta(self) -> Tensor:
        """The change in float64, as a matrix."""
        product = self.up.double().flatten(1) @ self.down.double().flatten(1)
        return product * self.scale


def random(*shape: int, seed: int) -> Tensor:
    """Numbers around 0.3 in size, the same for the same seed and shape."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + math.prod(shape))
    return 0.3 * torch.randn(*shape, generator=generator)


def factors_for(
    state: State, modules: Iterable[str], rank: int = 3, alpha: float | None = None, seed: int = 0
) -> dict[str, Factors]:
    """Factors for the weight of each module."""
    found = {}
    for number, module in enumerate(modules):
        rows, *inner = state[f"{module}.weight"].shape
        found[module] = Factors(
            random(rank, *inner, seed=seed + 2 * number),
            random(rows, rank, *[1] * (len(inner) - 1), seed=seed + 2 * number + 1),
            alpha,
        )
    return found


def hand_merged(
    state: State, factors: Mapping[str, Factors], strength: float = 1.0
) -> dict[str, Tensor]:
    """The changed weights in float64."""
    return {
        f"{module}.weight": state[f"{module}.weight"].double()
        + strength * each.delta().reshape(state[f"{module}.weight"].shape)
        for module, each in factors.items()
    }


def matrices(state: State, contains: str = "") -> list[str]:
    """The modules whose weight is a matrix or a kernel."""
    return [
        name.removesuffix(".weight")
        for name, each in state.items()
        if name.endswith(".weight") and each.ndim > 1 and contains in name
    ]


def as_lora(
    factors: Mapping[str, Factors],
    prefix: str = "",
    down: str = ".lora_A.weight",
    up: str = ".lora_B.weight",
    *,
    is_flat: bool = False,
) -> State:
    """The tensors of a file in one layout."""
    found: State = {}
    for module, each in factors.items():
        stem = prefix + (module.replace(".", "_") if is_flat else module)
        found[stem + down], found[stem + up] = each.down, each.up
        if each.alpha is not None:
            found[f"{stem}.alpha"] = torch.tensor(each.alpha)
    return found


def write(path: Path, tensors: State, metadata: dict[str, str] | None = None) -> Path:
    """Save them as safetensors."""
    save_file({key: each.clone().contiguous() for key, each in tensors.items()}, path, metadata)
    return path


def matched(path: Path, name: str, strength: float = 1.0, component: str = "") -> PatchSet:
    """The file matched with a tiny denoiser."""
    return match_loras(
        [Lora(str(path), strength, component)], {"transformer": table(name)}, f"tiny {name}"
    )


def merged(patches: PatchSet, state: State, component: str = "transformer") -> State:
    """The whole state with the patches, computed in float32."""
    own = patches.patches.get(component, {})
    return {key: own[key](each.float()) if key in own else each for key, each in state.items()}


def largest_error(state: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """The largest difference of any tensor."""
    assert state.keys() == wanted.keys()
    return max(
        (each.double() - wanted[key].double()).abs().max().item() for key, each in state.items()
    )
