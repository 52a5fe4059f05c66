"""Find the largest of many videos that fits into memory, with few dry runs (up to 1 s each)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Protocol, TypeVar

from everyframe.core.errors import InputError
from everyframe.core.plan import Settings

#: Maximum number of videos that are tried.
TRIES = 8


class _Result(Protocol):
    @property
    def fits(self) -> bool: ...


_FitResult = TypeVar("_FitResult", bound=_Result)


def largest_fit(
    candidates: Iterable[Settings],
    can_fit: Callable[[Settings], bool],
    fit: Callable[[Settings], _FitResult],
) -> _FitResult | None:
    """How the largest candidate fits that does, or None; `can_fit` is a rough look."""
    for each in largest_first(candidates, can_fit):
        with suppress(InputError):  # pipelines of diffusers refuse sizes that they name nowhere
            fitted = fit(each)
            if fitted.fits:
                return fitted
    return None


def largest_first(
    candidates: Iterable[Settings], fits: Callable[[Settings], bool]
) -> list[Settings]:
    """Those candidates that were tried and fit, the largest first.

    If one fits, none of fewer pixels is tried; if not, none that is as large along every side. A
    longer video of smaller frames may need more for as many pixels, or less. Each try is the one
    that leaves the fewest candidates if it goes badly, so that 50 need 5 to 10.
    """
    left = list(candidates)
    found: list[Settings] = []
    for _ in range(TRIES):
        if not left:
            break
        each = min(left, key=lambda one: max(len(_larger(left, one)), len(_smaller(left, one))))
        if fits(each):
            found.insert(0, each)
            left = _larger(left, each)
        else:
            left = _smaller(left, each)
    return found


def _larger(candidates: Sequence[Settings], than: Settings) -> list[Settings]:
    """Those of more pixels."""
    pixels = math.prod(_sides(than))
    return [each for each in candidates if math.prod(_sides(each)) > pixels]


def _smaller(candidates: Sequence[Settings], than: Settings) -> list[Settings]:
    """Those that are smaller along some side."""
    sides = _sides(than)
    return [
        each
        for each in candidates
        if any(mine < side for mine, side in zip(_sides(each), sides, strict=True))
    ]


def _sides(settings: Settings) -> tuple[int, int, int]:
    return settings.num_frames, settings.height, settings.width
