"""How many copies of a weight are in memory while a LoRA is merged into it."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from everyframe.adapters.patches import match_loras
from everyframe.core.lora import Lora
from everyframe.runtime.components.patchable import WeightTable
from helpers.loras.files import State, random, write

SIZE = 64


class _Copies(TorchDispatchMode):
    """Counts the storages of a weight's size that live at once."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._made: list[weakref.ref[torch.Tensor]] = []

    def see(self, tensor: torch.Tensor) -> None:
        if tensor.numel() >= SIZE * SIZE:
            self._made.append(weakref.ref(tensor))
        living = {each.data_ptr() for ref in self._made if (each := ref()) is not None}
        self.most = max(self.most, len(living))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.see(made)
        return made


def _factors(*names: str) -> State:
    return {
        name: random(*((SIZE, 2) if number % 2 else (2, SIZE)), seed=number)
        for number, name in enumerate(names)
    }


LORAS: dict[str, tuple[State, int]] = {
    "lora": (_factors("lora_A.weight", "lora_B.weight"), 2),
    "dora": (
        {**_factors("lora_A.weight", "lora_B.weight"), "dora_scale": torch.ones(SIZE, 1)}, 2
    ),
    "loha": (_factors("hada_w1_b", "hada_w1_a", "hada_w2_b", "hada_w2_a"), 3),
    "lokr": ({"lokr_w1": random(1, 1, seed=1), "lokr_w2": random(SIZE, SIZE, seed=2)}, 3),
    "diff": ({"diff": random(SIZE, SIZE, seed=1)}, 2),
    "set": ({"set_weight": random(SIZE, SIZE, seed=1)}, 2),
}  # fmt: skip


@pytest.mark.parametrize("strength", [1.0, 0.5])
@pytest.mark.parametrize("kind", LORAS)
def test_no_more_copies_than_the_documentation_says(
    kind: str, strength: float, tmp_path: Path
) -> None:
    tensors, limit = LORAS[kind]
    path = write(
        tmp_path / "lora.safetensors", {f"layer.{name}": each for name, each in tensors.items()}
    )
    table = WeightTable("UNet", {"layer.weight": (SIZE, SIZE)}, is_denoiser=True)
    found = match_loras([Lora(str(path), strength)], {"unet": table}, "a UNet")
    weight = random(SIZE, SIZE, seed=9)
    before = weight.clone()
    with _Copies() as copies:
        copies.see(weight)
        found.patches["unet"]["layer.weight"](weight)
    assert torch.equal(weight, before), "a patch leaves its argument"
    assert copies.most == limit
