"""A fake compiler in place of AOTInductor: it runs the exported program as it is.

Export, conditions on sizes, keys, digests, the store and certification are real. Real compilation
takes twenty seconds for each library; tests marked slow use it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from everyframe.fast_paths.compilation import (
    block_export,
    block_trial,
    compiled_block,
    loaded_package,
)
from everyframe.fast_paths.compilation.block_export import ExportedBlock


class PlantedCompiler:
    """Compiles by exporting.

    Attributes:
        count: of the blocks that were compiled.
        is_dynamic: whether sizes may vary; an export of fixed ones takes a third of the time.
        by: results are multiplied by it.
        says: an error to fail with.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.by = 1.0
        self.is_dynamic = False
        self.says = ""
        self._programs: dict[bytes, Any] = {}
        self._numbers = itertools.count()
        patch.setattr(compiled_block, "compile_block", self.compile)
        patch.setattr(loaded_package, "load_library", self.load)
        patch.setattr(compiled_block, "_LOADED", {})
        patch.setattr(compiled_block, "_CHECKED", set())
        patch.setattr(block_trial, "judge", self.judge)
        self.verdict = "certified"

    def judge(self, error: float, limit: float, gain: float) -> tuple[str, str]:
        """The error counts and the time doesn't: a planted library isn't faster."""
        if not error <= limit:
            return "refused", f"is off by {error:.1e}"
        return self.verdict, "planted"

    def compile(
        self,
        block: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        folder: Path,
        *,
        dynamic: bool,
    ) -> ExportedBlock:
        """In place of `block_export.compile_block`."""
        if self.says:
            raise block_export.NotCompilableError(self.says)
        self.count += 1
        results: list[Any] = []
        with torch.inference_mode(False), torch.no_grad():
            names, call, tensors = block_export._stand_in(block, args, kwargs, results.append)
            program, sizes = block_export._export_dynamic(
                call, len(names), tensors, dynamic=dynamic and self.is_dynamic
            )
        code = f"library {next(self._numbers)}".encode()
        self._programs[code] = program.module(check_guards=False)
        library = folder / "block.pt2"
        library.write_bytes(code)
        return ExportedBlock(library, sizes, results[-1])

    def load(self, library: Path, device: torch.device) -> Any:
        """In place of `loaded_package.load_library`."""
        program = self._programs[library.read_bytes()]

        def run(tensors: Sequence[Tensor]) -> list[Tensor]:
            return [each * self.by for each in program([*tensors])]

        return run
