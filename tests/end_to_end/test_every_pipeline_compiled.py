"""Each diffusers pipeline, its blocks compiled in place, gives what it gives as written.

The compiler is planted: it runs the exported program, so the bits are those of the blocks. Blocks
that can't be exported are for torch.compile, by its eager backend. The sweep runs with ``--slow``.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from torch import nn

import everyframe
from everyframe.fast_paths.compilation import module_compilation
from everyframe.fast_paths.compilation.module_compilation import compiled_blocks
from helpers.planted_compiler import PlantedCompiler
from helpers.references.diffusers_pipeline import built, leaves, theirs
from helpers.tiny_checkpoints.diffusers import CASES


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_it_gives_what_the_pipeline_gives(
    name: str, compiler: PlantedCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.is_dynamic = True
    graphs = module_compilation._graphs
    monkeypatch.setattr(module_compilation, "_graphs", lambda call, backend: graphs(call, "eager"))
    case = CASES[name]
    with case.within():
        pipe, asked = built(case)
        call = partial(theirs, pipe, asked, {})
        wanted = list(leaves(call()))
        everyframe.compile(pipe)
        for _ in range(2):  # the first compiles
            found = list(leaves(call()))
            assert len(found) == len(wanted)
            for one, other in zip(found, wanted, strict=True):
                assert np.array_equal(one, other), np.abs(one - other).max()
    blocks = [
        block for part in pipe.components.values() if isinstance(part, nn.Module)
        for block in compiled_blocks(part).values()
    ]  # fmt: skip
    assert any(block.is_compiled or block.report.notes for block in blocks)
