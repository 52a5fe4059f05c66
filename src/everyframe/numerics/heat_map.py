"""Heat map of one number per module (rows) and step (columns), as png bytes.

Drawn with Pillow alone. Colour shows the order of magnitude, pale to dark; non-finite values have
their own colour, missing ones are white. Above `MAX_ROWS` rows, modules are merged by the common
beginning of their names. Used by traces and by the guard's report.
"""

from __future__ import annotations

import io
import math
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from everyframe.core.errors import InputError
from everyframe.numerics.trace.diff import Comparison

_Cell = tuple[int, int]
_Colour = tuple[int, int, int]

#: Most rows that are readable on one page.
MAX_ROWS = 120
_ROW, _GAP, _TEXT, _BAR = 14, 8, 12, 220
_WIDEST_NAME = 60
#: Pale to dark with linear lightness, so that it is readable without colour vision.
_SCALE: tuple[_Colour, ...] = (
    (247, 244, 224), (214, 227, 165), (133, 199, 163), (62, 156, 174), (51, 104, 166),
    (60, 52, 124), (38, 14, 56),
)  # fmt: skip
_NOT_FINITE: _Colour = (230, 30, 120)
_NOT_THERE: _Colour = (255, 255, 255)
_INK: _Colour = (20, 20, 20)


