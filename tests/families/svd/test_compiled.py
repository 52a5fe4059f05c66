"""The video UNet's blocks can be compiled: the layout of frames that they get is no obstacle."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from everyframe.families.svd import unet
from everyframe.families.svd.layers import WHOLE
from everyframe.families.svd.sharding import ShardedFrames
from everyframe.fast_paths.apply import swap_modules
from everyframe.fast_paths.compilation.block_state import NotCompilableError, flatten
from everyframe.fast_paths.compilation.module_compilation import compile_blocks, compiled_blocks
from everyframe.parallel.communicator import SingleRank
from helpers import native_paths
from helpers.planted_compiler import PlantedCompiler

#: Those that change modules of the UNet's blocks.
PATHS = ("native-norm", "native-geglu", "native-attention", "onednn-linear",
         "native-gated-linear", "temporal-conv", "channels-last")  # fmt: skip


@pytest.mark.parametrize("paths", [(), PATHS], ids=["as written", "with fast paths"])
def test_a_level_is_compiled(
    paths: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fast paths too: one lays weights in another order at the first call, one is in two parts."""
    monkeypatch.setenv("EVERYFRAME_CACHE", str(tmp_path))
    compiler = PlantedCompiler(monkeypatch)
    torch.manual_seed(0)
    model = unet.build(native_paths.SIZES).eval().requires_grad_(False)
    with torch.no_grad():
        want = native_paths.answer({"unet": model}, "cpu")
        swap_modules(model, paths)
        # With fixed sizes, and one level of all: to export one takes seconds.
        compile_blocks(model, ["down_blocks.0"], dynamic=False)
        got = native_paths.answer({"unet": model}, "cpu")
    # The same program in float32, in the order in which torch's export writes it down.
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
    assert compiled_blocks(model)["down_blocks.0"].is_compiled
    assert compiler.count == 1


def test_a_ranks_share_of_frames_is_not_baked_in() -> None:
    """The whole layout computes what its source says; a share holds the rank's own frames."""
    assert flatten(WHOLE, [])
    share = ShardedFrames((1, 2), [4], SingleRank(), 1)
    with pytest.raises(NotCompilableError, match="ShardedFrames"):
        flatten(share, [])
