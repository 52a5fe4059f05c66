"""Values of options from Python: numbers of any kind are taken, anything else is refused.

What a command line says of the same is in `tests/cli/test_help_format.py`.
"""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from everyframe.core.errors import InputError
from everyframe.core.parallel_plan import parse_parallel
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
    ) as raised:
        Request(**{name: given})
    assert ";" not in str(raised.value), "one error for one option"


@pytest.mark.parametrize("given", ["lots", "nan", "1e400", "a,b", True, {}])
def test_one_number_or_several_are_one_option(given: Any) -> None:
    with pytest.raises(InputError) as raised:
        InpaintOptions(control_guidance_end=given)
    assert str(raised.value).startswith("control_guidance_end must be a ")
    assert str(raised.value).count("must be") == 1


@pytest.mark.parametrize("given", [10**400, "9" * 400, 1e308])
def test_of_what_is_long_the_beginning_is_reported(given: Any) -> None:
    with pytest.raises(InputError, match="num_frames must be") as raised:
        Request(num_frames=given)
    assert len(str(raised.value)) < 150


def test_an_option_of_any_name_is_an_option() -> None:
    assert Request(**{"self": 1}).family_options == {"self": 1}
    with pytest.raises(InputError, match="self is no option, got 1"):
        InpaintOptions(**{"self": 1})


def test_switches_stay_switches() -> None:
    assert Request(force=True).force
    with pytest.raises(InputError, match="force must be true or false, got 'maybe'"):
        Request(force="maybe")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "given", "written"),
    [
        ("model", Path("some/folder"), str(Path("some/folder"))),
        ("report", Path("here"), "here"),
        ("device", torch.device("cpu"), "cpu"),
        ("device", torch.device("cuda", 1), "cuda:1"),
        ("dtype", torch.bfloat16, "bfloat16"),
        ("dtype", torch.half, "float16"),
        ("size", (64, 48), "64x48"),
        ("size", [np.int64(64), 48], "64x48"),
        ("devices", [0, 1], "0,1"),
        ("devices", (torch.device("cuda:0"), "cuda:2"), "cuda:0,cuda:2"),
        ("shares", [24, 8.5], "24,8.5"),
        ("shares", [24.0, np.float32(8)], "24,8"),
        ("shares", [1234567.0, 0.123456789], "1234567,0.123456789"),
        ("max_memory", 8_000_000_000, "8000000000"),
        ("max_host_memory", np.int64(10**9), "1000000000"),
    ],
)
def test_pythons_own_values_are_what_a_command_line_writes(
    name: str, given: Any, written: str
) -> None:
    assert Request(**{name: given}) == Request(**{name: written})
    assert Request(**{name: given}).given() == {name: written}


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("size", 64, r"WIDTHxHEIGHT, or \(width, height\), got 64"),
        ("size", (64, 4.5), r"\(width, height\), got \(64, 4\.5\)"),
        ("size", (64, -1), "WIDTHxHEIGHT, for example 640x360, got '64x-1'"),
        ("devices", [], r"such as 0,1, got \[\]"),
        ("devices", [None], r"such as 0,1, got \[None\]"),
        ("device", 0, "a device such as cuda:1, got 0"),
        ("dtype", torch.int8, "one of auto, fp32, .*got 'int8'"),
        ("dtype", float, "a dtype such as bf16, got <class 'float'>"),
        ("max_memory", True, "such as 8GB, or bytes, got True"),
        ("max_memory", -5, "such as 8GB.*got '-5'"),
        ("model", 5, "text, got 5"),
    ],
)
def test_other_values_of_pythons_are_refused(name: str, given: Any, says: str) -> None:
    with pytest.raises(InputError, match=f"^{name} must be .*{says}"):
        Request(**{name: given})


@pytest.mark.parametrize("name", ["prompt", "negative_prompt"])
def test_a_prompt_that_is_no_text_is_refused_before_a_tokenizer_meets_it(name: str) -> None:
    with pytest.raises(InputError, match=f"^{name} is not UTF-8 text, got '.udcff'"):
        Request(**{name: "\udcff"})


def test_an_option_is_read_by_its_earlier_name() -> None:
    assert Request(without="flash").disable == ("flash",)
    with pytest.raises(InputError, match="without is the earlier name of disable; give disable"):
        Request(without="flash", disable="compile")


def test_a_digit_that_is_no_number_is_refused_as_other_words_are() -> None:
    with pytest.raises(InputError, match=r"parallel must be auto, or of data=N.*got 'ulysses=²'"):
        parse_parallel("ulysses=²")
