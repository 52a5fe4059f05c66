"""Computed seconds outlive the process; what is no time counts as none."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from everyframe.fast_paths import computing_time
from everyframe.fast_paths.computing_time import add_computing_time, reset_computing_time
from everyframe.fast_paths.computing_time import computing_time as seconds_of

pytestmark = pytest.mark.usefixtures("own_cache")


def test_seconds_of_each_key_add_up_and_begin_anew() -> None:
    assert seconds_of("cpu", "a") == 0
    for seconds in (1.5, 2.25):
        add_computing_time("cpu", "a", seconds)
    add_computing_time("cpu", "b", 7)
    add_computing_time("other", "a", 9)
    assert (seconds_of("cpu", "a"), seconds_of("cpu", "b"), seconds_of("other", "a")) == (
        3.75, 7, 9,
    )  # fmt: skip
    reset_computing_time("cpu", "a")
    assert (seconds_of("cpu", "a"), seconds_of("cpu", "b")) == (0, 7)


@pytest.mark.parametrize("seconds", [-1, True, "1", None, [1], {}, math.inf, math.nan])
def test_what_is_no_time_is_counted_from_zero(seconds: object) -> None:
    computing_time._file("cpu", "a").write(seconds)
    assert seconds_of("cpu", "a") == 0
    add_computing_time("cpu", "a", 4)
    assert seconds_of("cpu", "a") == 4


def test_a_cache_without_writing_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EVERYFRAME_CACHE", str(tmp_path / "file" / "below"))
    add_computing_time("cpu", "a", 5)
    reset_computing_time("cpu", "a")
    assert seconds_of("cpu", "a") == 0
