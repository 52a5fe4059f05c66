"""From request and facts to a plan: nothing loaded, and no for an answer where memory ends."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import everyframe
import tiny
from everyframe.checkpoints import tensors
from everyframe.core.errors import CannotRunError, CheckpointError, ExitCode, InputError
from everyframe.core.facts import DeviceFacts, MachineFacts, Rates
from everyframe.planning import resolve as resolver

SIZES: dict[str, Any] = {"size": "16x16", "num_frames": 3, "num_inference_steps": 2, "seed": 5}
RATES = Rates((("float32", 1e11),), memory=1e10, load=1e9, source="made up")
CPU = DeviceFacts("made-up processor", "cpu", None, 64 * 10**9, 64 * 10**9, rates=RATES)
CARD = DeviceFacts(
    "made-up card", "cuda", 0, 80 * 10**9, 80 * 10**9, (9, 0), True, True, rates=RATES
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.opensora_1_2(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts made-up devices in this machine's place."""

    def put(*devices: DeviceFacts, cores: int = 4) -> None:
        processor = () if devices[-1].kind == "cpu" else (CPU,)
        facts = MachineFacts((*devices, *processor), cores, {})
        monkeypatch.setattr(resolver, "machine_facts", lambda device="auto": facts)

    return put


@pytest.fixture
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(tensors, "read_entry", never)


@pytest.mark.usefixtures("nothing_is_loaded")
def test_a_plan_reads_no_tensor(model: str) -> None:
    plan = everyframe.plan("a", model=model, **SIZES)
    assert [part.name for part in plan.components] == ["text_encoder", "denoiser", "vae"]
    assert plan.settings.seed == 5
    assert plan.obstacle is None
    assert plan.peak_bytes == max(part.peak_bytes for part in plan.components)
    assert all(part.peak_bytes > part.weight_bytes > 0 for part in plan.components)


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
    for variable, expected in (("", 6), ("2", 2), ("64", 6), ("0", 6), ("2,2", 6)):
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
        assert everyframe.plan("a", model=model, **SIZES).num_threads == expected


@pytest.mark.usefixtures("nothing_is_loaded")
def test_too_little_memory_is_told_before_anything_is_loaded_and_what_fits_does(
    machine: Callable[..., None], model: str
) -> None:
    roomy = everyframe.plan("a", model=model, resolution="360p", num_frames=102)
    machine(replace(CPU, free_memory=roomy.peak_bytes // 8))
    wanted = {"model": model, "num_frames": 102, "resolution": "360p"}
    plan = everyframe.plan("a", **wanted)
    assert plan.obstacle is not None
    with pytest.raises(CannotRunError) as error:
        everyframe.generate("a", **wanted)
    assert str(error.value) == plan.obstacle
    assert error.value.exit_code == ExitCode.CANNOT_RUN_HERE == 3
    assert "not enough memory: the video autoencoder needs about" in plan.obstacle
    found = re.search(r"--size (\d+x\d+) --num-frames (\d+)", plan.obstacle)
    assert found is not None
    fitting = everyframe.plan("a", model=model, size=found[1], num_frames=int(found[2]))
    assert fitting.obstacle is None
    # The largest: a quarter of the memory more than it needs is not left unused.
    assert fitting.peak_bytes > roomy.peak_bytes / 8 / 4


def test_where_nothing_fits_another_device_or_model_is_named(
    machine: Callable[..., None], model: str
) -> None:
    machine(replace(CARD, free_memory=1000), CPU)
    obstacle = everyframe.plan("a", model=model, **SIZES).obstacle
    assert obstacle is not None
    assert "it would fit on cpu (--device cpu)" in obstacle
    machine(replace(CPU, free_memory=1000))
    obstacle = everyframe.plan("a", model=model, **SIZES).obstacle
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
