"""A table shows all of every cell, however narrow the terminal is."""

from __future__ import annotations

import io

import pytest

from everyframe.cli.table_layout import table
from everyframe.cli.tables import console

ROWS = (("decode", "video autoencoder", "22.5 MB"), ("text", "T5 text encoder", ""))


def printed(monkeypatch: pytest.MonkeyPatch, columns: int) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(columns))
    file = io.StringIO()
    shown = table(("stage", "left"), ("component", "left"), ("weights", "right"))
    for row in ROWS:
        shown.add_row(*row)
    console(file).print(shown)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_a_row_is_a_line_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = printed(monkeypatch, 60)
    assert lines[0].split() == ["stage", "component", "weights"]
    assert lines[2].split() == ["decode", "video", "autoencoder", "22.5", "MB"]


def test_one_column_breaks_lines_first(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = printed(monkeypatch, 32)
    assert lines[2].split() == ["decode", "video", "22.5", "MB"]
    assert lines[3].split() == ["autoencoder"]


def test_nothing_is_cut_off_where_all_columns_are_too_wide(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert printed(monkeypatch, 28) == [
        "stage      decode",
        "component  video autoencoder",
        "weights    22.5 MB",
        "",
        "stage      text",
        "component  T5 text encoder",
        "",
    ]
