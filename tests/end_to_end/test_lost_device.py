"""A device that is lost in a run: the error names it, the state stays good, the run resumes.

From the first error on every call of a device fails, also of what cleans up (`dying_device`). What
errors are taken for a loss is in `tests/hardware/test_device_loss.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import everyframe
from everyframe.core.errors import CannotRunError, DeviceLostError, WorkerDiedError
from everyframe.core.events import Event, Step
from everyframe.engine import run
from everyframe.engine.resumption import resume
from everyframe.engine.workers import launcher
from everyframe.engine.workers.launcher import run_in_workers
from everyframe.engine.workers.worker_process import WorkerJob, receive, send
from everyframe.families.opensora import stdit3, vae
from everyframe.runs.folder import all_runs
from everyframe.runs.run_state import EVERY_STEP, SaveOptions
from everyframe.runs.tensor_store import TensorStore
from everyframe.runtime.stages.guard import Guard
from helpers.events import steps
from helpers.guard_modules import Net, halved, inputs, plan, scaled
from helpers.interrupted_runs import OPEN_SORA, begun, same
from helpers.lost_device import ADVICE, Device, dying_device
from helpers.tiny_checkpoints import pipelines as tiny_pipelines

PLANTED = Path(__file__).parents[1] / "helpers" / "planted"


def broken(root: Path, model: str, owner: type, name: str, stage: str, after: int) -> str:
    """The error when the device dies in that method, after so many steps of a stage."""

    def until_it_dies(device: Device, patch: pytest.MonkeyPatch) -> None:
        for event in begun(root, model=model, **OPEN_SORA):
            if isinstance(event, Step) and (event.stage, event.step) == (stage, after):
                patch.setattr(owner, name, lambda *_, **__: device.die())

    with (
        dying_device() as device,
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(DeviceLostError) as raised,
    ):
        until_it_dies(device, patch)
    return str(raised.value)


@pytest.mark.parametrize(
    ("owner", "name", "after", "where", "left"),
    [
        pytest.param(stdit3.STDiT3, "forward", 2, "after step 2 of denoise", [3], id="denoiser"),
        pytest.param(TensorStore, "keep", 1, "after step 1 of denoise", [2, 3], id="state"),
        pytest.param(vae.VideoVAE, "decode_piece", 3, "in decode", [], id="decoder"),
    ],
)
def test_the_state_stays_good(
    model: str, whole: list[Event], tmp_path: Path, owner: type, name: str, after: int,
    where: str, left: list[int], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("EVERYFRAME_RUNS", str(tmp_path))
    text = broken(tmp_path, model, owner, name, "denoise", after)
    (folder,) = all_runs(tmp_path)
    device = whole[0].plan.device  # type: ignore[attr-defined]
    assert text.startswith(
        f"cpu ({device.name}) was lost {where} (CUDA error: uncorrectable ECC error encountered): "
    )
    assert "nvidia-smi -q -d ECC" in text
    assert text.endswith(f"everyframe resume {folder.name}")
    again = list(resume.resume_run(folder))
    same(whole, again)
    assert steps(again) == left
    assert not list(all_runs(tmp_path))


@pytest.mark.slow
def test_a_pipeline_s_own_call_hides_nothing(tmp_path: Path) -> None:
    """What it raises of a lost device is no failure of the pipeline."""
    tiny_pipelines.wan(tmp_path / "wan")
    request = everyframe.Request(
        model=str(tmp_path / "wan"), prompt="a red circle", seed=1, num_inference_steps=2,
        **tiny_pipelines.CALLS["wan"],
    )  # fmt: skip
    left = 3

    def dies(module: nn.Module, *_: Any) -> None:
        nonlocal left
        if type(module).__name__ == "WanTransformerBlock" and not next(module.parameters()).is_meta:
            left -= 1
            if left == 0:
                device.die()

    with dying_device() as device:
        hook = nn.modules.module.register_module_forward_pre_hook(dies)
        try:
            with pytest.raises(DeviceLostError, match=r"ECC .*everyframe resume"):
                list(run.stream(request, keep=SaveOptions(tmp_path / "runs", pace=EVERY_STEP)))
        finally:
            hook.remove()
    assert len(list(all_runs(tmp_path / "runs"))) == 1


def test_a_loss_while_repairing_is_no_fault_of_a_precision() -> None:
    """After the first module was raised its parts must not be raised one after the other."""
    net = halved(Net(scaled(nn.Linear(8, 8), 1e4), nn.Linear(8, 8), nn.Linear(8, 8)))
    guard, calls = Guard(plan(), "denoise", {"net": net}), 0

    def compute() -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:  # the fault was found by the second, and a module raised for this one
            device.die()
        return net(1e3 * inputs())

    with dying_device() as device, pytest.raises(torch.AcceleratorError, match="uncorrectable ECC"):
        guard.call(1, compute)
    assert calls == 3
    assert not list(guard.events())


@pytest.mark.slow
def test_a_device_that_refuses_a_call_is_there(model: str, tmp_path: Path) -> None:
    def refuses(*_: Any, **__: Any) -> Any:
        message = "CUDA error: no kernel image is available for execution on the device"
        raise torch.AcceleratorError(message + ADVICE)

    everyframe.plan(
        model=model, **OPEN_SORA
    )  # so that the run needs no dry run, which calls it too
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stdit3.STDiT3, "forward", refuses)
        with pytest.raises(CannotRunError, match=r"refused a call .*everyframe doctor"):
            list(begun(tmp_path, model=model, **OPEN_SORA))


@pytest.fixture
def launching(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The error of workers with such a fault; their run is saved and resumes."""
    path = os.pathsep.join([str(PLANTED), os.environ["PYTHONPATH"]])
    monkeypatch.setenv("PYTHONPATH", path)

    def launching(fault: str, rank: int | None = None, **options: Any) -> str:
        monkeypatch.setenv("PLANTED", fault)
        if rank is not None:
            monkeypatch.setenv("PLANTED_RANK", str(rank))
        request = everyframe.Request(model=model, **OPEN_SORA, **options)
        job = WorkerJob(request, root=tmp_path, pace=(EVERY_STEP.pause, EVERY_STEP.share))
        with pytest.raises(WorkerDiedError) as died:
            list(run_in_workers(job.of_ranks(request.num_ranks)))
        (kept,) = all_runs(tmp_path)
        assert str(died.value).count(f"everyframe resume {kept.name}") == 1
        return str(died.value)

    return launching


