"""Pieces of a file's tensors are what torch makes of the same tensors in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from everyframe.checkpoints.reshape import TensorReshape, rearranged
from everyframe.checkpoints.tensor_file import open_checkpoint
from everyframe.core.errors import CheckpointError

MATRIX = torch.arange(24, dtype=torch.float32).reshape(6, 4)
CUTS = (
    TensorReshape(r"(a)\.in_proj", (r"\1.q", r"\1.k", r"\1.v")),
    TensorReshape(r"proj", ("proj.weight",), transposed=True),
    TensorReshape(r"kernel", ("matrix",), is_kernel=True),
    TensorReshape(r"both", ("left", "right"), transposed=True),
)


def test_pieces(tmp_path: Path) -> None:
    tensors = {
        "a.in_proj": MATRIX, "proj": MATRIX, "kernel": MATRIX.half()[:, :, None, None],
        "both": MATRIX, "as.it.is": MATRIX[0].contiguous(),
    }  # fmt: skip
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    save_file(copies, tmp_path / "one.safetensors")
    made = rearranged(open_checkpoint(tmp_path / "one.safetensors"), CUTS)
    q, k, v = MATRIX.chunk(3)
    left, right = MATRIX.chunk(2)
    wanted = {
        "a.q": q, "a.k": k, "a.v": v, "proj.weight": MATRIX.T, "matrix": MATRIX.half(),
        "left": left.T, "right": right.T, "as.it.is": MATRIX[0],
    }  # fmt: skip
    assert set(made) == set(wanted)
    for name, tensor in wanted.items():
        assert made.shape(name) == tuple(tensor.shape)
        assert torch.equal(made.load(name), tensor)


def test_a_pickle_s_pieces(tmp_path: Path) -> None:
    """Its tensors may lie in strides of their own."""
    torch.save({"a.in_proj": MATRIX.T.contiguous().T}, tmp_path / "one.pth")
    made = rearranged(open_checkpoint(tmp_path / "one.pth"), CUTS)
    assert torch.equal(made.load("a.k"), MATRIX[2:4])


@pytest.mark.parametrize(
    ("name", "tensor", "text"),
    [
        ("a.in_proj", MATRIX[:4], r"'a.in_proj' has shape \(4, 4\), expected 3 equal pieces"),
        ("proj", MATRIX[0], "expected a matrix"),
        ("kernel", MATRIX.reshape(2, 3, 4), "expected a kernel of one position"),
        ("kernel", MATRIX[0], "expected a kernel of one position"),
    ],
)
def test_what_can_not_be_cut(tmp_path: Path, name: str, tensor: torch.Tensor, text: str) -> None:
    save_file({name: tensor.contiguous()}, tmp_path / "one.safetensors")
    with pytest.raises(CheckpointError, match=text):
        rearranged(open_checkpoint(tmp_path / "one.safetensors"), CUTS)