def heat_map(
    values: npt.ArrayLike,
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    title: str,
    unit: str,
    marked: Collection[_Cell] = (),
) -> bytes:
    """Draw `values` (rows, columns), numbers of 0 or more, as a png.

    Args:
        values: infinity marks non-finite, NaN missing.
        title: text above the map.
        unit: text beside the colour scale.
        marked: (row, column) cells that get a frame.

    Raises:
        InputError: no values, or a number of names that does not match.
    """
    table = np.asarray(values, dtype=np.float64)
    if table.ndim != 2 or table.shape != (len(rows), len(columns)) or not table.size:
        raise InputError(
            f"{len(rows)} names of rows and {len(columns)} of columns for values {table.shape}"
        )
    table, names, marks = _shorten(table, list(rows), set(marked))
    low, high = _ends(table)
    width = max(2, min(24, 900 // table.shape[1]))
    pen = _Page(names, table.shape[1] * width, title, unit)
    for (row, column), value in np.ndenumerate(table):
        pen.cell(row, column, width, _colour(value, low, high))
    for row, column in sorted(marks):
        pen.frame(row, column, width)
    pen.columns(columns, width)
    pen.scale(low, high, bool(np.isinf(table).any()))
    return pen.png()


def _shorten(
    table: npt.NDArray[np.float64], names: list[str], marks: set[_Cell]
) -> tuple[npt.NDArray[np.float64], list[str], set[_Cell]]:
    """Merge rows down to `MAX_ROWS`: the maximum of rows with the same beginning of their name."""
    depth = max(name.count(".") for name in names) + 1
    groups = names
    while len(set(groups)) > MAX_ROWS and depth > 1:
        depth -= 1
        groups = [".".join(name.split(".")[:depth]) for name in names]
    # Marked rows keep their own names, with their neighbours if there is room.
    around = {groups[row] for row, _ in marks}
    opened = [name if group in around else group for name, group in zip(names, groups, strict=True)]
    if len(set(opened)) <= MAX_ROWS:
        groups = opened
    places = {group: place for place, group in enumerate(dict.fromkeys(groups))}
    if len(places) == len(names):
        return table, names, marks
    whole = np.full((len(places), table.shape[1]), np.nan)
    for group, values in zip(groups, table, strict=True):
        whole[places[group]] = np.fmax(whole[places[group]], values)
    return whole, list(places), {(places[groups[row]], column) for row, column in marks}


def _ends(table: npt.NDArray[np.float64]) -> tuple[int, int]:
    """Exponents of ten at both ends of the scale; at most twelve apart."""
    shown = table[np.isfinite(table) & (table > 0)]
    if not shown.size:
        return -1, 0
    high = math.ceil(math.log10(float(shown.max())))
    low = max(math.floor(math.log10(float(shown.min()))), high - 12)
    return low, max(high, low + 1)


def _colour(value: float, low: int, high: int) -> _Colour:
    if math.isnan(value):
        return _NOT_THERE
    if math.isinf(value):
        return _NOT_FINITE
    place = 0.0 if value <= 0 else (math.log10(value) - low) / (high - low)
    place = min(max(place, 0.0), 1.0) * (len(_SCALE) - 1)
    before = min(int(place), len(_SCALE) - 2)
    share = place - before
    pair = zip(_SCALE[before], _SCALE[before + 1], strict=True)
    red, green, blue = (round(a + (b - a) * share) for a, b in pair)
    return red, green, blue


class _Page:
    """The page: title, row names, cells, colour scale at the bottom."""

    def __init__(self, names: Sequence[str], width: int, title: str, unit: str) -> None:
        self._font = ImageFont.load_default(_TEXT)
        labels = [_cut(name) for name in names]
        self._left = 2 * _GAP + max(round(self._font.getlength(label)) for label in labels)
        self._top = 3 * _GAP + 2 * _TEXT
        self._bottom = self._top + len(names) * _ROW
        self._unit = unit
        needed = max(width, _BAR + round(self._font.getlength(unit)) + _GAP)
        needed = max(needed, round(self._font.getlength(title)) - self._left)
        size = (self._left + needed + _GAP, self._bottom + 3 * _TEXT + 3 * _GAP)
        self._sheet = Image.new("RGB", size, "white")
        self._pen = ImageDraw.Draw(self._sheet)
        self._write(_GAP, _GAP, title)
        for row, label in enumerate(labels):
            self._write(_GAP, self._top + row * _ROW, label)

    def cell(self, row: int, column: int, width: int, colour: _Colour) -> None:
        """Fill one cell."""
        x, y = self._left + column * width, self._top + row * _ROW
        self._pen.rectangle((x, y, x + width - 1, y + _ROW - 1), fill=colour)

    def frame(self, row: int, column: int, width: int) -> None:
        """Draw a frame around one cell."""
        x, y = self._left + column * width, self._top + row * _ROW
        self._pen.rectangle((x - 1, y - 1, x + width, y + _ROW), outline=_NOT_FINITE, width=2)

    def columns(self, names: Sequence[str], width: int) -> None:
        """Write column names above the cells, as many as fit."""
        end = 0
        for column, name in enumerate(names):
            x = self._left + column * width
            if x >= end:
                self._write(x, self._top - _TEXT - 4, name)
                end = x + round(self._font.getlength(name)) + _GAP

    def scale(self, low: int, high: int, has_infinite: bool) -> None:
        """Draw the colour scale and its legend."""
        y = self._bottom + _GAP
        for place in range(_BAR):
            value = 10 ** (low + (high - low) * place / (_BAR - 1))
            x = self._left + place
            self._pen.line((x, y, x, y + _TEXT), fill=_colour(value, low, high))
        self._write(self._left + _BAR + _GAP, y - 1, self._unit)
        self._write(self._left, y + _TEXT + 2, f"1e{low}")
        end = f"1e{high}"
        self._write(self._left + _BAR - round(self._font.getlength(end)), y + _TEXT + 2, end)
        if has_infinite:
            x, y = self._left, y + 2 * _TEXT + 4
            self._pen.rectangle((x, y, x + _TEXT, y + _TEXT), fill=_NOT_FINITE)
            self._write(x + _TEXT + _GAP, y - 1, "not finite")

    def png(self) -> bytes:
        """Encode the page as png."""
        out = io.BytesIO()
        self._sheet.save(out, "png", optimize=True)
        return out.getvalue()

    def _write(self, x: int, y: int, text: str) -> None:
        self._pen.text((x, y), text, fill=_INK, font=self._font)


def _cut(name: str) -> str:
    """Shorten a long name at its beginning, as its end is more specific."""
    return name if len(name) <= _WIDEST_NAME else f"...{name[-_WIDEST_NAME + 3 :]}"


def draw_comparison(compared: Comparison, title: str) -> bytes:
    """Heat map (png) of relative differences of module outputs; the first finding has a frame."""
    trace = compared.a
    called = dict.fromkeys(call.part for call in trace.calls)
    rows = {part: row for row, part in enumerate(called)}
    columns = max((call.number for call in trace.calls), default=1)
    table = np.full((len(rows), columns), np.nan)
    for error, seen in zip(compared.errors, trace.seen, strict=True):
        if seen.kind == "output" and not math.isnan(error):
            call = trace.calls[seen.call]
            cell = rows[call.part], call.number - 1
            table[cell] = np.fmax(table[cell], error)
    marked = set()
    for place in compared.places[:1]:
        call = trace.calls[trace.seen[place.seen].call]
        marked.add((rows[call.part], call.number - 1))
    return heat_map(
        table,
        [trace.parts[part].name for part in rows],
        [str(column + 1) for column in range(columns)],
        title=title,
        unit="relative difference, by module and call",
        marked=marked,
    )
