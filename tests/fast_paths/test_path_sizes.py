"""Scratch of the kernels in C by formulas, against what their sources ask of the system."""

from __future__ import annotations

import ctypes
import subprocess
from ctypes import c_long
from functools import cache
from itertools import product
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from everyframe.core.facts import OpShape
from everyframe.core.plan import Precision
from everyframe.dry_run import executor
from everyframe.families.svd import unet
from everyframe.fast_paths import path_sizes
from everyframe.fast_paths.apply import swap_modules
from everyframe.ops.native import kernels, library
from helpers import decoder_paths, native_paths

pytestmark = pytest.mark.skipif(bool(missing := library.why_not()), reason=str(missing))

#: The kernels that ask for memory, with an allocator that counts bytes and has none: they return
#: before they compute.
COUNTED = """
#include <stdlib.h>
static long counted, is_wrong;
static void *count(size_t alignment, size_t size) {
  is_wrong |= size % alignment != 0;
  counted += size;
  return NULL;
}
#define aligned_alloc count
INCLUDED
EXPORT long counted_bytes(void) {
  long size = is_wrong ? -1 : counted;
  counted = is_wrong = 0;
  return size;
}
"""
#: Numbers of a register.
WIDTHS = (4, 8, 16)


class Kernels:
    """Counts the bytes that kernels ask for, with vectors of so many numbers."""

    def __init__(self, lanes: int, path: Path) -> None:
        self.lanes = lanes
        self._library: Any = ctypes.CDLL(str(path))
        self._library.counted_bytes.restype = c_long

    def count(self, name: str, *given: Any) -> int:
        """Bytes for a call with these arguments; tensors are not read."""
        kernel = getattr(self._library, name)
        if kernel.argtypes is None:
            kernel.argtypes = kernels._SIGNATURES[name]
        assert kernel(*(None if isinstance(each, Tensor) else each for each in given)) == 1
        size: int = self._library.counted_bytes()
        assert size >= 0, "macOS allocates nothing whose size is no multiple of the alignment"
        return size


@pytest.fixture(scope="module", params=WIDTHS, ids="{}_lanes".format)
def counted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    folder, compiler = tmp_path_factory.mktemp("kernels"), library.find_compiler()
    assert compiler is not None
    asking = [each.name for each in sorted(library._SOURCES.glob("*.c"))
              if "scratch_of(" in each.read_text(encoding="utf-8")]  # fmt: skip
    included = "\n".join(f'#include "{name}"' for name in asking)
    (folder / "counted.c").write_text(COUNTED.replace("INCLUDED", included), encoding="utf-8")
    subprocess.run(
        [compiler, "-std=gnu11", "-w", "-O1", "-fPIC", "-shared", f"-DLANES={request.param}",
         f"-I{library._SOURCES}", "counted.c", "-o", "counted.so", "-lm"],
        cwd=folder, check=True,
    )  # fmt: skip
    return Kernels(request.param, folder / "counted.so")


def check(size: int, bound: int, threads: int, lanes: int) -> None:
    """`bound` holds for every width of vectors, and is near what the widest ones need."""
    assert size <= bound
    if lanes == 16:  # and the tiles that whole registers leave out
        assert bound < 1.3 * size + 200_000 * (1 + threads)


THREADS = (1, 3, 16)


def test_convolutions(counted: Kernels) -> None:
    edge = (0, 1, None, 0, 0, 0)
    channels, outputs = (32, 33, 96, 320, 640, 1000, 1280, 2560, 7680), (32, 40, 320, 1280)
    for inputs, made, tiles, threads in product(channels, outputs, (1, 16, 300, 40_000), THREADS):
        image = (c_long * 3)(1, 4, 4 * tiles)
        sizes = (1, image, image, inputs, made, 1, *edge, (c_long * 5)(), 0, threads)
        size = counted.count("winograd", None, None, None, None, *sizes)
        check(size, path_sizes.winograd_bytes(inputs, made, tiles, threads), threads, counted.lanes)


def test_convolutions_over_time(counted: Kernels) -> None:
    channels, outputs = (32, 33, 320, 1280, 5120), (32, 40, 320, 1280)
    for inputs, made, tiles, threads in product(channels, outputs, (1, 16, 300, 40_000), THREADS):
        sizes = (1, 4, 4, tiles, inputs, made, 1, (c_long * 3)(), 0, threads)
        size = counted.count("winograd_over_time", None, None, None, None, *sizes)
        bound = path_sizes.winograd_bytes(inputs, made, tiles, threads, area=6)
        check(size, bound, threads, counted.lanes)


