"""Blocks are tried alone, as the request calls them; one that computes something else is found."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import everyframe
from everyframe.core.facts import DeviceFacts
from everyframe.core.plan import FLOAT32, Precision
from everyframe.fast_paths import apply
from everyframe.fast_paths.benchmark import ComparisonResult, relative_error, run_comparisons
from everyframe.fast_paths.certification.extract_blocks import BlockInputs, blocks_of, reduced
from everyframe.fast_paths.certification.target import CertificationTarget
from everyframe.fast_paths.certification.trials import block
from everyframe.fast_paths.compilation.module_compilation import is_compiled
from everyframe.fast_paths.compilation.toolchain import why_not
from everyframe.fast_paths.modules.cpu_modules import places
from everyframe.fast_paths.registry import CATALOGUE
from everyframe.ops.rope import RotaryTable
from everyframe.planning.fast_paths.component_certificates import Certificates
from everyframe.planning.resolve import prepare
from everyframe.precision.cast_hooks import tensors_in
from helpers.tiny_checkpoints import families

pytestmark = pytest.mark.usefixtures("inference_mode")

SIZES: dict[str, Any] = {"size": "32x16", "num_frames": 3, "num_inference_steps": 2, "seed": 5}


def subject(model: str, dtype: str = "fp32", **more: Any) -> CertificationTarget:
    sizes = {**SIZES, **more}
    prepared = prepare(everyframe.Request(prompt="a", model=model, dtype=dtype, **sizes))
    part = prepared.plan.component("denoiser")
    runs = [run for run in prepared.fitted.runs if run.stage_call.component == "denoiser"]
    certificates = Certificates(prepared.plan.device, 1)
    return certificates.subject("denoiser", part.precision, runs)


def tried(of: CertificationTarget) -> ComparisonResult:
    return run_comparisons(block(of, CATALOGUE["linear-gelu"]), "cpu", time.monotonic() + 100)


@pytest.mark.parametrize(
    ("name", "component"),
    [("svd", "unet"), ("stepvideo", "denoiser"), ("opensora-1.2", "denoiser"),
     ("cogvideox", "transformer")],
)  # fmt: skip
def test_what_a_rank_gives_its_modules_is_whole_without_the_others(
    name: str, component: str, tiny_models: Callable[[str], Path]
) -> None:
    """A first block got all tokens, and norms asked ranks that are not there for statistics."""
    asked = families.asked(name, model=str(tiny_models(name)), num_devices=3)
    prepared = prepare(everyframe.Request(device="cpu", dtype="fp32", **asked))
    runs = [run for run in prepared.fitted.runs if run.stage_call.component == component]
    of = Certificates(prepared.plan.device, 1).subject(component, FLOAT32, runs)
    paths = ("native-norm", "native-gate", "native-rope")
    kinds: list[Callable[[nn.Module], Iterable[str]]] = [partial(places, path) for path in paths]
    if name == "cogvideox":
        kinds.append(apply.block_names)
    for names in kinds:
        for each in blocks_of(of, names):
            result = each.given.call(each.alone(()))
            tensors = tensors_in(result)
            assert tensors, each.name
            assert all(tensor.isfinite().all() for tensor in tensors), each.name
            again = tensors_in(each.given.call(each.alone(())))
            assert all(map(torch.equal, tensors, again)), each.name


def test_each_kind_of_block_is_there_once_with_what_it_is_given(model: str) -> None:
    found = list(blocks_of(subject(model)))
    assert [(each.name, each.count) for each in found] == [
        ("spatial_blocks.0", 2), ("temporal_blocks.0", 2),
    ]  # fmt: skip
    stream = found[0].given.args[0]
    # Two branches of guidance, one latent frame of 1 x 2 patches, 32 channels.
    assert stream.shape == (2, 1, 2, 32)
    # The dry run itself does not mind the mode that it is asked in.
    clashes = prepare(everyframe.Request(prompt="a", model=model, **SIZES)).plan.dtype_errors
    assert clashes == ()
    assert stream.isfinite().all()
    assert all(p.isfinite().all() for p in found[0].module.parameters())


def test_a_block_in_half_precision_keeps_its_islands(model: str) -> None:
    of = subject(model, "bf16")
    found = next(blocks_of(of))
    fast = found.alone(()).blocks[0]
    assert fast.get_parameter("scale_shift_table").dtype == torch.float32
    assert fast.get_parameter("mlp.fc1.weight").dtype == torch.bfloat16
    # The stream is wide, what comes of the text is not, in the run and here.
    assert found.given.args[0].dtype == torch.float32
    assert found.given.args[2].keys.dtype == torch.bfloat16
    assert found.wide.args[2].keys.dtype == torch.float32


def test_a_right_swap_is_right(model: str) -> None:
    outcome = tried(subject(model))
    assert outcome.is_right
    # Not the plain way twice, which would differ by nothing.
    assert 0 < outcome.error < 1e-5


def test_a_swap_that_leaves_something_out_is_wrong(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def careless(module: nn.Module, inside: tuple[str, ...]) -> None:
        assert inside, "there is a block to put it on"
        for name in inside:
            mlp = module.get_submodule(name).get_submodule("mlp")
            mlp.register_module("act", nn.Identity())

    monkeypatch.setitem(apply._SWAPS, "linear-gelu", careless)
    outcome = tried(subject(model))
    assert not outcome.is_right
    assert outcome.error > 1e-3
    assert outcome.worst.startswith("block spatial_blocks.0, one of 2")


def test_a_component_without_blocks_has_nothing_to_be_tried_on(model: str) -> None:
    of = subject(model)
    bare = CertificationTarget(
        "denoiser", of.device, 1, Precision("float32", "float32"), "plan", "device"
    )
    with pytest.raises(ValueError, match="nothing that it could be tried on"):
        tried(bare)


@pytest.mark.slow
@pytest.mark.skipif(bool(missing := why_not()), reason=str(missing))
def test_a_compiled_block_of_a_model_follows_whatever_changes(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real compiler on the real block: another shape, scalar or weight is never an old graph's.

    It computes in float32 what the block does, in another order of sums.
    """
    # Of its own: a compiler that was killed elsewhere leaves half a library in the one of all.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    first = next(blocks_of(subject(model)))
    larger = next(blocks_of(subject(model, size="48x32", num_frames=5)))
    plain, compiled = first.alone(()), first.alone(("compile",))
    assert is_compiled(compiled.blocks[0])
    seen: list[Any] = []

    def check(given: Any) -> None:
        want = plain(*given.args, **given.kwargs)
        assert relative_error(compiled(*given.args, **given.kwargs), want) < 1e-5
        assert not seen or relative_error(want, seen[-1]) > 1e-3
        seen.append(want)

    check(first.given)
    check(larger.given)  # other shapes, and back
    check(first.given)
    for each in (plain, compiled):
        each.blocks[0].get_parameter("mlp.fc2.weight").mul_(3)  # the same memory, other numbers
    check(first.given)
    for each in (plain, compiled):
        each.blocks[0].get_submodule("norm1").eps = 2.0  # a number of its own
    check(first.given)
    for each in (plain, compiled):
        layer = each.blocks[0].get_submodule("mlp.fc2")
        layer.bias = nn.Parameter(torch.ones_like(layer.bias), requires_grad=False)  # another one
    check(first.given)


