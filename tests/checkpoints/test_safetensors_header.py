"""Each way to break a safetensors file is named in an error, before a tensor is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from everyframe.checkpoints.safetensors_header import read_header
from everyframe.core.errors import CheckpointError

Table = dict[str, object]


def write(path: Path, table: Table, data: bytes) -> Path:
    header = json.dumps(table).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


def entry(begin: int, end: int, shape: list[int], dtype: str = "F32") -> Table:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_facts_equal_those_of_the_formats_own_library(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {
        "w": torch.randn(3, 4),
        "half": torch.randn(5).to(torch.bfloat16),
        "step": torch.tensor(7),
        "none": torch.empty(0, 2),
        "mask": torch.tensor([True, False, True]),
    }
    save_file(tensors, path, metadata={"format": "pt"})
    header = read_header(path)
    with safe_open(path, framework="pt") as reference:
        assert list(header.tensors) == list(reference.offset_keys())
        assert header.metadata == reference.metadata()
        for name, fact in header.tensors.items():
            piece = reference.get_slice(name)
            assert fact.shape == tuple(piece.get_shape())
            assert fact.dtype == piece.get_dtype()


BROKEN: dict[str, tuple[Table, bytes, str]] = {
    "overlap": ({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, bytes(12), "'b' overlaps 'a'"),
    "gap": ({"a": entry(0, 8, [2]), "b": entry(12, 20, [2])}, bytes(20), "'b' leaves a gap"),
    "late start": ({"a": entry(4, 12, [2])}, bytes(12), "leaves a gap after the header"),
    "wrong length": ({"a": entry(0, 8, [3])}, bytes(8), "needs 12 bytes"),
    "dtype": ({"a": entry(0, 8, [2], "F4")}, bytes(8), "dtype 'F4'"),
    "shape": ({"a": entry(0, 8, [-2])}, bytes(8), "shape [-2]"),
    "offsets": ({"a": {"dtype": "F32", "shape": [2]}}, bytes(8), "data_offsets None"),
    "trailing": ({"a": entry(0, 8, [2])}, bytes(10), "2 bytes more"),
    "truncated data": ({"a": entry(0, 8, [2])}, bytes(7), "is truncated"),
    "entry": ({"a": 3}, b"", "'a' is not an object"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_contradictory_header(tmp_path: Path, fault: str) -> None:
    table, data, text = BROKEN[fault]
    path = write(tmp_path / "bad.safetensors", table, data)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert text in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


FOREIGN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "0 bytes"),
    "zip": (b"PK\x03\x04" + bytes(60), "zip archive"),
    "pickle": (b"\x80\x02}q\x00." + bytes(60), "pickle"),
    "page": (b"<!DOCTYPE html><html></html>", "web page"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid", "git-lfs pointer"),
    "noise": (bytes(range(200, 255)), "not a safetensors file"),
    "no json": ((20).to_bytes(8, "little") + b"{" + b"x" * 30, "header is broken"),
    "cut header": ((500).to_bytes(8, "little") + b'{"a":', "is truncated"),
    "twice": ((13).to_bytes(8, "little") + b'{"a":1,"a":2}', "'a' is listed twice"),
}


@pytest.mark.parametrize("fault", FOREIGN)
def test_foreign_file(tmp_path: Path, fault: str) -> None:
    data, text = FOREIGN[fault]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=text):
        read_header(path)


def test_every_cut_of_a_real_file_is_noticed(tmp_path: Path) -> None:
    whole = tmp_path / "whole.safetensors"
    save_file({"a": torch.randn(7), "b": torch.randn(2, 2)}, whole)
    data = whole.read_bytes()
    cut = tmp_path / "cut.safetensors"
    for size in range(len(data)):
        cut.write_bytes(data[:size])
        with pytest.raises(CheckpointError):
            read_header(cut)


def test_a_file_that_has_changed_is_read_again(tmp_path: Path) -> None:
    """Of the same size, and at once, so that no time of change could tell."""
    path = tmp_path / "model.safetensors"
    for name in ("a", "b", "a"):
        write(path, {name: entry(0, 8, [2])}, bytes(8))
        assert [*read_header(path).tensors] == [name]


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"No such file"):
        read_header(tmp_path / "none.safetensors")


@pytest.mark.parametrize("length", [640, 1152, 66176])
def test_a_headers_length_is_never_taken_for_another_format(tmp_path: Path, length: int) -> None:
    """The low bytes of these lengths are a pickle's first; the format's own library reads them."""
    header = json.dumps({"a": entry(0, 8, [2])}).encode().ljust(length)
    path = tmp_path / "model.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + header + bytes(8))
    with safe_open(path, framework="pt") as reference:
        assert reference.get_tensor("a").tolist() == [0, 0]
    assert list(read_header(path).tensors) == ["a"]


@pytest.mark.parametrize(
    "shape", [[10**18] * 65, [2**63], [10**4000]], ids=["many", "large", "huge"]
)
def test_shapes_that_no_tensor_has_are_refused_unmultiplied(
    tmp_path: Path, shape: list[int]
) -> None:
    path = write(tmp_path / "model.safetensors", {"a": entry(0, 8, shape)}, bytes(8))
    with pytest.raises(CheckpointError, match="has shape") as caught:
        read_header(path)
    assert len(str(caught.value)) < 300 + len(str(path))


def test_a_name_that_stands_there_twice_is_found_among_many(tmp_path: Path) -> None:
    pairs = ",".join(f'"{number}":1' for number in [*range(100_000), 99_999])
    raw = f"{{{pairs}}}".encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw)
    with pytest.raises(CheckpointError, match="'99999' is listed twice"):
        read_header(path)
