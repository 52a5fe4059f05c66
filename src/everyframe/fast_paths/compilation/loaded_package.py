"""The native code of a package in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from everyframe.fast_paths.compilation.block_export import decode, in_format
from everyframe.fast_paths.compilation.package_store import Package


class LoadedPackage:
    """The library of a package in this process."""

    def __init__(self, package: Package, library: Path, device: torch.device) -> None:
        self.package = package
        self._run = load_library(library, device)

    def run(self, weights: Sequence[Tensor], tensors: Sequence[Tensor]) -> Any:
        """The block's result with these weights and arguments."""
        given = [*weights, *map(in_format, tensors)]
        if tensors[0].is_cuda:  # code for cards reads 16 bytes at once
            given = [each if each.data_ptr() % 16 == 0 else each.clone() for each in given]
        return decode(self.package.result, iter(self._run(given)))


def load_library(library: Path, device: torch.device) -> Callable[[list[Tensor]], list[Tensor]]:
    """The function in a library, which is run as soon as it is loaded."""
    # torch's own loader for Python brings its compiler along, which takes seconds.
    loader: Any = torch._C._aoti.AOTIModelPackageLoader
    runner = loader(str(library), "model", False, 1, device.index if device.type == "cuda" else -1)
    found: Callable[[list[Tensor]], list[Tensor]] = runner.run
    return found
