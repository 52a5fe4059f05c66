"""Pickled weights, as in repositories from before safetensors."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file


def pickle_weights(folder: Path) -> Path:
    """The one safetensors file in `folder` as the pickle of the same name; returns that."""
    (file,) = folder.glob("*.safetensors")
    pickle = file.with_suffix(".bin")
    torch.save(load_file(file), pickle)
    file.unlink()
    return pickle