def test_the_widest_convolutions_need_what_the_docs_say() -> None:
    one, two = (path_sizes.winograd_bytes(2560, 1280, 10**5, threads) for threads in (1, 2))
    assert two - one < 45e6
    assert one - (two - one) < 50e6


def test_gated_layers(counted: Kernels) -> None:
    sizes = product((1, 60, 500, 100_000), (16, 37, 320, 1280), (16, 1000, 5120), THREADS)
    for rows, words, width, threads in sizes:
        given = (None, None, None, None, rows, words, width, 0, threads)
        bound = path_sizes.gated_linear_bytes(rows, words, width, threads)
        check(counted.count("gated_linear", *given), bound, threads, counted.lanes)


def test_attention(counted: Kernels) -> None:
    for width, threads in product((16, 40, 64, 72, 128, 160), THREADS):
        given = (None, None, None, None, 1, 2, 5000, 5000, width, (c_long * 9)(), 1.0, 0, threads)
        bound = path_sizes.attention_bytes(width, threads)
        check(counted.count("attention", *given), bound, threads, counted.lanes)


def run(path: str, helper: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Calls of kernels in a run of the helper's model by that path: names and arguments."""
    called: list[tuple[Any, ...]] = []
    compute = kernels.call

    def call(name: str, *given: Any, output: Any) -> None:
        if name != "channels_last":  # which only copies, and asks for nothing
            called.append((name, *given))
        compute(name, *given, output=output)

    monkeypatch.setattr(kernels, "call", call)
    is_unet = helper is native_paths
    model = unet.build(helper.SIZES).eval() if is_unet else helper.build()
    swap_modules(model, [path])
    with torch.inference_mode():
        helper.answer({"unet" if is_unet else "vae": model}, "cpu")
    return called


def dry(helper: Any) -> list[OpShape]:
    """Products of the same run, as a plan knows them."""
    stage_call = helper.subject().calls[0].call
    precisions = {stage_call.component: Precision("float32", "float32")}
    found = executor.dry_run(stage_call, precisions, native_paths.CPU).found
    return [shape for shape, _ in found[stage_call.component].work.products]


@cache
def run_and_dry(path: str, helper: Any) -> tuple[list[tuple[Any, ...]], list[OpShape]]:
    """Both, made once for vectors of every width."""
    with pytest.MonkeyPatch.context() as patch:
        return run(path, helper, patch), dry(helper)


@pytest.mark.parametrize(
    ("path", "helper"),
    [
        ("winograd", native_paths), ("winograd", decoder_paths),
        ("temporal-winograd", native_paths), ("native-flash", native_paths),
        ("native-gated-linear", native_paths),
    ],
    ids=["winograd-unet", "winograd-decoder", "temporal-winograd", "native-flash",
         "native-gated-linear"],
)  # fmt: skip
def test_what_a_run_asks_for_is_known_before(path: str, helper: Any, counted: Kernels) -> None:
    called, products = run_and_dry(path, helper)
    assert called
    for threads in THREADS:
        size = max(counted.count(*given, threads) for given in called)
        bound = path_sizes.scratch_bytes(products, ("onednn-linear", path), threads)
        assert size <= bound < 2 * size + 200_000 * (1 + threads)
    assert path_sizes.scratch_bytes(products, ("onednn-linear",), 2) == 0


@pytest.mark.parametrize("helper", [native_paths, decoder_paths], ids=["unet", "decoder"])
def test_the_plan_knows_which_convolutions_are_computed_so(helper: Any) -> None:
    """One more would be a forecast of what nobody needs: here the wide ones have few pixels."""
    needed = set()
    called, products = run_and_dry("winograd", helper)
    for _, *given in called:
        samples, _, (frames, height, width), channels, outputs, taps = given[4:10]
        tiles = samples * frames * ceil(height / 4) * ceil(width / 4)
        needed.add(path_sizes.winograd_bytes(taps * channels, outputs, tiles, 1))
    found = {path_sizes.scratch_bytes([each], ["winograd"], 1) for each in products}
    assert found - {0} == needed
