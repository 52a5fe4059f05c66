"""Values of options from Python: numbers of any kind are numbers, and what is none is told as that.

What a command line says of the same is in `tests/cli/test_usage.py`.
"""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from everyframe.core.errors import InputError
from everyframe.core.request import Request
from everyframe.families.inpaint.options import InpaintOptions


@pytest.mark.parametrize(
    "five", [5, 5.0, "5", " 5 ", np.int64(5), np.float32(5), np.array(5), Decimal(5), Fraction(5)]
)
def test_numbers_of_any_kind(five: Any) -> None:
    request = Request(num_frames=five, fps=five)
    assert (request.num_frames, request.fps) == (5, 5.0)
    assert type(request.num_frames) is int
    assert type(request.fps) is float


@pytest.mark.parametrize("name", ["num_frames", "fps", "seed", "guidance_scale", "num_videos"])
@pytest.mark.parametrize("given", [True, False, np.bool_(True), b"5", "", "nan", 1j, [5], object()])
def test_what_is_no_number(name: str, given: Any) -> None:
    with pytest.raises(
        InputError, match=f"^{name} must be a (whole|finite )?.*number, got"
    ) as told:
        Request(**{name: given})
    assert ";" not in str(told.value), "one thing is said of one option"


@pytest.mark.parametrize("given", ["lots", "nan", "1e400", "a,b", True, {}])
def test_one_number_or_several_are_one_option(given: Any) -> None:
    with pytest.raises(InputError) as told:
        InpaintOptions(control_guidance_end=given)
    assert str(told.value).startswith("control_guidance_end must be a ")
    assert str(told.value).count("must be") == 1


@pytest.mark.parametrize("given", [10**400, "9" * 400, 1e308])
def test_of_what_is_long_the_beginning_is_told(given: Any) -> None:
    with pytest.raises(InputError, match="num_frames must be") as told:
        Request(num_frames=given)
    assert len(str(told.value)) < 150


def test_switches_stay_switches() -> None:
    assert Request(force=True).force
    with pytest.raises(InputError, match="force must be true or false, got 'maybe'"):
        Request(force="maybe")  # type: ignore[arg-type]
