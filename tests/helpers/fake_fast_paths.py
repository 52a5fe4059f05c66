"""Fast paths to plant: right, wrong, slow, crashing, hanging, lying.

They have a module of their own, because the processes of trials import functions by name.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from everyframe.fast_paths.benchmark import Comparison
from everyframe.fast_paths.certification.target import CertificationTarget
from everyframe.fast_paths.certification.trials import CompilerFailedError
from everyframe.fast_paths.registry import FastPath

#: Seconds that the plain way takes; none of it is computing, so a busy machine is no matter.
_PLAIN = 0.02


def planted(name: str) -> FastPath:
    """The path of that name, whose trial is the function of that name here."""
    closeness: Literal["exact", "rounding"] = "exact" if name == "nearly" else "rounding"
    return FastPath(name, name, name, ("cpu",), f"{__name__}:{name}", (), closeness, at_once=True)


def _contest(fast: Callable[[Tensor], Tensor]) -> Iterator[Comparison]:
    x = torch.linspace(-1, 1, 64)

    def plain() -> Tensor:
        time.sleep(_PLAIN)
        return x.exp()

    yield Comparison("exponentials", truth=x.exp, plain=plain, fast=lambda: fast(x))


def right(subject: CertificationTarget, path: FastPath) -> Iterator[Comparison]:
    """The same, at once."""
    yield from _contest(torch.exp)


def wrong(subject: CertificationTarget, path: FastPath) -> Iterator[Comparison]:
    """Off by a thousandth: more than rounding, less than anybody would see at first."""
    yield from _contest(lambda x: x.exp() * 1.001)


def nearly(subject: CertificationTarget, path: FastPath) -> Iterator[Comparison]:
    """The same but for the last bits, of what calls itself exact."""
    yield from _contest(lambda x: x.exp() * (1 + 2**-22))


def slow(subject: CertificationTarget, path: FastPath) -> Iterator[Comparison]:
    """Right, and half as fast."""

    def fast(x: Tensor) -> Tensor:
        time.sleep(2 * _PLAIN)
        return x.exp()

    yield from _contest(fast)


def long(subject: CertificationTarget, path: FastPath) -> Iterator[Comparison]:
    """Right and fast, of a model with more to try than there is time for."""
    for _ in range(1000):
        yield from _contest(torch.exp)


def not_finite(subject: CertificationTarget, path: FastPath) -> Iterator[Comparison]:
    """One value of many is not a number."""
    yield from _contest(lambda x: x.exp().index_fill(0, torch.tensor([3]), float("nan")))


def another_shape(subject: CertificationTarget, path: FastPath) -> Iterator[Comparison]:
    """One value, which broadcasting would let pass."""
    yield from _contest(lambda x: x.exp().mean())


def raises(subject: CertificationTarget, path: FastPath) -> Iterator[Comparison]:
    """As a kernel does that does not exist for this card."""

    def fast(x: Tensor) -> Tensor:
        raise RuntimeError("no kernel image is available for execution on the device")

    yield from _contest(fast)


def crashes(subject: CertificationTarget, path: FastPath) -> Iterator[Comparison]:
    """As cuBLAS 12.1 does on H20."""
    yield from _ended_by(signal.SIGFPE)


def killed(subject: CertificationTarget, path: FastPath) -> Iterator[Comparison]:
    """Somebody, or the system, ends the process in the middle of it."""
    yield from _ended_by(signal.SIGKILL)


def terminated(subject: CertificationTarget, path: FastPath) -> Iterator[Comparison]:
    """As above, politely."""
    yield from _ended_by(signal.SIGTERM)


def _ended_by(number: signal.Signals) -> Iterator[Comparison]:
    def fast(x: Tensor) -> Tensor:
        os.kill(os.getpid(), number)
        return x

    yield from _contest(fast)


def hangs(subject: CertificationTarget, path: FastPath) -> Iterator[Comparison]:
    """As a collective does whose other side is gone: in C, where no Python signal comes through."""

    def fast(x: Tensor) -> Tensor:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        time.sleep(600)
        return x

    yield from _contest(fast)


def faulty(subject: CertificationTarget, path: FastPath) -> Iterator[Comparison]:
    """A kernel that ends the process's work on its card: all after it fails there, right or not."""

    def dead(*_: object, **__: object) -> Any:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    torch.linspace = dead
    yield from _contest(dead)


def on_a_broken_card(subject: CertificationTarget, path: FastPath) -> Iterator[Comparison]:
    """Right, on a card that gives wrong bits."""

    def fast(x: Tensor) -> Tensor:
        raise torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")

    yield from _contest(fast)


def out_of_memory(subject: CertificationTarget, path: FastPath) -> Iterator[Comparison]:
    """Right, on a card whose memory another program has."""

    def fast(x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    yield from _contest(fast)


def compiler_fails(subject: CertificationTarget, path: FastPath) -> Iterator[Comparison]:
    """Compiled blocks that are none, as the compiler lacks something."""
    yield from _contest(torch.exp)
    raise CompilerFailedError("no headers")
