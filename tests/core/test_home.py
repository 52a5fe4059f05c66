"""Accounts without a home folder are told what to set, and a name after ``~`` may be nobody's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import everyframe
from everyframe.core.errors import InputError
from everyframe.core.home import expanded, home_folder
from everyframe.runs.folder import runs_folder


def test_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as where there is no entry
    for name in ("EVERYFRAME_RUNS", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InputError, match=r"no home folder; set HOME, or EVERYFRAME_CACHE"):
        home_folder()
    with pytest.raises(InputError, match="no home folder"):
        runs_folder()
    monkeypatch.setenv("EVERYFRAME_RUNS", "runs")
    assert runs_folder() == Path("runs")


@pytest.mark.parametrize("name", ["~nobody-is-called-so/x", "x" * 5000, "a/" * 3000])
def test_names_that_no_file_can_have(name: str) -> None:
    assert str(expanded(name)) == str(Path(name))
    with pytest.raises(InputError):
        everyframe.plan("a red circle", model=name)


def test_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert home_folder() == tmp_path
    assert expanded("~/a") == tmp_path / "a"
    assert os.fspath(expanded("a")) == "a"
