"""Pictures of terminal output: run a command and draw its lines as SVG."""

from __future__ import annotations

import contextlib
import io
import os
import re
import textwrap
from unittest import mock

from svg import Drawing

from everyframe.cli.main import main

WIDTH = 96
_STEP, _CHARACTER = 18, 7.45
#: Start of a line -> its colour.
_COLOURS = {
    r"\$ ": "blue", r" +✗ ": "red", r" +! ": "orange", "note: ": "orange", "Not ready": "red",
    "Fits|Ready|Dry run": "green", "─": "line", "stage ": "soft", " {6}fix:": "blue",
    r" {10}\S": "blue",
}  # fmt: skip
_MARKS = {"✓": "green", "!": "orange", "✗": "red"}


def plan() -> str:
    """The plan of Open-Sora 1.2 for a machine that is not here, with little memory."""
    return _picture([
        "plan", "a ship in a storm", "--model", "opensora-1.2", "--resolution", "480p",
        "--seconds", "4", "--seed", "7", "--as", "cuda-sm89", "--max-memory", "8GB",
    ])  # fmt: skip


def doctor() -> str:
    """The doctor's report on a machine that is not here."""
    return _picture(["doctor", "--as", "a100-oneflow"])


def _picture(words: list[str]) -> str:
    shown = " ".join(f'"{word}"' if " " in word else word for word in words)
    command = textwrap.wrap(f"$ everyframe {shown}", WIDTH - 2, subsequent_indent="    ")
    command[:-1] = [f"{line} \\" for line in command[:-1]]
    lines = [*command, "", *_output(words)]
    page = Drawing(
        round(WIDTH * _CHARACTER) + 48, 48 + _STEP * len(lines) + 20, f"everyframe {shown}"
    )
    page.rect(0.5, 0.5, page.width - 1, page.height - 1, "page", "line", 10)
    for number, tone in enumerate(("red", "orange", "green")):
        page.circle(24 + number * 18, 22, 5, tone)
    colour, is_wrapped = "ink", False
    for number, line in enumerate(lines):
        colour = colour if is_wrapped else _colour(line)
        is_wrapped = line.endswith(" \\") or (line.startswith("note: ") and len(line) > WIDTH - 12)
        y = 56 + number * _STEP
        for at, piece in _pieces(line):
            page.text(24 + at * _CHARACTER, y, piece, _MARKS.get(piece, colour), 12.4, mono=True)
    return page.svg()


def _output(words: list[str]) -> list[str]:
    printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with (
        mock.patch.dict(os.environ, {"COLUMNS": str(WIDTH), "NO_COLOR": "1"}),
        contextlib.redirect_stdout(printed),
    ):
        main(words)
    printed.seek(0)
    return [line.rstrip() for line in printed]


def _pieces(line: str) -> list[tuple[int, str]]:
    """(column, text) of the pieces of a line, so that columns stay aligned in any font."""
    return [(found.start(), found[0]) for found in re.finditer(r"[✓!✗](?= )|\S+(?: \S+)*", line)]


def _colour(line: str) -> str:
    return next((tone for start, tone in _COLOURS.items() if re.match(start, line)), "ink")
