"""Our own values come back as they were, and nothing else comes out of what a file says."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from everyframe.core.errors import CorruptRunError, NotSerializableError
from everyframe.core.parallel_plan import ParallelPlan, RankPlan
from everyframe.core.request import Request
from everyframe.core.serialization import from_jsonable, to_jsonable

VALUES = [
    None,
    [1, 2.5, "a", True],
    (1, (2, [3])),
    {"$": 1, (1, 2): "a tuple for a key"},
    Path("a/b"),
    Fraction(24000, 1001),
    ParallelPlan((RankPlan("cuda:1", 0, 0.1),), (1,), finished_videos=(3,)),
]


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_what_is_ours_comes_back(value: Any) -> None:
    again = from_jsonable(json.loads(json.dumps(to_jsonable(value))))
    assert again == value
    assert type(again) is type(value)


def test_a_request_comes_back_with_what_was_given_alone() -> None:
    request = Request(prompt="a circle", seed=7, source="a.png")
    again = from_jsonable(json.loads(json.dumps(to_jsonable(request))))
    assert again.given() == request.given()


def test_what_is_bulky_is_put_away_and_brought() -> None:
    away: list[bytearray] = []

    def keep(value: Any) -> dict[str, Any] | None:
        if not isinstance(value, bytearray):
            return None
        away.append(value)
        return {"place": len(away) - 1}

    plain = json.loads(json.dumps(to_jsonable([bytearray(b"x")], keep)))
    assert from_jsonable(plain, lambda kept: away[kept["place"]]) == [bytearray(b"x")]
    with pytest.raises(CorruptRunError, match="no tensors were saved"):
        from_jsonable(plain)


def test_what_is_somebody_elses_is_refused() -> None:
    with pytest.raises(NotSerializableError, match=r"bytearray can't be saved"):
        to_jsonable([bytearray(b"x")])


@pytest.mark.parametrize(
    "name",
    [
        "os:system",
        "everyframe.core.serialization:to_jsonable",
        "everyframe.api:Path",
        "everyframe:no",
    ],
)
def test_only_our_own_data_is_made(name: str) -> None:
    with pytest.raises(CorruptRunError):
        from_jsonable({"$": "object", "class": name, "fields": {}})


@pytest.mark.parametrize(
    "data", [{"$": "fraction", "text": "1/0"}, json.loads("[" * 600 + "]" * 600)]
)
def test_what_nobody_wrote_is_corrupt(data: Any) -> None:
    with pytest.raises(CorruptRunError, match="the saved data can't be read"):
        from_jsonable({"plan": data})


@pytest.mark.parametrize("text", ["1e999999999", "1/0", "24/1/2", "0.5", 3])
def test_a_fraction_is_two_whole_numbers(text: Any) -> None:
    """A small file may not take hours to be read."""
    plain = to_jsonable(Fraction(24000, 1001))
    assert from_jsonable(plain) == Fraction(24000, 1001)
    assert from_jsonable(to_jsonable(Fraction(24))) == 24
    with pytest.raises(CorruptRunError, match="can't be read"):
        from_jsonable({**plain, "text": text})
