"""A denoiser under its guard: each answer is looked at, computed again where it must be, and told.

Not here: what is done about a bad answer (`guarding.py`), and the loop of steps (`stepping.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

from torch import Tensor

from everyframe.families.guarding import Guard
from everyframe.numerics.watch import range_of


class GuardedDenoiser:
    """``denoise`` as `make` makes it, which is made again whenever its guard changed a module.

    For what it keeps of a text was computed by modules, too. It is made with the guard's `settings`
    of then, also where memory ran out. `start` steps were done before.
    """

    def __init__(
        self, guard: Guard, make: Callable[[], Callable[..., Tensor]], start: int = 0
    ) -> None:
        self._guard = guard
        self._make = make
        self._denoise = guard.spared(start + 1, make)
        self._step = start

    def __call__(self, *given: Tensor) -> Tensor:
        self._step += 1

        def again() -> Tensor:
            self._denoise = self._make()
            return self._denoise(*given)

        # A run that goes on from a later step has the repairs that its first step asked for.
        probe = self._guard.probe() if self._step == 1 else None
        with probe or nullcontext():
            answer = self._guard.spared(self._step, lambda: self._denoise(*given), again)
        seen = range_of(answer)
        if seen.is_finite:
            answer = self._guard.probed(self._step, probe, answer, again)
        if not seen.is_finite:
            with self._guard.apart():
                answer = self._guard.repaired(self._step, again)
            seen = range_of(answer)
        self._guard.answered(self._step, seen)
        return answer
