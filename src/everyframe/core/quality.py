"""Quality budgets, and the lossy methods that they choose from.

A sampling method keeps the plan's own steps: it names those in which the denoiser is computed, and
how the sampler gets over the others. So its video can be compared with the exact one, and it can
return to exact steps at any step. `everyframe.samplers.multistep` and `prediction` compute it. The
products of linear layers in eight bits are the other loss, alone or together with it.
`everyframe.planning.quality` chooses a method for a budget.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass, replace

from everyframe.core.errors import InputError, did_you_mean

#: Value of ``quality`` that uses no lossy method; the default.
EXACT = "exact"

#: Multistep solvers of second order; the step formula is theirs.
SOLVERS = {
    "ab2": "Adams-Bashforth of second order, in the velocity",
    "dpm2m": "DPM-Solver++(2M)",
    "unipc": "UniPC of second order",
    "abm2": "Adams-Bashforth-Moulton of second order, summed over the sampler's own steps",
}
#: Extrapolation of the denoiser's answers; the step formula is the sampler's own.
PREDICTORS = {
    "taylor1": "answers extrapolated linearly",
    "taylor2": "answers extrapolated quadratically",
}
#: Features of the denoiser itself, for UNets; the step formula is the sampler's own.
CACHES = {"deepcache": "deep layers of a UNet taken from the last whole step"}
METHODS = {**SOLVERS, **PREDICTORS, **CACHES}
#: Kinds of products in eight bits (`everyframe.precision.quantized_products`), with the storage of
#: the weights of each.
PRODUCTS = {"int8-dynamic": "int8", "fp8-scaled": "fp8"}

#: Share of a call that is computed in a step that a cache leaves shallow: measured on SVD's UNet.
SHALLOW_SHARE = 0.29

#: Budgets in dB that can be asked for. Above, the frames' own 8 bits are the larger error.
LOWEST_DB, HIGHEST_DB = 20.0, 50.0

_DECIBELS = re.compile(r"(\d+(?:\.\d+)?)\s*db", re.IGNORECASE)
_METHOD = re.compile(r"([a-z]\w*)@(\d{1,5})(?:w(\d{1,5}))?(?:e(\d{1,3}))?(?:g(\d{1,3})|(h))?")
#: Largest exponent by which computed steps may crowd at the beginning, in percent.
_MOST_EARLY = 300


@dataclass(frozen=True)
class SamplingMethod:
    """A lossy way through a sampler's steps, such as ``ab2@8`` or ``abm2@10e130h``.

    Attributes:
        name: one of `METHODS`.
        num_computed: steps in which the denoiser is computed.
        num_warm: of these, the first steps, without a gap; at least 1. The others lie evenly.
        guided_percent: share of the steps, from the first, that have classifier-free guidance.
        early_percent: exponent of the computed steps' places, in percent: of K computed ones in N,
            the k-th is at ``N (k / K) ** (early_percent / 100)``. Above 100, more are at the
            beginning, where a video takes shape.
        holds_guidance: in every second computed step from the fourth on, only the prompt's branch
            is computed, and what guidance adds is that of the computed step before.
        limit: largest accumulated error estimate; from the step that passes it on, all are exact.
            None: no limit.
    """

    name: str
    num_computed: int
    num_warm: int = 1
    guided_percent: int = 100
    early_percent: int = 100
    holds_guidance: bool = False
    limit: float | None = None

    def __str__(self) -> str:
        warm = f"w{self.num_warm}" if self.num_warm > 1 else ""
        early = f"e{self.early_percent}" if self.early_percent != 100 else ""
        guided = f"g{self.guided_percent}" if self.guided_percent < 100 else ""
        held = "h" if self.holds_guidance else ""
        return f"{self.name}@{self.num_computed}{warm}{early}{guided}{held}"

    @property
    def is_solver(self) -> bool:
        """Whether it replaces the sampler's step formula."""
        return self.name in SOLVERS

    @property
    def is_cache(self) -> bool:
        """Whether it computes a part of the denoiser in every step."""
        return self.name in CACHES

    @property
    def has_partial_guidance(self) -> bool:
        """Whether it computes some steps without the branch that guidance needs."""
        return self.guided_percent < 100 or self.holds_guidance

    def num_calls(self, num_steps: int) -> float:
        """Calls of the denoiser in so many steps; shallow ones count by their share."""
        whole = len(self.computed_steps(num_steps))
        return whole + SHALLOW_SHARE * (num_steps - whole) if self.is_cache else whole

    def computed_steps(self, num_steps: int) -> tuple[int, ...]:
        """Indices of the computed steps, ascending; the first step is always one."""
        if self.num_computed >= num_steps:
            return tuple(range(num_steps))
        if self.early_percent != 100:
            return self._crowded_steps(num_steps)
        warm = min(self.num_warm, self.num_computed)
        rest, left = self.num_computed - warm, num_steps - warm
        if warm == 1:  # the first one begins an interval like the others
            return tuple(_round(each * num_steps, self.num_computed) for each in range(warm + rest))
        return (*range(warm), *(warm + _round(each * left, rest) for each in range(rest)))

    def _crowded_steps(self, num_steps: int) -> tuple[int, ...]:
        """Computed steps whose places follow the exponent; each at least 1 after the one before."""
        found = [0]
        for k in range(1, self.num_computed):
            place = num_steps * (k / self.num_computed) ** (self.early_percent / 100)
            # Rounded first: the last bits of a power differ between machines.
            nearest = math.floor(round(place, 9) + 0.5)
            found.append(min(max(nearest, found[-1] + 1), num_steps - self.num_computed + k))
        return tuple(found)

    def guided_steps(self, num_steps: int) -> int:
        """Number of steps, from the first, that have guidance."""
        return -(-num_steps * self.guided_percent // 100)

    def held_steps(self, num_steps: int) -> tuple[int, ...]:
        """Computed steps that take what guidance adds from the computed step before."""
        return self.computed_steps(num_steps)[3::2] if self.holds_guidance else ()


@dataclass(frozen=True)
class LossyMethod:
    """What a run loses for its speed, such as ``abm2@10e130h+int8-dynamic``.

    Attributes:
        sampling: its way through the sampler's steps; None computes all of them (``exact``).
        products: kind of the denoiser's products (`PRODUCTS`); empty for plain ones.
    """

    sampling: SamplingMethod | None = None
    products: str = ""

    def __str__(self) -> str:
        steps = EXACT if self.sampling is None else str(self.sampling)
        return f"{steps}+{self.products}" if self.products else steps

    @property
    def names(self) -> frozenset[str]:
        """Names by which it is allowed or switched off: that of its sampling, and its products."""
        sampling = "" if self.sampling is None else self.sampling.name
        return frozenset({sampling, self.products} - {""})

    @property
    def has_partial_guidance(self) -> bool:
        """Whether it computes some steps without the branch that guidance needs."""
        return self.sampling is not None and self.sampling.has_partial_guidance

    @property
    def num_computed(self) -> float:
        """Steps in which the denoiser is computed; infinite if those are all."""
        return math.inf if self.sampling is None else self.sampling.num_computed

    def is_no_bolder(self, other: LossyMethod) -> bool:
        """Whether `other` does all that it does, and computes no more steps of the same kind."""
        if self.products not in ("", other.products):
            return False
        own, its = self.sampling, other.sampling
        if own is None or its is None:
            return own is None
        is_alike = replace(own, num_computed=its.num_computed) == its
        return is_alike and own.num_computed >= its.num_computed


def recorded_method(sampling: SamplingMethod | None, kinds: Collection[str]) -> LossyMethod:
    """The method of a run that had this sampling, and weights or products of these kinds."""
    return LossyMethod(sampling, next((kind for kind in PRODUCTS if kind in kinds), ""))


def _round(number: int, by: int) -> int:
    """`number` / `by` to the nearest integer, halves up, without floats."""
    return (2 * number + by) // (2 * by)


def parse_quality(text: str) -> float | LossyMethod | None:
    """The budget in dB, the method by its name, or None for ``exact``.

    Raises:
        InputError: none of these; says what is allowed.
    """
    written = text.strip().casefold()
    if written == EXACT:
        return None
    if match := _DECIBELS.fullmatch(written):
        decibels = float(match[1])
        if not LOWEST_DB <= decibels <= HIGHEST_DB:
            raise InputError(
                f"quality must be {LOWEST_DB:g}dB to {HIGHEST_DB:g}dB, got {text!r}; "
                "for no loss at all: exact"
            )
        return decibels
    sampling, has_products, products = written.partition("+")
    if has_products and products not in PRODUCTS:
        raise InputError(
            f"quality {text!r}: there are no products {products!r} among {', '.join(PRODUCTS)}"
            f"{did_you_mean(products, PRODUCTS)}"
        )
    if sampling == EXACT:
        return LossyMethod(None, products)
    if match := _METHOD.fullmatch(sampling):
        return LossyMethod(_method(text, match), products)
    raise InputError(
        f"quality must be exact, a budget of {LOWEST_DB:g}dB to {HIGHEST_DB:g}dB, or a method such "
        f"as ab2@8, got {text!r}"
    )


def parse_method(text: str) -> LossyMethod:
    """The lossy method of that name. Raises `InputError` if it is none."""
    found = parse_quality(text)
    if not isinstance(found, LossyMethod):
        raise InputError(f"{text!r} is no lossy method")
    return found


def _method(text: str, match: re.Match[str]) -> SamplingMethod:
    name, computed, warm = match[1], int(match[2]), int(match[3] or 1)
    early, guided = int(match[4] or 100), int(match[5] or 100)
    if name not in METHODS:
        raise InputError(
            f"quality: there is no method {name!r} among {', '.join(METHODS)}"
            f"{did_you_mean(name, METHODS)}"
        )
    if not computed >= 2 or not 1 <= warm <= computed or not 0 <= guided <= 100:
        raise InputError(
            f"quality {text!r}: NAME@COMPUTEDwWARMgPERCENT needs 2 or more computed steps, no more "
            "warm steps than these, and a guided share of 0 to 100"
        )
    if not 100 <= early <= _MOST_EARLY or (early > 100 and warm > 1):
        raise InputError(
            f"quality {text!r}: NAME@COMPUTEDePERCENT places steps by an exponent of 100 to "
            f"{_MOST_EARLY} percent, and has no warm steps"
        )
    holds_guidance = match[6] is not None
    if holds_guidance and name not in SOLVERS:
        raise InputError(f"quality {text!r}: h needs a solver ({', '.join(SOLVERS)}), not {name}")
    return SamplingMethod(name, computed, warm, guided, early, holds_guidance)


@dataclass(frozen=True)
class QualityPlan:
    """What a plan does for its quality budget.

    Attributes:
        asked: the option as given.
        method: the method, or "exact".
        why: why this one, for a person.
        worst_db: smallest PSNR of a frame against the exact video over the calibration set; None
            without a measurement. `median_db` is the median over its videos.
        num_videos: size of that set.
        gain: denoising time of exact steps over that of the method, measured.
    """

    asked: str
    method: str
    why: str = ""
    worst_db: float | None = None
    median_db: float | None = None
    num_videos: int = 0
    gain: float | None = None

    def __str__(self) -> str:
        if self.worst_db is None:
            return f"{self.asked}: {self.method}" + (f" ({self.why})" if self.why else "")
        return (
            f"{self.asked}: {self.method}, measured {self.worst_db:.1f} dB at worst and "
            f"{self.median_db:.1f} dB in the median of {self.num_videos} videos; denoises "
            f"{self.gain:.1f} times as fast"
        )
