"""Budgets and methods as they are written, and the steps that a method computes."""

from __future__ import annotations

import pytest

from everyframe.core.errors import InputError
from everyframe.core.quality import (
    METHODS,
    LossyMethod,
    SamplingMethod,
    parse_method,
    parse_quality,
)
from everyframe.core.request import Request


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("exact", None),
        (" Exact ", None),
        ("32dB", 32.0),
        ("37.5 db", 37.5),
        ("ab2@8", LossyMethod(SamplingMethod("ab2", 8))),
        ("taylor2@12w4g50", LossyMethod(SamplingMethod("taylor2", 12, 4, 50))),
        ("unipc@6g0", LossyMethod(SamplingMethod("unipc", 6, 1, 0))),
        ("abm2@7e130g33", LossyMethod(SamplingMethod("abm2", 7, 1, 33, 130))),
        ("abm2@10e130h", LossyMethod(SamplingMethod("abm2", 10, 1, 100, 130, True))),
        ("AB2@8+INT8-dynamic", LossyMethod(SamplingMethod("ab2", 8), "int8-dynamic")),
        ("exact+fp8-scaled", LossyMethod(None, "fp8-scaled")),
    ],
)
def test_what_is_meant(text: str, meant: object) -> None:
    assert parse_quality(text) == meant


@pytest.mark.parametrize("name", METHODS)
def test_a_method_reads_as_it_is_written(name: str) -> None:
    for method in (
        SamplingMethod(name, 9),
        SamplingMethod(name, 9, 3, 40),
        SamplingMethod(name, 9, 1, 40, 125),
    ):
        for products in ("", "int8-dynamic"):
            lossy = LossyMethod(method, products)
            assert parse_quality(str(lossy)) == lossy


@pytest.mark.parametrize(
    ("mild", "bold"),
    [
        ("ab2@8", "ab2@8"),
        ("ab2@9", "ab2@8"),
        ("ab2@9", "ab2@8+int8-dynamic"),
        ("ab2@8", "ab2@8+int8-dynamic"),
        ("exact+int8-dynamic", "unipc@4w2g50+int8-dynamic"),
    ],
)
def test_a_milder_method_loses_nothing_that_the_bolder_one_does_not(mild: str, bold: str) -> None:
    first, second = parse_method(mild), parse_method(bold)
    assert first.is_no_bolder(second)
    assert second.is_no_bolder(first) == (mild == bold)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("ab2@9", "unipc@8"),
        ("ab2@9", "ab2@8g50"),
        ("ab2@9+int8-dynamic", "ab2@8"),
        ("ab2@9+int8-dynamic", "ab2@8+fp8-scaled"),
        ("exact+int8-dynamic", "ab2@8"),
    ],
)
def test_methods_of_other_kinds_are_not_compared(one: str, other: str) -> None:
    first, second = parse_method(one), parse_method(other)
    assert not first.is_no_bolder(second)
    assert not second.is_no_bolder(first)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("32", "must be exact, a budget of 20dB to 50dB, or a method such as ab2@8, got '32'"),
        ("19dB", "must be 20dB to 50dB"),
        ("51dB", "for no loss at all: exact"),
        ("ab3@8", "did you mean 'ab2'"),
        ("ab2@1", "2 or more computed steps"),
        ("ab2@8w9", "no more warm steps"),
        ("ab2@8w0", "no more warm steps"),
        ("ab2@8g101", "a guided share of 0 to 100"),
        ("ab2@8e99", "an exponent of 100 to 300 percent"),
        ("ab2@8w2e120", "no warm steps"),
        ("ab2@8g50h", "must be exact, a budget"),
        ("taylor1@8h", "h needs a solver (ab2, dpm2m, unipc, abm2), not taylor1"),
        ("lossless", "must be exact"),
        ("ab2@8+int8", "no products 'int8' among int8-dynamic, fp8-scaled; did you mean 'int8-dy"),
        ("ab2@8+", "no products ''"),
        ("32dB+int8-dynamic", "must be exact, a budget"),
        ("+int8-dynamic", "must be exact, a budget"),
    ],
)
def test_anything_else_is_an_error(text: str, says: str) -> None:
    with pytest.raises(InputError) as raised:
        Request(quality=text)
    assert says in str(raised.value)


def test_computed_steps_begin_with_the_first_and_are_even() -> None:
    assert SamplingMethod("ab2", 8).computed_steps(30) == (0, 4, 8, 11, 15, 19, 23, 26)
    assert SamplingMethod("ab2", 6).computed_steps(30) == (0, 5, 10, 15, 20, 25)
    assert SamplingMethod("ab2", 5, 3).computed_steps(9) == (0, 1, 2, 3, 6)
    assert SamplingMethod("ab2", 30).computed_steps(12) == tuple(range(12))


@pytest.mark.parametrize("num_steps", [2, 3, 7, 30, 250])
def test_so_many_steps_are_computed_as_are_named(num_steps: int) -> None:
    for count in range(2, num_steps + 1):
        for warm in range(1, count + 1):
            steps = SamplingMethod("ab2", count, warm).computed_steps(num_steps)
            assert len(steps) == count == len({*steps})
            assert steps[:warm] == tuple(range(warm))
            assert steps[-1] < num_steps


def test_an_exponent_crowds_steps_at_the_beginning() -> None:
    crowded = SamplingMethod("abm2", 7, early_percent=130)
    assert crowded.computed_steps(30) == (0, 2, 6, 10, 14, 19, 25)
    for num_steps in (2, 3, 7, 30, 250):
        for count in range(2, num_steps + 1):
            steps = SamplingMethod("abm2", count, early_percent=300).computed_steps(num_steps)
            assert len(steps) == count == len({*steps})
            assert [0, *sorted(steps)[1:]] == [*steps]
            assert steps[-1] < num_steps


def test_guidance_is_held_in_every_second_computed_step_from_the_fourth() -> None:
    method = SamplingMethod("abm2", 10, early_percent=130, holds_guidance=True)
    assert method.computed_steps(30) == (0, 2, 4, 6, 9, 12, 15, 19, 22, 26)
    assert method.held_steps(30) == (6, 12, 19, 26)
    assert method.has_partial_guidance
    assert str(method) == "abm2@10e130h"
    assert SamplingMethod("abm2", 10).held_steps(30) == ()
    assert SamplingMethod("abm2", 3, holds_guidance=True).held_steps(30) == ()


def test_guided_steps_are_rounded_up() -> None:
    assert SamplingMethod("ab2", 8, 1, 50).guided_steps(7) == 4
    assert SamplingMethod("ab2", 8).guided_steps(7) == 7
    assert SamplingMethod("ab2", 8, 1, 0).guided_steps(7) == 0
