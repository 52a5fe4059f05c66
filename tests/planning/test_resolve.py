"""From request and facts to a plan: nothing loaded, and no for an answer where memory ends."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import everyframe
from everyframe.checkpoints import tensor_file
from everyframe.core.errors import (
    CannotRunError,
    CheckpointError,
    DeviceLostError,
    ExitCode,
    InputError,
)
from everyframe.core.facts import DeviceFacts, MachineFacts, Throughput
from everyframe.hardware import throughput
from everyframe.ops.modulation import GatedAdd
from everyframe.planning import dry_runs
from everyframe.planning import resolve as resolver

SIZES: dict[str, Any] = {"size": "16x16", "num_frames": 3, "num_inference_steps": 2, "seed": 5}
RATES = Throughput((("float32", 1e11),), memory=1e10, load=1e9, source="made up")
CPU = DeviceFacts("made-up processor", "cpu", None, 64 * 10**9, 64 * 10**9, rates=RATES)
CARD = DeviceFacts(
    "made-up card", "cuda", 0, 80 * 10**9, 80 * 10**9, (9, 0), True, True, rates=RATES
)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts made-up devices in this machine's place."""

    def put(*devices: DeviceFacts, cores: int = 4) -> None:
        processor = () if devices[-1].kind == "cpu" else (CPU,)
        facts = MachineFacts((*devices, *processor), cores, {})
        monkeypatch.setattr(resolver, "machine_facts", lambda device="auto", freed=None: facts)

    return put


@pytest.fixture
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(tensor_file, "read_entry", never)


@pytest.mark.usefixtures("nothing_is_loaded")
def test_a_plan_reads_no_tensor(model: str) -> None:
    plan = everyframe.plan("a", model=model, **SIZES)
    assert [part.name for part in plan.components] == ["text_encoder", "denoiser", "vae"]
    assert plan.settings.seed == 5
    assert plan.infeasible is None
    assert plan.peak_bytes == max(part.peak_bytes for part in plan.components)
    assert all(part.peak_bytes > part.weight_bytes > 0 for part in plan.components)


def test_a_prompt_that_is_too_long_is_reported_before_a_run(model: str) -> None:
    """By the tokenizer, as a run tells it; `test_stages` of each family has the run's."""
    long = "a red circle " * 7 + "a " + "left " * 16
    with pytest.raises(InputError, match=r"has 46 tokens, this model reads 24;.*cuts: 'left"):
        everyframe.plan(long, model=model, **SIZES)
    with pytest.raises(InputError, match="this model reads 24"):
        everyframe.plan("a", model=model, negative_prompt=long, **SIZES)
    plan = everyframe.plan(long, model=model, truncate_prompt=True, **SIZES)
    assert [note for note in plan.notes if "its end is cut: 'left" in note]


def test_the_same_request_has_the_same_plan_and_no_seed_means_any(model: str) -> None:
    free = {name: value for name, value in SIZES.items() if name != "seed"}
    drawn = {everyframe.plan("a", model=model, **free).settings.seed for _ in range(4)}
    assert len(drawn) > 1
    one = everyframe.plan("a", model=model, **SIZES)
    assert one.settings == everyframe.plan("a", model=model, **SIZES).settings


@pytest.mark.parametrize(
    ("device", "asked", "parts"),
    [
        (CPU, "auto", ["float32", "float32", "float32"]),
        (CARD, "auto", ["bfloat16", "bfloat16", "float32"]),
        (CARD, "fp32", ["float32", "float32", "float32"]),
        (replace(CARD, has_fast_bf16=False), "auto", ["float16", "float16", "float32"]),
        (CPU, "bf16", ["bfloat16", "bfloat16", "bfloat16"]),
    ],
)
def test_precision_follows_the_device(
    machine: Callable[..., None], model: str, device: DeviceFacts, asked: str, parts: list[str]
) -> None:
    machine(device)
    plan = everyframe.plan("a", model=model, dtype=asked, **SIZES)
    assert [part.precision.compute for part in plan.components] == parts
    assert {part.device for part in plan.components} == {device.torch_name}


