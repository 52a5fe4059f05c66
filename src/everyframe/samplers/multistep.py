"""Multistep solvers of second order that call the denoiser in some of a sampler's steps.

They solve the differential equation of the sampler that they replace, on the same noise levels. A
solver goes from one computed step to the next in one step; the state does not change in the steps
between them. It calls the denoiser once per computed step and uses the last one or two outputs.

- ``ab2``: Adams-Bashforth with steps of unequal size, in the slope ``(z - x0) / tau``. For
  rectified flow that is the velocity, for Karras' sigmas equation 1 of Karras et al. 2022.
- ``dpm2m``: DPM-Solver++(2M), Lu et al. 2022 (arXiv 2211.01095), algorithm 2.
- ``unipc``: UniPC of order 2 with B2(h) = expm1(h), Zhao et al. 2023 (arXiv 2302.04867): the same
  predictor, and a corrector that uses the next computed output without a further call.
- ``abm2``: Adams-Bashforth as above, corrected by Adams-Moulton's rule once the next slope is known
  (Hairer, Norsett, Wanner 1993, section III.1). Both sum the line through two slopes over the
  sampler's own steps. So it approximates the sampler's result and equals it if every step is
  computed, where the other solvers approximate the exact solution of the differential equation.

Coefficients are float64 numbers. The step is of first order at a level without noise or without
signal, and without an earlier output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from everyframe.core.quality import SamplingMethod
from everyframe.ops.dtypes import upcast_to_widest
from everyframe.samplers.base import Denoise, Step, as_state, check_start
from everyframe.samplers.error_budget import ErrorBudget


@dataclass(frozen=True)
class DiffusionPath:
    """Noise levels of a sampler's N steps, and what its model predicts.

    The state at level i is ``alphas[i] x0 + sigmas[i] noise``; the last level has no noise.

    Attributes:
        alphas, sigmas: N + 1 numbers each.
        predict: ``predict(denoise, x, i)`` calls the model at level i: timestep (B,) and x0.
        is_flow: alpha + sigma is 1, and the slope is taken in x itself instead of x / alpha.
        active: bool, broadcastable to x: what is denoised; None for all.
    """

    alphas: tuple[float, ...]
    sigmas: tuple[float, ...]
    predict: Callable[[Denoise, Tensor, int], tuple[Tensor, Tensor]]
    is_flow: bool = False
    active: Tensor | None = None

    def scale(self, level: int) -> float:
        """What x is divided by where slopes are taken."""
        return 1.0 if self.is_flow else self.alphas[level]

    def tau(self, level: int) -> float:
        """Noise level of the scaled state."""
        return self.sigmas[level] / self.scale(level)

    def log_snr(self, level: int) -> float:
        """``log(alpha / sigma)``, infinite where one of them is 0."""
        alpha, sigma = self.alphas[level], self.sigmas[level]
        if not sigma:
            return math.inf
        return math.log(alpha / sigma) if alpha else -math.inf


@dataclass(frozen=True, eq=False)
class _History:
    """What a later step needs of the computed ones before it, the newest last.

    Attributes:
        levels: levels of the last computed steps.
        answers: their x0.
        base: state that the newest step began from, for UniPC's corrector.
    """

    levels: tuple[int, ...] = ()
    answers: tuple[Tensor, ...] = ()
    base: Tensor | None = None

    def then(self, level: int, x0: Tensor, base: Tensor) -> _History:
        return _History((*self.levels, level)[-2:], (*self.answers, x0)[-2:], base)

    def to_memory(self) -> dict[str, Any]:
        return {"levels": list(self.levels), "answers": list(self.answers), "base": self.base}

    @classmethod
    def of_memory(cls, memory: Mapping[str, Any], x: Tensor) -> _History:
        base = memory["base"]
        return cls(
            tuple(memory["levels"]),
            tuple(each.to(x.device) for each in memory["answers"]),
            None if base is None else base.to(x.device),
        )


def sample(
    denoise: Denoise,
    x: Tensor,
    path: DiffusionPath,
    method: SamplingMethod,
    *,
    start: int = 0,
    memory: Mapping[str, Any] | None = None,
    agree: Callable[[bool], bool] = bool,
) -> Iterator[Step]:
    """Sample from x (B, ...) at level `start` of the path; `start` above 0 needs its `memory`.

    A step is yielded for each level. If the accumulated error passes ``method.limit``, the step
    says so in its `note` and all later ones are computed, by the first-order formula of the exact
    sampler. ``agree(is_over)`` returns what all ranks take as true.
    """
    num_steps = len(path.sigmas) - 1
    check_start(start, num_steps)
    x = as_state(x)
    history, budget = _History(), ErrorBudget(method.limit, agree)
    if memory is not None:
        history, budget = _History.of_memory(memory, x), budget.at(memory["error"])
    computed = method.computed_steps(num_steps)
    t = x.new_zeros(x.shape[0])

    def clean() -> Tensor:
        return history.answers[-1]

    for index in range(start, num_steps):
        note = None
        if index in computed or budget.is_spent:
            t, x0 = path.predict(denoise, x, index)
            was_spent = budget.is_spent
            budget = budget.plus(_estimate(path, history, index, x, x0))
            if budget.is_spent and not was_spent:
                note = budget.note(index)
            if method.name in _CORRECTORS and not budget.is_spent:
                corrected, x0 = _CORRECTORS[method.name](path, history, index, x, x0)
                x = _where(path, corrected, x)
            following = next((each for each in computed if each > index), num_steps)
            if budget.is_spent:
                following = index + 1
            advance = _first_order if budget.is_spent else _FORMULAS[method.name]
            after = advance(path, history, index, following, x, x0)
            history, x = history.then(index, x0, x), _where(path, after, x)
        remembered = {**history.to_memory(), "error": budget.error}
        yield Step(index, num_steps, t, x, remembered, note, clean)


def _where(path: DiffusionPath, after: Tensor, x: Tensor) -> Tensor:
    return after if path.active is None else torch.where(path.active, after, x)


def _slope(path: DiffusionPath, level: int, x: Tensor, x0: Tensor) -> Tensor:
    """Derivative of the scaled state by tau."""
    return (x / path.scale(level) - x0) / path.tau(level)


def _first_order(
    path: DiffusionPath, history: _History, level: int, after: int, x: Tensor, x0: Tensor
) -> Tensor:
    """DDIM's step, which for these models is Euler's."""
    ratio = path.sigmas[after] / path.sigmas[level]
    return ratio * x + (path.alphas[after] - ratio * path.alphas[level]) * x0


def _ab2(
    path: DiffusionPath, history: _History, level: int, after: int, x: Tensor, x0: Tensor
) -> Tensor:
    if history.base is None:
        return _first_order(path, history, level, after, x, x0)
    before = history.levels[-1]
    step, last = path.tau(after) - path.tau(level), path.tau(level) - path.tau(before)
    slope = _slope(path, level, x, x0)
    # The slope there belongs to the state from which its step began.
    change = slope - _slope(path, before, history.base, history.answers[-1])
    z = x / path.scale(level) + step * (slope + change * (step / (2 * last)))
    return z * path.scale(after)


def _dpm2m(
    path: DiffusionPath, history: _History, level: int, after: int, x: Tensor, x0: Tensor
) -> Tensor:
    h = path.log_snr(after) - path.log_snr(level)
    if history.base is None or math.isinf(h):
        return _first_order(path, history, level, after, x, x0)
    before = history.levels[-1]
    last = path.log_snr(level) - path.log_snr(before)
    slope = (x0 - history.answers[-1]) * (h / (2 * last))  # 0 from a level without signal
    return _first_order(path, history, level, after, x, x0 + slope)


def _abm2(
    path: DiffusionPath, history: _History, level: int, after: int, x: Tensor, x0: Tensor
) -> Tensor:
    if history.base is None:
        return _first_order(path, history, level, after, x, x0)
    before = history.levels[-1]
    slope = _slope(path, level, x, x0)
    change = slope - _slope(path, before, history.base, history.answers[-1])
    last = path.tau(level) - path.tau(before)
    step, rise = path.tau(after) - path.tau(level), _rise(path, level, after) / last
    return (x / path.scale(level) + step * slope + rise * change) * path.scale(after)


def _rise(path: DiffusionPath, level: int, after: int) -> float:
    """The line through 0 at `level` with slope 1, summed over the sampler's steps to `after`."""
    taus = [path.tau(each) for each in range(level, after + 1)]
    return sum((here - taus[0]) * (then - here) for here, then in pairwise(taus))


