"""Computed seconds outlive the process; what is damaged or too much of them counts as none."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path

import pytest

from everyframe.fast_paths import certificates, computing_time
from everyframe.fast_paths.computing_time import (
    MAX_PLANS,
    add_computing_time,
    reset_computing_time,
)
from everyframe.fast_paths.computing_time import computing_time as seconds_of

pytestmark = pytest.mark.usefixtures("own_cache")


def file() -> Path:
    return certificates.folder() / "computing_time.json"


def test_seconds_of_each_key_add_up_and_begin_anew() -> None:
    assert seconds_of("cpu", "a") == 0
    reset_computing_time("cpu", "a")
    assert not file().exists(), "nothing to reset"
    for seconds in (1.5, 2.25):
        add_computing_time("cpu", "a", seconds)
    add_computing_time("cpu", "b", 7)
    add_computing_time("other", "a", 9)
    assert (seconds_of("cpu", "a"), seconds_of("cpu", "b"), seconds_of("other", "a")) == (
        3.75, 7, 9,
    )  # fmt: skip
    reset_computing_time("cpu", "a")
    assert (seconds_of("cpu", "a"), seconds_of("cpu", "b")) == (0, 7)
    assert json.loads(file().read_text()) == {
        "schema": "everyframe.computing_time/1", "seconds": {"cpu/b": 7.0, "other/a": 9.0},
    }  # fmt: skip


def test_the_plans_that_ran_last_are_kept() -> None:
    for number in range(MAX_PLANS):
        add_computing_time("cpu", str(number), 1)
    add_computing_time("cpu", "0", 1)
    add_computing_time("cpu", "new", 1)
    assert seconds_of("cpu", "0") == 2
    assert seconds_of("cpu", "1") == 0
    assert len(json.loads(file().read_text())["seconds"]) == MAX_PLANS
    long = {f"{each:020}/{each:020}": 1e9 + each for each in range(MAX_PLANS)}
    file().write_text(json.dumps({"schema": "everyframe.computing_time/1", "seconds": long}))
    add_computing_time("cpu", "new", 1)
    assert seconds_of(f"{9:020}", f"{9:020}") == 1e9 + 9, "a full file is not too large to read"


@pytest.mark.parametrize("seconds", [-1, True, "1", None, [1], math.inf, math.nan])
def test_what_is_no_time_is_counted_from_zero(
    seconds: object, caplog: pytest.LogCaptureFixture
) -> None:
    add_computing_time("cpu", "a", 5)
    whole = json.loads(file().read_text())
    file().write_text(json.dumps({**whole, "seconds": {"cpu/a": seconds}}))
    assert seconds_of("cpu", "a") == 0
    assert "counted from zero" in caplog.text
    add_computing_time("cpu", "a", 4)
    assert seconds_of("cpu", "a") == 4


@pytest.mark.parametrize(
    "text", ["", "{", "3", "[]", '{"seconds": {"cpu/a": 1}}', "[" * 30_000, " " * 100_000]
)
def test_a_damaged_file_is_written_anew(text: str) -> None:
    add_computing_time("cpu", "a", 5)
    file().write_text(text)
    assert seconds_of("cpu", "a") == 0
    add_computing_time("cpu", "a", 4)
    assert seconds_of("cpu", "a") == 4


def test_a_folder_without_writing_is_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    add_computing_time("cpu", "a", 5)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(computing_time, "replace_file", refuse)
    add_computing_time("cpu", "a", 5)
    assert "can't be used (Permission denied)" in caplog.text
    assert seconds_of("cpu", "a") == 5


def test_writers_at_once_leave_a_whole_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(computing_time._log, "warning", lambda *_: pytest.fail("damaged"))

    def add(name: str) -> None:
        for _ in range(20):
            add_computing_time("cpu", name, 1)

    threads = [threading.Thread(target=add, args=(str(number),)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [seconds_of("cpu", str(number)) for number in range(4)]
    assert max(found) > 0
    assert all(each <= 20 for each in found), "an addition may be lost, and none counts twice"
