"""Tied weights that are left in the file are compared there, as those in memory are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from everyframe.checkpoints.key_map import KeyMap
from everyframe.checkpoints.strict_load import load_strictly
from everyframe.checkpoints.tensor_file import open_checkpoint
from everyframe.core.errors import CheckpointError


class Tied(nn.Module):
    """Two names of one parameter, as T5 has them."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Embedding(3, 2)
        self.b = nn.Embedding(3, 2)
        self.b.weight = self.a.weight


@pytest.mark.parametrize("same", [True, False])
def test_both_copies_are_compared(same: bool, tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    save_file({"a.weight": torch.ones(3, 2), "b.weight": torch.full((3, 2), 2.0 - same)}, file)
    with torch.device("meta"):
        module = Tied()
    keys = KeyMap(tied=(("a.weight", "b.weight"),))
    names = ("a.weight", "b.weight")
    if same:
        left = load_strictly(module, open_checkpoint(file), keys=keys, leave=names)
        assert left == dict.fromkeys(names, "a.weight")
    else:
        with pytest.raises(CheckpointError, match="should equal"):
            load_strictly(module, open_checkpoint(file), keys=keys, leave=names)
