"""Modules and steps as a picture: what is drawn where, read back from the pixels."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from everyframe.core.errors import InputError
from everyframe.numerics.heat_map import MAX_ROWS, heat_map

INFINITE = (230, 30, 120)
DARK = (38, 14, 56)


def drawn(values: np.ndarray, rows: list[str] | None = None, **more: object) -> np.ndarray:
    names = rows or [f"blocks.{row}" for row in range(len(values))]
    columns = [str(column + 1) for column in range(values.shape[1])]
    png = heat_map(values, names, columns, title="t", unit="difference", **more)  # type: ignore[arg-type]
    return np.asarray(Image.open(io.BytesIO(png)))


def area(picture: np.ndarray, colour: tuple[int, int, int]) -> int:
    """Pixels of exactly that colour above the scale."""
    return int((picture[: len(picture) - 60] == colour).all(-1).sum())


def test_the_largest_is_darkest_and_what_is_not_finite_stands_out() -> None:
    values = np.array([[1e-6, 1e-6], [1e-6, 1.0], [1e-3, np.nan]])
    plain = drawn(values)
    assert area(plain, DARK) == 24 * 14  # one whole cell
    assert area(plain, INFINITE) == 0
    values[2, 0] = np.inf
    assert area(drawn(values), INFINITE) == 24 * 14


def test_marks_are_drawn_around_a_cell() -> None:
    values = np.full((3, 3), 1e-3)
    assert area(drawn(values), INFINITE) == 0
    assert area(drawn(values, marked=[(1, 1)]), INFINITE) > 100


def test_many_modules_are_drawn_by_what_is_around_them() -> None:
    names = [f"blocks.{block}.part{part}" for block in range(40) for part in range(20)]
    values = np.full((len(names), 2), 1e-6)
    values[333, 1] = 1.0  # block 16
    picture = drawn(values, names)
    assert len(picture) < MAX_ROWS * 14 + 120
    column = (picture == DARK).all(-1)[:-60]
    top = int(np.argwhere(column.any(1))[0, 0])
    assert (top - 48) // 14 == 16
    assert area(picture, DARK) == 24 * 14


def test_what_is_marked_is_shown_by_its_own_name() -> None:
    names = [f"blocks.{block}.part{part}" for block in range(40) for part in range(20)]
    values = np.full((len(names), 1), 1e-6)
    values[333] = 1.0  # block 16, part 13
    picture = drawn(values, names, marked=[(333, 0)])
    top = int(np.argwhere((picture == INFINITE).all(-1).any(1))[0, 0])
    assert (top + 2 - 48) // 14 == 16 + 13
    assert len(picture) > (40 + 19) * 14


def test_nothing_but_zeros_can_be_drawn() -> None:
    assert drawn(np.zeros((1, 1))).shape[2] == 3


def test_names_must_fit() -> None:
    with pytest.raises(InputError, match="1 names of rows and 2 of columns"):
        heat_map(np.zeros((2, 2)), ["a"], ["1", "2"], title="t", unit="u")
