"""Training loop of all stages: steps, log, validation, saved state and best weights.

A stage is a `Task`: its modules, its loss on a batch and its validation measure. A run has a
folder: ``state.pt`` to resume from, ``best.pt`` with the weights of the best validation, and
``log.csv`` for the loss curve.
"""

from __future__ import annotations

import csv
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from everyframe.hardware.cpu import BF16_FLAGS, processor_flags
from recipes.shapes.muon import Muon


@dataclass
class Task:
    """One stage of training.

    `draw(step)` makes a batch on the device; `loss` of it is the loss, and figures to show.
    `validate` gives figures of which ``score`` (larger is better) decides what is best. `modules`
    are trained and saved; averaged copies of their weights (over an eighth of the steps so far,
    decay `ema` at most) are what is validated and kept. Layers' matrices (and kernels) whose names
    begin with one of `muon` are trained by Muon (Jordan et al., 2024), scaled to AdamW's step size,
    the rest by AdamW. `compilable` are the modules that gain by `torch.compile`. `static` says that
    a step is the same kernels on the same shapes each time and asks for no value, so that a card
    can replay it as one graph.
    """

    modules: nn.ModuleDict
    draw: Callable[[int], tuple[Tensor, ...]]
    loss: Callable[..., tuple[Tensor, dict[str, Tensor]]]
    validate: Callable[[nn.ModuleDict], dict[str, float]]
    clips_per_step: int
    num_steps: int
    learning_rate: float
    weight_decay: float = 0.0
    warmup: int = 100
    ema: float = 0.999
    num_validations: int = 10
    print_every: int = 50
    clip_norm: float = 1.0
    muon: tuple[str, ...] = ()
    compilable: tuple[nn.Module, ...] = ()
    static: bool = False


def learning_rate_at(task: Task, step: int, done: float) -> float:
    """Linear warm-up, then half a cosine to a fiftieth; `done` is the finished share, 0..1."""
    warm = min(1.0, (step + 1) / max(1, task.warmup))
    return task.learning_rate * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))


