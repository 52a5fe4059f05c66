"""Arrays come back from a run's folder as they were given, in silence."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from everyframe.core.errors import CorruptRunError
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


def test_a_small_file_does_not_become_a_large_tensor(tmp_path: Path) -> None:
    """A stranger's run says in its text which sizes and dtypes its values have."""
    store = TensorStore(tmp_path / "tensors")
    expanded = torch.zeros(2, 1).expand(2, 3)
    kept = store.keep(expanded)
    assert kept is not None
    assert store.fetch(kept).stride() == expanded.stride()
    with pytest.raises(CorruptRunError, match="has the size"):
        store.fetch({**kept, "size": [2, 1 << 40]})
    with pytest.raises(CorruptRunError, match="void"):
        store.fetch({"as": "number", "dtype": "V8", "value": 1 << 40})
