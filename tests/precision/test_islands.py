"""Names in and out of islands, and the bytes that follow from them."""

from __future__ import annotations

import pytest
import torch

from everyframe.core.errors import InputError
from everyframe.core.plan import Precision
from everyframe.precision import dtypes
from everyframe.precision.islands import (
    check_islands,
    is_in_island,
    num_narrow,
    outside_of,
    parameter_dtype,
    present,
    weight_bytes,
)

BF16 = Precision("bfloat16", "bfloat16", islands=("t_embedder", "*.wo"))


@pytest.mark.parametrize(
    ("name", "inside"),
    [
        ("t_embedder", True),
        ("t_embedder.mlp.0.weight", True),
        ("x_embedder.proj.weight", False),
        ("block.3.DenseReluDense.wo.weight", True),
        ("block.3.DenseReluDense.wo_2.weight", False),
        ("block.3.DenseReluDense.wi.weight", False),
        ("other.t_embedder.weight", False),
    ],
)
def test_what_a_pattern_holds(name: str, inside: bool) -> None:
    assert is_in_island(name, BF16.islands) is inside
    assert parameter_dtype(name, BF16) == ("float32" if inside else "bfloat16")


def test_no_islands_hold_nothing() -> None:
    assert not is_in_island("t_embedder", ())
    assert not is_in_island("", ())


def test_those_that_are_there() -> None:
    names = ["t_embedder.mlp.0.weight", "block.3.wo.weight", "a+b.weight"]
    asked = ["*.wo", "t_embedder.mlp", "t_embedder.ml", "a+b", "[ab]lock", "*.wo", "mlp"]
    assert present(asked, names) == ("*.wo", "t_embedder.mlp", "a+b", "[ab]lock")


def test_an_island_in_float64_stays_float64() -> None:
    precision = Precision("float64", "float64", islands=("a",))
    assert parameter_dtype("a.weight", precision) == "float64"


def test_bytes() -> None:
    sizes = {"t_embedder.weight": 10, "block.weight": 100}
    assert weight_bytes(sizes, BF16) == 10 * 4 + 100 * 2


def test_elements_outside_of_islands() -> None:
    assert num_narrow({"t_embedder.weight": 10, "block.weight": 100}, BF16) == 100


def test_all_that_is_outside_of_a_module() -> None:
    names = ["encoder.conv.weight", "encoder.norm.weight", "decoder.conv.weight", "shift",
             "time.decoder.conv.weight", "time.quant_conv.weight", "post.decoder"]  # fmt: skip
    # A tensor beside the module is a table, and one of that name is no module.
    assert outside_of("decoder", names) == ("encoder", "time.quant_conv", "post")
    precision = Precision("bfloat16", "bfloat16", outside_of("decoder", names))
    narrow = [each for each in names if parameter_dtype(each, precision) == "bfloat16"]
    assert narrow == ["decoder.conv.weight", "shift", "time.decoder.conv.weight"]
    assert outside_of("decoder", ["encoder.conv.weight"]) == ()


def test_an_island_that_is_not_there_is_refused() -> None:
    with pytest.raises(InputError, match=r"'\*\.wo' matches no part"):
        check_islands(("t_embedder", "*.wo"), ["t_embedder.weight", "block.wi.weight"])


@pytest.mark.parametrize("name", list(dtypes.NUM_BYTES))
def test_dtypes_are_torchs(name: str) -> None:
    dtype = dtypes.torch_dtype(name)
    assert dtypes.dtype_name(dtype) == name
    assert dtypes.num_bytes(name) == torch.empty(0, dtype=dtype).element_size()


def test_a_dtype_that_is_none() -> None:
    with pytest.raises(InputError, match="got 'int8'"):
        dtypes.torch_dtype("int8")
