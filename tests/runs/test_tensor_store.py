"""Arrays come back from a run's folder as they were given, in silence."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from everyframe.runs.tensor_store import TensorStore

NUMBERS = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


def read_only() -> np.ndarray[Any, Any]:
    """An array as a picture's bytes give it."""
    return np.frombuffer(NUMBERS.tobytes(), np.float32).reshape(NUMBERS.shape)


@pytest.mark.parametrize(
    "value",
    [NUMBERS, read_only(), NUMBERS[::-1], NUMBERS.T, NUMBERS.astype(">f4"), NUMBERS[0, 0, :1],
     np.array(3.5), NUMBERS > 7, NUMBERS.astype(np.uint16)],
    ids=["plain", "read only", "backwards", "transposed", "foreign byte order", "part", "scalar",
         "truth values", "uint16"],
)  # fmt: skip
def test_an_array_comes_back(value: np.ndarray[Any, Any], tmp_path: Path) -> None:
    store = TensorStore(tmp_path / "tensors")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept = store.keep(value)
    assert kept is not None
    back = store.fetch(kept)
    assert back.dtype == value.dtype.newbyteorder("=")
    np.testing.assert_array_equal(back, value)
