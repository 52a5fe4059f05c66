"""The training loop that all three stages share: steps, one line a while, log, resume, best so far.

A stage brings a `Task` (its modules, its loss on a batch, its validation measure); the loop knows
nothing else of it. A run lives in a folder: ``state.pt`` to go on from, ``best.pt`` with the
weights of the best validation, ``log.csv`` for the loss curve.
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
import torch.distributed as dist
from torch import Tensor, nn

from everyframe.hardware.processor import BF16_FLAGS, processor_flags
from recipes.shapes.muon import Muon


@dataclass
class Task:
    """One stage of training.

    `loss(rng step)` draws its own batch; `validate` gives figures of which ``score`` (larger is
    better) decides what is best. `modules` are trained and saved; averaged copies of their weights
    (decay `ema`) are what is validated and kept, if `ema` is not 0. Layers' matrices whose names
    begin with one of `muon` are trained by Muon (Jordan et al., 2024), scaled to AdamW's step size,
    the rest by AdamW. `compilable` are the modules that gain by `torch.compile`.
    """

    modules: nn.ModuleDict
    loss: Callable[[int], tuple[Tensor, dict[str, float]]]
    validate: Callable[[nn.ModuleDict], dict[str, float]]
    clips_per_step: int
    num_steps: int
    learning_rate: float
    weight_decay: float = 0.0
    warmup: int = 100
    ema: float = 0.0
    validate_every: int = 500
    print_every: int = 50
    clip_norm: float = 1.0
    muon: tuple[str, ...] = ()
    compilable: tuple[nn.Module, ...] = ()


def learning_rate_at(task: Task, step: int) -> float:
    """Linear warm-up, then half a cosine down to a fiftieth."""
    if step < task.warmup:
        return task.learning_rate * (step + 1) / task.warmup
    done = (step - task.warmup) / max(1, task.num_steps - task.warmup)
    return task.learning_rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def train(task: Task, folder: Path, say: Callable[[str], None] = print) -> Path:
    """Trains from where `folder` stopped, to the end; returns the file of the best weights."""
    folder.mkdir(parents=True, exist_ok=True)
    optimizers = _optimizers(task)
    average = {k: v.detach().clone() for k, v in task.modules.state_dict().items()}
    step, best, spent = 0, -math.inf, 0.0
    state_file = folder / "state.pt"
    if state_file.exists():
        state = torch.load(state_file, weights_only=True)
        task.modules.load_state_dict(state["modules"])
        for optimizer, kept in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
        average, step = state["average"], state["step"]
        best, spent = state["best"], state["seconds"]
        say(f"going on from step {step}")
    begun, log = time.monotonic() - spent, folder / "log.csv"
    recent: dict[str, float] = {}
    leads = rank() == 0
    rate_from, rate_time = step, time.monotonic()
    while step < task.num_steps:
        loss, figures = task.loss(step)
        task.modules.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        _share(task.modules)
        nn.utils.clip_grad_norm_(task.modules.parameters(), task.clip_norm)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate_at(task, step)
            optimizer.step()
        step += 1
        _average(average, task, step)
        for name, value in {"loss": loss.item(), **figures}.items():
            recent[name] = value if name not in recent else 0.95 * recent[name] + 0.05 * value
        if leads and (step % task.print_every == 0 or step == task.num_steps):
            speed = (step - rate_from) / (time.monotonic() - rate_time)
            rate_from, rate_time = step, time.monotonic()
            left = (task.num_steps - step) / speed / 60
            shown = " ".join(f"{name} {value:.4f}" for name, value in recent.items())
            rate = speed * task.clips_per_step
            say(f"step {step}/{task.num_steps} {shown} {rate:.1f} clips/s, {left:.1f} min left")
            _write(log, "train", step, time.monotonic() - begun, recent)
        if leads and (step % task.validate_every == 0 or step == task.num_steps):
            measured = _validated(task, average)
            _write(log, "valid", step, time.monotonic() - begun, measured)
            say(f"step {step} validation: " + " ".join(f"{k} {v:.4f}" for k, v in measured.items()))
            if measured["score"] >= best:
                best = measured["score"]
                weights = average if task.ema else task.modules.state_dict()
                _save({"modules": weights, "step": step, "measured": measured}, folder / "best.pt")
            state = {
                "modules": task.modules.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                "average": average,
                "step": step,
                "best": best,
                "seconds": time.monotonic() - begun,
            }
            _save(state, state_file)
    return folder / "best.pt"


def _optimizers(task: Task) -> list[torch.optim.Optimizer]:
    named = dict(task.modules.named_parameters())
    matrices = {k: v for k, v in named.items() if k.startswith(task.muon) and k.endswith(".weight")}
    matrices = {k: v for k, v in matrices.items() if v.ndim == 2}
    rest = [v for k, v in named.items() if k not in matrices]
    rate, decay = task.learning_rate, task.weight_decay
    found: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.99), weight_decay=decay)
    ]
    if matrices:
        found.append(Muon(matrices.values(), lr=rate, weight_decay=decay))
    return found


def rank() -> int:
    """Which of the training's processes this is."""
    return dist.get_rank() if dist.is_initialized() else 0


def num_ranks() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def autocast() -> torch.autocast:
    """bf16 on CPUs that multiply it; on others its products take 20 times as long as float32's."""
    return torch.autocast("cpu", torch.bfloat16, enabled=_has_bf16())


@cache
def _has_bf16() -> bool:
    return bool(processor_flags() & BF16_FLAGS)


def _share(modules: nn.ModuleDict) -> None:
    """Gradients of all processes -> their mean, so that all take the same step."""
    if num_ranks() == 1:
        return
    grads = [p.grad for p in modules.parameters() if p.grad is not None]
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat)
    flat /= num_ranks()
    parts = flat.split([grad.numel() for grad in grads])
    torch._foreach_copy_(grads, [p.view_as(g) for p, g in zip(parts, grads, strict=True)])


def load_best(modules: nn.ModuleDict, folder: Path) -> dict[str, Any]:
    """Loads the best weights of a finished or running stage; returns what was measured."""
    kept = torch.load(folder / "best.pt", weights_only=True)
    modules.load_state_dict(kept["modules"])
    return {"step": kept["step"], **kept["measured"]}


def _average(average: dict[str, Tensor], task: Task, step: int) -> None:
    if not task.ema:
        return
    decay = min(task.ema, step / (step + 10))
    names = [k for k, v in average.items() if v.is_floating_point()]
    now = task.modules.state_dict()
    torch._foreach_lerp_([average[k] for k in names], [now[k] for k in names], 1 - decay)


def _validated(task: Task, average: dict[str, Tensor]) -> dict[str, float]:
    trained = {k: v.detach().clone() for k, v in task.modules.state_dict().items()}
    if task.ema:
        task.modules.load_state_dict(average)
    task.modules.eval()
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        measured = task.validate(task.modules)
    task.modules.train()
    task.modules.load_state_dict(trained)
    return measured


def _save(what: dict[str, Any], path: Path) -> None:
    unfinished = path.with_suffix(".part")
    torch.save(what, unfinished)
    os.replace(unfinished, path)


def _write(log: Path, kind: str, step: int, seconds: float, figures: dict[str, float]) -> None:
    with log.open("a", newline="") as file:
        row = [kind, step, f"{seconds:.0f}", *(f"{k}={v:.5f}" for k, v in figures.items())]
        csv.writer(file).writerow(row)
