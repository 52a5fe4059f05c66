"""A repair of one run is in the plan and record of the next, with a note; it can be forgotten."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

import everyframe
from everyframe.cli.main import main
from everyframe.core.errors import InputError
from everyframe.core.events import Event, FramesDecoded, Note, Planned, Repaired, VideoDone
from everyframe.core.request import Request
from everyframe.engine import tracing
from everyframe.hardware import cpu as cpu_module
from helpers import fake_cpus
from helpers.tiny_checkpoints import opensora as tiny_opensora

FAULTY = "spatial_blocks.0.mlp.fc1"
#: What comes after it is given what it made, which float16 can't hold.
RAISED = [FAULTY, "spatial_blocks.0.mlp.fc2"]
ASKED: dict[str, Any] = {
    "prompt": "a red circle", "size": "32x32", "num_frames": 1, "num_inference_steps": 2, "seed": 3,
    "dtype": "float16", "force": True, "device": "cpu", "guidance_scale": 1,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint one of whose weights is as large as float16 just holds."""
    monkeypatch.setenv("EVERYFRAME_CACHE", str(tmp_path / "cache"))
    made = tiny_opensora.opensora_1_2(tmp_path / "model")
    file = made / "model.safetensors"
    tensors = load_file(file)
    weight = tensors[f"{FAULTY}.weight"]
    weight.mul_(6e4 / weight.abs().max())
    save_file(tensors, file, metadata={"format": "pt"})
    return made


class Run:
    """A run's frames, repairs, notes and record."""

    def __init__(self, events: list[Event]) -> None:
        self.frames = np.concatenate([e.frames for e in events if isinstance(e, FramesDecoded)])
        self.repairs = [e for e in events if isinstance(e, Repaired)]
        self.notes = [e.text for e in events if isinstance(e, Note)]
        (self.done,) = [e for e in events if isinstance(e, VideoDone)]
        parts = self.done.record["plan"]["components"]
        self.begun_with = [each["module"] for part in parts for each in part["repairs"]]


def run(folder: Path, **more: Any) -> Run:
    return Run(list(everyframe.stream(Request(model=str(folder), **{**ASKED, **more}))))


def again(run: Run, folder: Path) -> Run:
    """From its record."""
    from everyframe.engine.records.recorded_request import request_from

    request = request_from(run.done.record, {"model": str(folder), "force": True})
    return Run(list(everyframe.stream(request)))


@pytest.mark.parametrize(
    ("cpu", "wide", "more_bytes"),
    [("avx2", "float32", 2), pytest.param("amx", "bfloat16", 0, marks=pytest.mark.slow)],
)
def test_a_repair_is_remembered_recorded_and_forgotten(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpu: str, wide: str,
    more_bytes: int,
) -> None:  # fmt: skip
    """It is in bfloat16, which has the range, where the CPU has instructions for that."""
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.setattr(cpu_module, "_PROC", fake_cpus.proc_with(cpu, tmp_path / "proc"))
    first = run(folder)
    assert [each.target for each in first.repairs] == RAISED
    assert first.begun_with == []

    plan = everyframe.plan(model=str(folder), **ASKED)
    note, _ = [note for note in plan.notes if "repairs" in note]
    assert f"denoiser.{FAULTY} runs in {wide}" in note
    assert "--forget-repairs" in note
    narrow = everyframe.plan(model=str(folder), **ASKED, forget_repairs=True)
    wider = plan.component("denoiser").weight_bytes - narrow.component("denoiser").weight_bytes
    tensors = load_file(folder / "model.safetensors")
    inside = [name for name in tensors if name.rpartition(".")[0] in RAISED]
    assert wider == more_bytes * sum(tensors[name].numel() for name in inside)

    second = run(folder)
    assert second.repairs == []
    assert second.begun_with == RAISED
    assert note in second.notes
    # In another precision there is nothing to repair.
    assert everyframe.plan(model=str(folder), **{**ASKED, "dtype": "fp32"}).notes == ()

    # A record makes the same bits, whatever is remembered by then.
    assert np.array_equal(again(first, folder).frames, first.frames)
    assert [each.target for each in again(first, folder).repairs] == RAISED
    third = run(folder, forget_repairs=True)
    assert any("saved repairs of this model" in note for note in third.notes)
    assert [each.target for each in third.repairs] == RAISED
    assert "forget_repairs" not in third.done.record["request"]
    run(folder, forget_repairs=True)
    assert np.array_equal(again(second, folder).frames, second.frames)
    assert again(second, folder).begun_with == RAISED


def test_a_trace_of_modules_repaired_from_the_start_is_of_the_same_weights(
    folder: Path, tmp_path: Path
) -> None:
    """They were rounded to float16 before they were widened, and are compared as such."""
    run(folder)

    def traced(name: str, **more: Any) -> Path:
        request = Request(model=str(folder), **{**ASKED, **more})
        (planned,) = [e for e in tracing.record(request, tmp_path / name) if isinstance(e, Planned)]
        repairs = [r.module for part in planned.plan.components for r in part.repairs]
        assert repairs == ([] if more else RAISED)
        return tmp_path / name

    verdict = everyframe.trace_diff(traced("half.trace"), traced("wide.trace", dtype="fp32"))
    assert verdict.is_explained, verdict.place
    assert verdict.compared.largest > 1e-5


def test_the_command_line_says_and_forgets(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--size 32x32 --num-frames 1 --steps 2 --dtype fp16 --force --device cpu --model"
    words = ["a red circle", *options.split(), str(folder)]
    run(folder)
    assert main(["plan", *words]) == 0
    assert FAULTY in " ".join(capsys.readouterr().out.split())
    assert main(["plan", *words, "--forget-repairs"]) == 0
    assert FAULTY not in " ".join(capsys.readouterr().out.split())
    assert main(["plan", *words]) == 0, "a plan forgets nothing"
    assert FAULTY in " ".join(capsys.readouterr().out.split())


def test_a_record_of_another_model_is_refused(folder: Path) -> None:
    from everyframe.engine.records.recorded_request import request_from

    record = run(folder).done.record
    part = record["plan"]["components"][1]
    assert part["name"] == "denoiser"
    part["repairs"] = [
        {"component": "denoiser", "module": "nowhere", "to": "float32", "dtype": "float16"}
    ]
    with pytest.raises(InputError, match=r"denoiser\.nowhere is to run in float32"):
        list(everyframe.stream(request_from(record, {"model": str(folder), "force": True})))
    part["repairs"] = [{"module": 3}]
    with pytest.raises(InputError, match=r"the record can't be read: plan\.components\.repairs"):
        request_from(record, {"model": str(folder), "force": True})
