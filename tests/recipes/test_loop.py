"""The training loop: a stopped run goes on as if it had not stopped; the best weights are kept."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from recipes.shapes import autoencoder, loop
from recipes.shapes.loop import Task, load_best, train
from recipes.shapes.muon import Muon
from torch import Tensor, nn


def _task(num_steps: int) -> Task:
    modules = nn.ModuleDict({"inner": nn.Linear(6, 6), "outer": nn.Linear(6, 2)})
    for number, parameter in enumerate(modules.parameters()):
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))

    def draw(step: int) -> tuple[Tensor, ...]:
        return (torch.randn(8, 6, generator=torch.Generator().manual_seed(step)),)

    def loss(x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        error = modules["outer"](modules["inner"](x).tanh()) - x[:, :2]
        return error.square().mean(), {}

    def validate(_: nn.ModuleDict) -> dict[str, float]:
        return {"score": -loss(*draw(1000))[0].item()}

    return Task(
        modules, draw, loss, validate, clips_per_step=8, num_steps=num_steps, learning_rate=0.05,
        warmup=2, ema=0.5, num_validations=3, muon=("inner",),
    )  # fmt: skip


def test_a_stopped_run_goes_on_as_if_it_had_not(tmp_path: Path) -> None:
    say: list[str] = []
    train(_task(12), tmp_path / "whole", say=say.append)
    stopped = _task(12)
    drawn = stopped.draw

    def until_six(step: int) -> tuple[Tensor, ...]:
        if step == 6:
            raise KeyboardInterrupt
        return drawn(step)

    stopped.draw = until_six
    with pytest.raises(KeyboardInterrupt):
        train(stopped, tmp_path / "parts", say=say.append)
    train(_task(12), tmp_path / "parts", say=say.append)
    whole, parts = (
        torch.load(tmp_path / name / "state.pt", weights_only=True) for name in ("whole", "parts")
    )
    for name, value in whole["modules"].items():
        assert torch.equal(value, parts["modules"][name]), name
    assert "going on from step 4" in say


def test_a_stage_ends_in_its_minutes(tmp_path: Path) -> None:
    lines: list[str] = []
    task = _task(10**9)
    best = train(task, tmp_path, say=lines.append, minutes=0.005)
    assert best.exists()
    assert "100.0%" in lines[-2]
    assert "validation" in lines[-1]


def test_time_that_runs_out_in_a_validation_leaves_a_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: now))
    task, lines = _task(10**9), list[str]()
    measure, drawn = task.validate, task.draw

    def a_second_each(step: int) -> tuple[Tensor, ...]:
        nonlocal now
        now += 1
        return drawn(step)

    def slowly(modules: nn.ModuleDict) -> dict[str, float]:
        nonlocal now
        now += 1000
        return measure(modules)

    task.draw, task.validate = a_second_each, slowly
    train(task, tmp_path, say=lines.append, minutes=0.5)
    first, last, end = lines
    assert first.startswith("step 10 validation")
    assert last.startswith("step 11 100.0%")
    assert end.startswith("step 11 validation")


@pytest.mark.gpu
def test_a_step_captured_as_a_graph_takes_the_same_steps(tmp_path: Path) -> None:
    for name, static in (("captured", True), ("eager", False)):
        task = _task(12)
        task.modules.to("cuda")
        drawn = task.draw
        task.draw = lambda step, drawn=drawn: tuple(part.cuda() for part in drawn(step))
        task.validate, task.static = lambda _: {"score": 0.0}, static
        train(task, tmp_path / name, say=lambda line: None)
    captured, eager = (
        torch.load(tmp_path / name / "state.pt", weights_only=True)
        for name in ("captured", "eager")
    )
    for name, value in captured["modules"].items():
        torch.testing.assert_close(value, eager["modules"][name])


def test_muon_and_adam_both_learn(tmp_path: Path) -> None:
    task = _task(12)
    before = task.validate(task.modules)["score"]
    kept = {name: value.clone() for name, value in task.modules.state_dict().items()}
    train(task, tmp_path, say=lambda line: None)
    assert load_best(task.modules, tmp_path)["score"] > before
    for name, value in task.modules.state_dict().items():
        assert not torch.equal(value, kept[name]), name


@pytest.mark.parametrize("shape", [(24, 10), (10, 24), (16, 16)])
def test_muon_takes_pytorchs_own_steps(shape: tuple[int, int]) -> None:
    """PyTorch's orthogonalises in bf16, of 8 bits, five times over: hence 2 % of the way."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(shape, generator=generator)
    ours, theirs = nn.Parameter(first.clone()), nn.Parameter(first.clone())
    optimizers = (
        Muon([ours], lr=0.1, weight_decay=0.1),
        torch.optim.Muon([theirs], lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
    )
    for _ in range(5):
        gradient = torch.randn(shape, generator=generator)
        for matrix, optimizer in zip((ours, theirs), optimizers, strict=True):
            matrix.grad = gradient.clone()
            optimizer.step()
    way = (theirs - first).norm()
    assert (ours - theirs).norm() < 0.02 * way


def test_cells_near_the_object_are_those_it_covers() -> None:
    pixels = -torch.ones(1, 3, 64, 64)
    pixels[:, :, 18:30, 34:38] = 1  # rows 2 and 3, column 4; column 4 begins at pixel 32
    near = autoencoder.near_cells(pixels)[0, 0]
    assert near.nonzero().tolist() == [[2, 4], [3, 4]]
    pixels[:, :, 18:30, 31] = 1  # within 2 pixels of column 4 and in column 3
    assert autoencoder.near_cells(pixels)[0, 0].sum() == 4


def test_strangeness_counts_only_cells_that_are_far() -> None:
    empty = torch.zeros(1, 4, 8, 8)
    near = torch.zeros(1, 1, 8, 8)
    near[..., 2, 2] = 1
    z = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    only_near = z * near
    assert autoencoder.strangeness(only_near, empty, near) == 0
    # All of the variance lies in cells that should be empty: the mean square over the variance.
    assert 0.8 < autoencoder.strangeness(z, empty, near) < 1.2


def test_muon_takes_a_kernel_for_the_matrix_of_its_output_channels() -> None:
    first, gradient = torch.randn(2, 6, 5, 3, 3, generator=torch.Generator().manual_seed(0))
    kernel, matrix = nn.Parameter(first.clone()), nn.Parameter(first.flatten(1).clone())
    for parameter, its in ((kernel, gradient), (matrix, gradient.flatten(1))):
        parameter.grad = its.clone()
        Muon([parameter], lr=0.1, weight_decay=0.1).step()
    assert torch.equal(kernel.flatten(1), matrix)