def test_threads(machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    machine(CPU, cores=6)
    for variable, expected in (("", 6), ("2", 2), ("64", 6), ("0", 6), ("2,2", 2), ("²", 6)):
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
        assert everyframe.plan("a", model=model, **SIZES).num_threads == expected


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_is_loaded")
def test_too_little_memory_is_reported_before_anything_is_loaded_and_what_fits_does(
    machine: Callable[..., None], model: str
) -> None:
    roomy = everyframe.plan("a", model=model, resolution="360p", num_frames=102)
    machine(replace(CPU, free_memory=roomy.peak_bytes // 8))
    wanted = {"model": model, "num_frames": 102, "resolution": "360p"}
    plan = everyframe.plan("a", **wanted)
    assert plan.infeasible is not None
    with pytest.raises(CannotRunError) as error:
        everyframe.generate("a", **wanted)
    assert str(error.value) == plan.infeasible
    assert error.value.exit_code == ExitCode.CANNOT_RUN_HERE == 3
    assert "not enough memory: the video autoencoder needs about" in plan.infeasible
    found = re.search(r"--size (\d+x\d+) --num-frames (\d+)", plan.infeasible)
    assert found is not None
    fitting = everyframe.plan("a", model=model, size=found[1], num_frames=int(found[2]))
    assert fitting.infeasible is None
    # The largest: a quarter of the memory more than it needs is not left unused.
    assert fitting.peak_bytes > roomy.peak_bytes / 8 / 4


def test_where_nothing_fits_another_device_or_model_is_named(
    machine: Callable[..., None], model: str
) -> None:
    machine(replace(CARD, free_memory=1000), CPU)
    obstacle = everyframe.plan("a", model=model, **SIZES).infeasible
    assert obstacle is not None
    assert "it would fit on cpu (--device cpu)" in obstacle
    # A limit is for that device too, and another card has no other host.
    obstacle = everyframe.plan("a", model=model, **SIZES, max_memory="1kB").infeasible
    assert obstacle is not None
    assert "no smaller video of this model fits" in obstacle
    machine(CARD, replace(CARD, index=1), CPU)
    obstacle = everyframe.plan("a", model=model, **SIZES, max_host_memory="1kB").infeasible
    assert obstacle is not None
    assert "the host would hold" in obstacle
    assert "no smaller video of this model fits" in obstacle
    machine(replace(CPU, free_memory=1000))
    obstacle = everyframe.plan("a", model=model, **SIZES).infeasible
    assert obstacle is not None
    assert "no smaller video of this model fits" in obstacle


def test_what_is_asked_wrongly(model: str) -> None:
    for options, text in (
        ({"num_stepz": 3}, "there is no option 'num_stepz'; did you mean 'num_"),
        ({"asthetic": 3}, "there is no option 'asthetic'; did you mean 'aesthetic'"),
        ({"device": "cuda:7"}, "device 'cuda:7'"),
        ({"model": "opensora-1.3"}, "this is Open-Sora 1.3; supported: 1.0, 1.2"),
        ({"model": "opensora-12"}, "did you mean 'opensora-1.2'"),
        ({"model": "somebody/something"}, "is not on this disk"),
    ):
        with pytest.raises(InputError, match=re.escape(text)):
            everyframe.plan("a", **{"model": model, **SIZES, **options})


def test_a_checkpoint_of_no_family(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"foreign.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"a model of no family.*Open-Sora 1\.0 and 1\.2"):
        everyframe.plan("a", model=str(tmp_path))


def test_a_card_that_is_lost_is_not_blamed_on_the_checkpoint(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")

    monkeypatch.setattr(resolver, "machine_facts", fail)
    with pytest.raises(DeviceLostError, match="a device was lost while the run was planned"):
        everyframe.plan("a", model=model, **SIZES)


@pytest.mark.parametrize("profile", ["cpu-bf16", "cuda-sm75", "cuda-sm90", "mps", "rocm"])
def test_a_machine_that_is_not_here(model: str, profile: str) -> None:
    plan = everyframe.plan("a", model=model, profile=profile, **SIZES)
    assert plan.profile == profile
    assert plan.infeasible is None
    assert plan.dtype_errors == ()
    assert plan.num_operations > 500
    assert [stage.name for stage in plan.stages] == ["text", "denoise", "decode"]
    assert plan.seconds == sum(stage.seconds or 0 for stage in plan.stages)
    assert plan.seconds > 0
    assert "maker's peak" in plan.rates


def test_a_clash_is_an_obstacle_that_names_the_place(
    monkeypatch: pytest.MonkeyPatch, model: str, tmp_path: Path
) -> None:
    def forward(self: Any, x: torch.Tensor, branch: torch.Tensor, gate: torch.Tensor) -> Any:
        return torch.lerp(x, branch, 0.5)  # wants one dtype; the stream is float32

    monkeypatch.setattr(GatedAdd, "forward", forward)
    # What was done before was done with other code, and what is done now is for nobody else.
    monkeypatch.setattr(dry_runs, "_DONE", {})
    monkeypatch.setenv("EVERYFRAME_CACHE", str(tmp_path))
    card = everyframe.plan("a", model=model, profile="cuda-sm90", **SIZES)
    assert card.dtype_errors[0].startswith("denoiser: spatial_blocks.0.add_attn: lerp: operands in")
    assert card.infeasible is not None
    assert "it would fail on NVIDIA H100" in card.infeasible
    assert "spatial_blocks.0.add_attn" in card.infeasible
    # In float32 there is nothing to clash.
    wide = everyframe.plan("a", model=model, profile="cuda-sm90", dtype="fp32", **SIZES)
    assert wide.infeasible is None
    monkeypatch.undo()


def test_a_dtype_that_a_device_emulates_is_noted(model: str) -> None:
    plan = everyframe.plan("a", model=model, profile="cuda-sm70", dtype="bf16", **SIZES)
    assert plan.infeasible is None
    assert any("emulated" in note and "Tesla V100" in note for note in plan.notes)


def test_fp16_on_a_cpu_is_refused_unless_forced(machine: Callable[..., None], model: str) -> None:
    slow = replace(RATES, products=(("float32", 1e11), ("float16", 1e9)))
    machine(replace(CPU, rates=slow))
    with pytest.raises(InputError, match=r"up to 100 times as long.*--force"):
        everyframe.plan("a", model=model, dtype="fp16", **SIZES)
    forced = everyframe.plan("a", model=model, dtype="fp16", force=True, **SIZES)
    assert {part.precision.compute for part in forced.components} == {"float16"}
    machine(replace(CPU, rates=replace(RATES, products=(("float32", 1e11), ("float16", 2e11)))))
    plan = everyframe.plan("a", model=model, dtype="fp16", **SIZES)
    assert {part.precision.compute for part in plan.components} == {"float16"}


def test_fp16_on_the_cpu_that_is_here_is_tried(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """The line about it is what was measured, whatever its flags are."""
    speeds = {"float32": 1e9, "float16": 1e9}
    monkeypatch.setattr(throughput, "_rate", lambda product, *rest: (speeds[product.dtype],))
    asked = {"model": model, "dtype": "fp16", "device": "cpu", **SIZES}
    notes = everyframe.plan("a", **asked).notes
    assert not any("as long as float32" in note for note in notes)
    speeds["float16"] = 1e9 / 37
    with pytest.raises(InputError, match="was tried and takes up to 37 times as long as float32"):
        everyframe.plan("a", **asked)


def test_more_ranks_than_a_cpu_has_memory_for(machine: Callable[..., None], model: str) -> None:
    """Each is a process that takes 305 MB before it holds anything of a model."""
    machine(replace(CPU, free_memory=8 * 10**9))
    few = everyframe.plan("a", model=model, num_devices=4, **SIZES)
    assert few.infeasible is None
    assert few.device.free_memory == 8 * 10**9 - 4 * 305 * 10**6
    many = everyframe.plan("a", model=model, num_devices=200, **SIZES)
    assert many.infeasible is not None
    assert "200 processes take about 61.0 GB for themselves" in many.infeasible
    assert "has 8.0 GB free; give fewer devices, 23 at most" in many.infeasible
    # What is set as a limit is one for what ranks compute with.
    some = everyframe.plan("a", model=model, num_devices=4, max_memory="5GB", **SIZES)
    assert some.device.free_memory == 5 * 10**9
    less = everyframe.plan("a", model=model, num_devices=4, max_memory="200kB", **SIZES)
    assert less.infeasible is not None
    needs = r"needs .* on each of 4 ranks, .* in all, .*fewer devices take"
    assert re.search(needs, less.infeasible)


@pytest.mark.slow
def test_no_more_memory_than_was_allowed(machine: Callable[..., None], model: str) -> None:
    machine(CARD)
    wanted = {"model": model, "num_frames": 34, "size": "256x256", "seed": 5}
    roomy = everyframe.plan("a", **wanted)
    assert roomy.settings.savings == ()
    most = int(roomy.peak_bytes * 0.6 / 0.92)
    plan = everyframe.plan("a", max_memory=f"{most}", **wanted)
    assert plan.infeasible is None
    assert plan.settings.saving("vae_frames", 4) < 4
    assert plan.peak_bytes < most
    assert any("frames are encoded and decoded" in note for note in plan.notes)
    # And what was asked of the host holds as well.
    tight = everyframe.plan("a", max_host_memory="1MB", **wanted)
    assert tight.infeasible is not None
    assert "the host would hold" in tight.infeasible
    with pytest.raises(InputError, match="max_memory must be an amount"):
        everyframe.plan("a", max_memory="a lot", **wanted)


def test_rates_are_measured_for_the_device_that_is_here(model: str) -> None:
    plan = everyframe.plan("a", model=model, device="cpu", **SIZES)
    assert plan.rates == "measured here"
    assert all(stage.seconds is not None and stage.seconds > 0 for stage in plan.stages)


def test_a_width_that_no_machine_holds_is_not_tried_on_this_one(
    tiny_models: Callable[[str], Path], tmp_path: Path
) -> None:
    """Times are forecast from the largest products, whose weights alone have a terabyte."""
    folder = shutil.copytree(tiny_models("opensora2-dcae"), tmp_path / "wide")
    path = folder / "google" / "t5-v1_1-xxl" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "d_kv": 10**9}))
    plan = everyframe.plan("a red circle", model=str(folder), size="32x32", num_frames=8)
    assert plan.infeasible is not None
    assert "not enough memory: the T5 text encoder needs about" in plan.infeasible
    assert any("is not forecast" in note for note in plan.notes)