@pytest.mark.slow
def test_in_a_worker(launching: Callable[..., str], whole: list[Event], tmp_path: Path) -> None:
    text = launching("lost:STDiT3:3")
    assert "was lost after step 2 of denoise (CUDA error: uncorrectable ECC error" in text
    (kept,) = all_runs(tmp_path)
    again = list(resume.resume_run(kept))
    same(whole, again)
    assert steps(again) == [3]


@pytest.mark.slow
def test_on_one_rank_of_several(launching: Callable[..., str]) -> None:
    """The other has lost a peer, and leaves the word to it."""
    text = launching("lost:STDiT3:3", rank=1, num_devices=2)
    assert "cpu of rank 1 (" in text
    assert "uncorrectable ECC" in text


@pytest.mark.slow
def test_a_watchdog_that_ends_its_process_says_why(launching: Callable[..., str]) -> None:
    text = launching("watchdog:STDiT3:3")
    assert "died of SIGABRT in step" in text
    assert "its device was lost (Process group watchdog: CUDA error: an illegal memory" in text
    assert "no known issue" not in text


def test_the_rank_whose_device_was_lost_has_the_word() -> None:
    """Also where another's word, that it lost a peer, is heard before."""
    ours, theirs = zip(*(Pipe() for _ in range(2)), strict=True)
    workers: list[Any] = [
        SimpleNamespace(
            connection=each,
            receive=partial(receive, each),
            has_died=lambda: False,
            job=SimpleNamespace(weights=(1,), rank=0),
        )
        for each in ours
    ]
    for each, name in zip(theirs, ("PeerLostError", "DeviceLostError"), strict=True):
        send(each, "error", {"class": name, "text": f"{name} of a rank"})
        each.close()
    with pytest.raises(DeviceLostError, match="DeviceLostError of a rank"):
        list(launcher._events(workers))