def train(
    task: Task, folder: Path, say: Callable[[str], None] = print, minutes: float | None = None
) -> Path:
    """Train from the state in `folder` to the end; returns the file of the best weights.

    With `minutes` it ends earlier if the stage has used that much time over all its runs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    optimizers = _optimizers(task)
    average = {k: v.detach().clone() for k, v in task.modules.state_dict().items()}
    step, best, spent = 0, -math.inf, 0.0
    state_file = folder / "state.pt"
    if state_file.exists():
        state = torch.load(state_file, weights_only=True, map_location=_device(task.modules))
        task.modules.load_state_dict(state["modules"])
        for optimizer, kept in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
        average, step = state["average"], state["step"]
        best, spent = state["best"], state["seconds"]
        say(f"going on from step {step}")
    begun, log = time.monotonic() - spent, folder / "log.csv"

    def done() -> float:
        timed = (time.monotonic() - begun) / (60 * minutes) if minutes else 0.0
        return min(1.0, max(step / task.num_steps, timed))

    recent: dict[str, Tensor] = {}
    rate_from, rate_time = step, time.monotonic()
    validated = math.floor(done() * task.num_validations)
    gradients = _Captured(task) if task.static and _device(task.modules).type == "cuda" else None
    # A step's own part ends the loop: time that runs out while weights are validated and saved
    # leaves room for one more step, which is then the last: it is logged, measured and saved.
    part = done()
    while part < 1:
        batch = task.draw(step)
        loss, figures = gradients(*batch) if gradients else _with_gradients(task, batch)
        nn.utils.clip_grad_norm_(task.modules.parameters(), task.clip_norm)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate_at(task, step, part)
            optimizer.step()
        step += 1
        _average(average, task, step)
        # Figures stay on the device until they are shown: to ask for one is to wait for the step.
        for name, value in {"loss": loss, **figures}.items():
            now = value.detach().clone()
            recent[name] = now if name not in recent else recent[name].lerp(now, 0.05)
        part = done()
        if step % task.print_every == 0 or part == 1:
            means = {name: value.item() for name, value in recent.items()}
            speed = (step - rate_from) / (time.monotonic() - rate_time)
            rate_from, rate_time = step, time.monotonic()
            left = (time.monotonic() - begun) * (1 - part) / part / 60
            shown = " ".join(f"{name} {value:.4f}" for name, value in means.items())
            rate = speed * task.clips_per_step
            say(f"step {step} {part:.1%} {shown} {rate:.1f} clips/s, {left:.1f} min left")
            _write(log, "train", step, time.monotonic() - begun, means)
        if math.floor(part * task.num_validations) > validated:
            validated = math.floor(part * task.num_validations)
            measured = _validated(task, average)
            _write(log, "valid", step, time.monotonic() - begun, measured)
            say(f"step {step} validation: " + " ".join(f"{k} {v:.4f}" for k, v in measured.items()))
            if measured["score"] >= best:
                best = measured["score"]
                save({"modules": average, "step": step, "measured": measured}, folder / "best.pt")
            state = {
                "modules": task.modules.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                "average": average,
                "step": step,
                "best": best,
                "seconds": time.monotonic() - begun,
            }
            save(state, state_file)
    return folder / "best.pt"


def _with_gradients(task: Task, batch: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
    task.modules.zero_grad(set_to_none=True)
    loss, figures = task.loss(*batch)
    torch.autograd.backward(loss)
    return loss, figures


class _Captured:
    """A step's loss and gradients as one CUDA graph, since launching the kernels of such small
    layers one by one leaves a GPU idle most of the time."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._batch: tuple[Tensor, ...] = ()
        self._graph = torch.cuda.CUDAGraph()
        self._out: tuple[Tensor, dict[str, Tensor]] | None = None

    def __call__(self, *batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        if self._out is None:
            self._batch = tuple(part.clone() for part in batch)
            self._out = self._capture()
        for kept, new in zip(self._batch, batch, strict=True):
            kept.copy_(new)
        self._graph.replay()
        return self._out

    def _capture(self) -> tuple[Tensor, dict[str, Tensor]]:
        # As PyTorch's manual asks: some steps on another stream first, for what libraries set up.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                _with_gradients(self._task, self._batch)
        torch.cuda.current_stream().wait_stream(stream)
        # Gradients that are there would be added to; those that are made here are written anew.
        with torch.cuda.graph(self._graph):
            return _with_gradients(self._task, self._batch)


def _optimizers(task: Task) -> list[torch.optim.Optimizer]:
    named = dict(task.modules.named_parameters())
    matrices = {k: v for k, v in named.items() if k.startswith(task.muon) and k.endswith(".weight")}
    matrices = {k: v for k, v in matrices.items() if v.ndim > 1}
    rest = [v for k, v in named.items() if k not in matrices]
    rate, decay = task.learning_rate, task.weight_decay
    found: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.99), weight_decay=decay)
    ]
    if matrices:
        found.append(Muon(matrices.values(), lr=rate, weight_decay=decay))
    return found


def autocast(device: torch.device | str) -> torch.autocast:
    """Autocast to bf16 if the hardware multiplies it; emulated bf16 is 20 times slower."""
    kind = torch.device(device).type
    return torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda" or _has_bf16())


@cache
def _has_bf16() -> bool:
    return bool(processor_flags() & BF16_FLAGS)


def load_best(modules: nn.ModuleDict, folder: Path) -> dict[str, Any]:
    """Load the best weights of a finished or running stage; returns their validation results."""
    kept = torch.load(folder / "best.pt", weights_only=True, map_location=_device(modules))
    modules.load_state_dict(kept["modules"])
    return {"step": kept["step"], **kept["measured"]}


def _device(modules: nn.ModuleDict) -> torch.device:
    return next(modules.parameters()).device


def _average(average: dict[str, Tensor], task: Task, step: int) -> None:
    decay = min(task.ema, step / (step + 8))
    names = [k for k, v in average.items() if v.is_floating_point()]
    now = task.modules.state_dict()
    torch._foreach_lerp_([average[k] for k in names], [now[k] for k in names], 1 - decay)


def _validated(task: Task, average: dict[str, Tensor]) -> dict[str, float]:
    trained = {k: v.detach().clone() for k, v in task.modules.state_dict().items()}
    task.modules.load_state_dict(average)
    task.modules.eval()
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        measured = task.validate(task.modules)
    task.modules.train()
    task.modules.load_state_dict(trained)
    return measured


def save(what: dict[str, Any], path: Path) -> None:
    """Write tensors to a file that appears whole or not at all."""
    unfinished = path.with_suffix(".part")
    torch.save(what, unfinished)
    os.replace(unfinished, path)


def _write(log: Path, kind: str, step: int, seconds: float, figures: dict[str, float]) -> None:
    with log.open("a", newline="") as file:
        row = [kind, step, f"{seconds:.0f}", *(f"{k}={v:.5f}" for k, v in figures.items())]
        csv.writer(file).writerow(row)