def test_large_inputs_are_cut_together() -> None:
    """Latents beside what is made of them keep their place; of tokens, those alone are cut."""
    frames, latents, time_B = (torch.empty(size, device="meta") for size in (
        (1, 64, 9, 96, 160), (1, 16, 3, 12, 20), (1, 8)))  # fmt: skip
    found = reduced(BlockInputs((frames, latents), {}), 2**18)
    assert [each.shape for each in found.args] == [(1, 64, 5, 6, 160), (1, 16, 2, 1, 20)]
    assert reduced(BlockInputs((frames, time_B), {}), 2**18).args[0] is frames
    tokens, text = (torch.empty(1, size, 64, device="meta") for size in (8192, 64))
    beside, tables = (torch.empty(1, 8192, n, 64, device="meta") for n in (6, 1))
    found = reduced(BlockInputs((tokens, text, beside, (tables,)), {}), 2**18)
    *seen, (positions,) = found.args
    assert [tuple(each.shape) for each in (*seen, positions)] == [
        (1, 4096, 64), (1, 64, 64), (1, 4096, 6, 64), (1, 4096, 1, 64),
    ]  # fmt: skip


def test_a_table_of_positions_is_cut_with_its_places() -> None:
    heads = torch.empty(2, 24, 4000, 64, device="meta")
    table = RotaryTable(*(torch.empty(4000, 64, device="meta") for _ in range(2)))
    found = reduced(BlockInputs((heads, table), {}), 2**18)
    assert found.args[0].shape == (2, 24, 63, 64)
    assert [each.shape for each in found.args[1]] == [(63, 64)] * 2


class FramesOverTime(nn.Module):
    """As decoders have it: a convolution of frames, and one over time after it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.space = nn.Conv2d(channels, channels, 3, padding=1)
        self.time = nn.Conv3d(channels, channels, (3, 1, 1), padding=(1, 0, 0))

    def forward(self, x_TCHW: torch.Tensor) -> torch.Tensor:
        frames: torch.Tensor = self.time(self.space(x_TCHW).transpose(0, 1)[None])
        return frames


@pytest.mark.parametrize(("channels", "is_last"), [(64, True), (4, False)])
def test_a_convolution_over_time_is_tried_in_the_layout_that_winograd_gives(
    channels: int, is_last: bool
) -> None:
    """On another, bfloat16 gained 4 % in the trial of SVD's decoder and lost 13 % in the run."""
    with torch.device("meta"):
        whole, frames = FramesOverTime(channels), torch.empty(8, channels, 16, 16)
    call: Any = SimpleNamespace(
        module=lambda: whole,
        dry_run=lambda *_: whole(frames),
        call=SimpleNamespace(is_foreign=False),
    )
    of = CertificationTarget("vae", DeviceFacts("a CPU", "cpu", None, 1, 1), 1, FLOAT32, "", "")
    found = list(blocks_of(replace(of, calls=(call,)), partial(places, "temporal-conv")))
    assert [each.name for each in found] == ["time"]
    (given,) = tensors_in(found[0].given.args)
    assert given.is_contiguous(memory_format=torch.channels_last_3d) == is_last
    (wide,) = tensors_in(found[0].wide.args)
    is_wide_last = wide.is_contiguous(memory_format=torch.channels_last_3d)
    assert not is_wide_last, "what it is compared with stays as torch gives it"
