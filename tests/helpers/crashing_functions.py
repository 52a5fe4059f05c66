"""Faults to plant in separate processes: functions that die, hang, return wrong values or raise.

They have a module of their own, because the processes import functions by name.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from everyframe.hardware.device_loss import translate_device_loss


def answer(*words: str) -> list[str]:
    """Nothing wrong at all."""
    return list(words)


def raise_error(text: str) -> None:
    """Raise it."""
    raise RuntimeError(text)


def divide_by_zero(device: str, *_: object) -> None:
    """As cuBLAS 12.1 does on H20: an integer division that the processor refuses."""
    print("about to divide")
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGFPE)


def segfault(device: str) -> None:
    """As an extension for another torch does."""
    os.kill(os.getpid(), signal.SIGSEGV)


def be_killed(device: str) -> None:
    """As the kernel does when memory is over."""
    os.kill(os.getpid(), signal.SIGKILL)


def hang(device: str) -> None:
    """As NCCL does between cards that can't reach each other."""
    time.sleep(600)


def leave_the_interpreter(device: str) -> None:
    """As a library does that calls exit."""
    os._exit(3)


def hang_with_a_child(pid_file: str) -> None:
    """As a compiler does that waits for its own child."""
    child = subprocess.Popen(["sleep", "600"])
    Path(pid_file).write_text(str(child.pid))
    time.sleep(600)


def lie(device: str) -> dict[str, Any]:
    """A probe that finds a wrong value."""
    wrong = ["products are off by 3.0e-01 of the largest value"]
    return {"wrong": wrong, "notes": [], "skipped": None, "measured": {"error": 0.3}}


def be_well(device: str) -> dict[str, Any]:
    """A probe that finds nothing."""
    return {"wrong": [], "notes": [], "skipped": None, "measured": {}}


def give_nonsense(device: str) -> str:
    """A probe that is itself broken."""
    return "all is well"


def raise_known_error(device: str) -> None:
    """An error whose text is that of a known issue."""
    raise RuntimeError("mat1 and mat2 must have the same dtype, but got Float and Half")


def hang_unless_mended(device: str) -> dict[str, Any]:
    """A hang that a variable prevents."""
    if os.environ.get("PLANTED_MENDED") != "1":
        time.sleep(600)
    return be_well(device)


def lie_beyond_measure(device: str) -> dict[str, Any]:
    """A probe whose error is infinite, which JSON can't say."""
    measured = {"error": float("inf"), "errors": [float("nan")]}
    return {
        "wrong": ["products are not finite"],
        "notes": [],
        "skipped": None,
        "measured": measured,
    }


def measure_nothing_known(device: str) -> dict[str, Any]:
    """A probe that gives its numbers in a form that no finding has."""
    return {"wrong": ["something"], "notes": [], "skipped": None, "measured": [1, 2]}


def lose_a_card() -> None:
    """What facts do on a card whose memory gave wrong bits, reported as its loss."""
    with translate_device_loss("cuda:0", "before it was used"):
        lose_a_card_in_use("cuda:0")


def lose_a_card_in_use(device: str) -> None:
    """The same where nobody tells it as a loss: torch's own error."""
    import torch

    raise torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")


def reserve_and_die() -> None:
    """As tqdm does, which pipelines import."""
    lock = multiprocessing.RLock()
    with lock:
        os.kill(os.getpid(), signal.SIGKILL)