#: UniPC's predictor of order 2 with B2 is DPM-Solver++(2M)'s step.
_FORMULAS = {"ab2": _ab2, "dpm2m": _dpm2m, "unipc": _dpm2m, "abm2": _abm2}


def _moulton(
    path: DiffusionPath, history: _History, level: int, x: Tensor, x0: Tensor
) -> tuple[Tensor, Tensor]:
    """Adams-Moulton's corrector: the state at `level` again, and the x0 that keeps its slope."""
    if history.base is None:
        return x, x0
    before = history.levels[-1]
    slope, step = _slope(path, level, x, x0), path.tau(level) - path.tau(before)
    old = _slope(path, before, history.base, history.answers[-1])
    z = history.base / path.scale(before) + step * old
    z = z + (slope - old) * (_rise(path, before, level) / step)
    return z * path.scale(level), z - slope * path.tau(level)


def _correct_unipc(
    path: DiffusionPath, history: _History, level: int, x: Tensor, x0: Tensor
) -> tuple[Tensor, Tensor]:
    """UniPC's corrector: the state at `level` again, now that its own answer `x0` is known."""
    if history.base is None:
        return x, x0
    before = history.levels[-1]
    h = path.log_snr(level) - path.log_snr(before)
    if math.isinf(h):
        return x, x0
    newest = history.answers[-1]
    b = -math.expm1(-h)
    first = _first_order(path, history, before, level, history.base, newest)
    if len(history.levels) < 2 or math.isinf(path.log_snr(history.levels[-2])):
        return first + path.alphas[level] * b * 0.5 * (x0 - newest), x0
    # Coefficients of both differences, of the conditions of order 1 and 2 at r and 1.
    r = (path.log_snr(history.levels[-2]) - path.log_snr(before)) / h
    phi_1 = math.expm1(-h) / -h - 1
    phi_2 = phi_1 / -h - 0.5
    b_1, b_2 = phi_1 / -b, 2 * phi_2 / -b
    weight_old = (b_1 - b_2) / (1 - r)
    weight_new = b_1 - weight_old
    older = (history.answers[-2] - newest) / r
    change = weight_old * older + weight_new * (x0 - newest)
    return first + path.alphas[level] * b * change, x0


_CORRECTORS = {"unipc": _correct_unipc, "abm2": _moulton}


def _estimate(
    path: DiffusionPath, history: _History, level: int, x: Tensor, x0: Tensor
) -> float | None:
    """Error that the last interval may have made, relative to the state; None if unknown.

    It is the difference between this answer and the one extrapolated from the two before.
    """
    if len(history.levels) < 2 or history.base is None:
        return None
    taus = [path.tau(each) for each in (*history.levels, level)]
    weight = (taus[2] - taus[1]) / (taus[1] - taus[0])
    expected = history.answers[1] + weight * (history.answers[1] - history.answers[0])
    size = upcast_to_widest(x).norm() / path.scale(level)
    share = abs(taus[2] - taus[1]) / taus[2]
    change = upcast_to_widest(x0) - upcast_to_widest(expected)
    return float(share * change.norm() / size)
