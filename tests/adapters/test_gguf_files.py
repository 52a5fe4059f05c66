"""GGUF files: the package's own numbers, its names, and headers that lie."""

from __future__ import annotations

import builtins
import re
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from everyframe.adapters.component_file import match_component, open_stored
from everyframe.adapters.gguf_blocks import WIDENED, widen_blocks
from everyframe.adapters.gguf_file import GgufFile
from everyframe.adapters.gguf_header import read_gguf_header
from everyframe.checkpoints.tensor_file import TensorFile
from everyframe.core.errors import CheckpointError, MissingPackageError
from everyframe.runtime.components.patchable import table_of_module
from helpers.components import originals, stored

gguf = pytest.importorskip("gguf", reason="the package that reads GGUF is not installed")


def write_blocks(path: Path, kind: str, rows: int, blocks_a_row: int) -> np.ndarray[Any, Any]:
    """A file of one tensor of random blocks; returns its numbers by the package."""
    own = gguf.GGMLQuantizationType[kind]
    blocks = stored.random_blocks(own, rows * blocks_a_row).reshape(rows, -1)
    writer = gguf.GGUFWriter(str(path), "wan")
    writer.add_tensor("x.weight", blocks, raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with np.errstate(all="ignore"):
        numbers: np.ndarray[Any, Any] = gguf.quants.dequantize(blocks, own)
    return numbers


@pytest.mark.parametrize("kind", stored.KINDS)
def test_numbers_are_the_packages(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, by rows, and in several pieces: error 0."""
    wanted = torch.from_numpy(write_blocks(tmp_path / "a.gguf", kind, rows=6, blocks_a_row=3))
    assert torch.isfinite(wanted).all()
    assert wanted.std() > 0
    opened = GgufFile(tmp_path / "a.gguf")
    assert opened.kinds == (kind,)
    assert opened.dtype("x.weight") == torch.float32
    assert torch.equal(opened.load("x.weight"), wanted)
    rows = torch.cat([wanted[4:6], wanted[1:2]])
    assert torch.equal(opened.load_rows("x.weight", [(4, 6), (1, 2)]), rows)
    monkeypatch.setattr("everyframe.adapters.gguf_file._AT_ONCE", 512)
    assert torch.equal(opened.load("x.weight"), wanted)
    assert torch.equal(opened.load("x.weight", dtype=torch.bfloat16), wanted.bfloat16())


#: Bits of float16 scales: zeros, subnormal numbers, the largest, infinities and one that is none.
EXTREME = (0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00)


@pytest.mark.parametrize("kind", WIDENED)
def test_our_own_arithmetic_is_the_packages(kind: str) -> None:
    """Any bytes are some block: all bits are compared, of scales at all ends of float16, too."""
    own = gguf.GGMLQuantizationType[kind]
    num_elements, num_bytes = gguf.GGML_QUANT_SIZES[own]
    random = np.random.default_rng(3)
    blocks = random.integers(0, 256, (3001, num_bytes), np.uint8)
    place = 208 if kind == "Q6_K" else 0  # where its scale is
    has_two = kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K")
    ends = np.array(EXTREME, "<u2").view(np.uint8).reshape(-1, 2)
    for at, scale in enumerate(ends):
        blocks[at::97, place : place + 2] = scale
        if has_two:
            blocks[at + 20 :: 89, 2:4] = scale
    with np.errstate(all="ignore"):
        wanted = torch.from_numpy(gguf.quants.dequantize(blocks, own))
    found = torch.full((len(blocks), num_elements), torch.nan)
    widen_blocks(torch.from_numpy(blocks), kind, found)
    # What is no number has any bits: those are the processor's.
    is_number = ~wanted.isnan()
    assert torch.equal(found.isnan(), ~is_number)
    assert 0.5 < is_number.float().mean() < 1
    assert torch.equal(found.view(torch.int32)[is_number], wanted.view(torch.int32)[is_number])
    assert wanted[is_number].isinf().any()


def test_the_package_has_the_other_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    real = gguf.quants.dequantize
    monkeypatch.setattr(
        gguf.quants, "dequantize", lambda data, kind: called.append(kind.name) or real(data, kind)
    )
    for kind in ("Q8_0", "Q3_K"):
        write_blocks(tmp_path / f"{kind}.gguf", kind, rows=1, blocks_a_row=1)
    called.clear()
    for kind in ("Q8_0", "Q3_K"):
        GgufFile(tmp_path / f"{kind}.gguf").load("x.weight")
    assert called == ["Q3_K"]


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"])
@pytest.mark.parametrize("name", ["wan", "ltx", "hunyuan", "umt5", "umt5_llama_cpp"])
def test_components(name: str, kind: str, tmp_path: Path) -> None:
    original = originals.original_state(name)
    path, meant = stored.write_gguf(tmp_path / "a.gguf", original, kind)
    table = table_of_module(originals.module(name))
    found = match_component(path, table, f"tiny {name}")
    plain = stored.write(tmp_path / "a.safetensors", meant)
    wanted = match_component(plain, table, f"tiny {name}").tensors
    assert {*found.tensors} == {*wanted}
    for key in wanted:
        assert torch.equal(found.tensors.load(key).float(), wanted.load(key)), key
    if name.startswith("umt5"):  # the only ones with rows of whole blocks
        assert found.notes == (f"a.gguf is stored as GGUF, {kind}",)


def test_rows_of_llama(tmp_path: Path) -> None:
    """llama.cpp interleaves the halves of each head; they are put back."""
    counts = {"llama__attention__head_count": 4, "llama__attention__head_count_kv": 4}
    original = originals.original_state("llama")
    path, _ = stored.write_gguf(tmp_path / "a.gguf", original, "Q8_0", "llama", **counts)
    module = originals.module("llama")
    found = match_component(path, table_of_module(module), "tiny llama").tensors
    for key, each in originals.state_of("llama").items():
        wanted = each.half().float() if each.ndim > 1 else each
        assert torch.equal(found.load(key).float(), wanted), key


def test_heads_of_llama_are_those_of_keys_too_unless_it_says_otherwise(tmp_path: Path) -> None:
    """Rows in llama.cpp's order were taken as they lie."""
    module, original = originals.module("llama"), originals.original_state("llama")

    def matched(**counts: int) -> TensorFile:
        path, _ = stored.write_gguf(tmp_path / "a.gguf", original, "Q8_0", "llama", **counts)
        return match_component(path, table_of_module(module), "tiny llama").tensors

    found = matched(llama__attention__head_count=4)
    for key, each in originals.state_of("llama").items():
        wanted = each.half().float() if each.ndim > 1 else each
        assert torch.equal(found.load(key).float(), wanted), key
    for counts in ({}, {"llama__attention__head_count": 0}, {"llama__attention__head_count": 7}):
        with pytest.raises(CheckpointError, match=r"head_count is .*, which is no number of heads"):
            matched(**counts)


def test_memory_of_loading(tmp_path: Path) -> None:
    """A few rows at a time: the result, and little beside it."""
    write_blocks(tmp_path / "a.gguf", "Q4_K", rows=4096, blocks_a_row=8)  # 8 Mi elements
    opened = GgufFile(tmp_path / "a.gguf")
    tracemalloc.start()
    opened.load("x.weight", dtype=torch.bfloat16)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # What NumPy has beside torch's result: pieces of a Mi elements, some of them in float32.
    assert peak < 40e6


def test_the_package_is_named_where_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_blocks(tmp_path / "a.gguf", "Q8_0", rows=1, blocks_a_row=1)
    real = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name.partition(".")[0] == "gguf":
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingPackageError, match=r"pip install 'everyframe\[gguf\]'"):
        GgufFile(tmp_path / "a.gguf")


# ----------------------------------------------------------------------------------- broken files


def header(num_tensors: int = 0, num_values: int = 0, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_values) + rest


def text(content: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(content) if length is None else length) + content


def tensor(sides: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    shape = struct.pack(f"<I{len(sides)}Q", len(sides), *sides)
    return text(b"x") + shape + struct.pack("<IQ", kind, offset)


HUGE = 2**62
BROKEN = {
    "empty": (b"", "truncated"),
    "not one": (b"GGUX" + bytes(40), "is not a GGUF file"),
    "version": (header(version=9), "a GGUF of version 9"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "little-endian"),
    "many tensors": (header(num_tensors=HUGE), "announces 4,611,686,018,427,387,904 tensors"),
    "many values": (header(num_values=HUGE), "announces 4,611,686,018,427,387,904 values"),
    "long name": (header(0, 1, text(b"", HUGE) + bytes(30)), "a text of 4,611"),
    "long text": (header(0, 1, text(b"a") + struct.pack("<IQ", 8, HUGE)), "a text of 4,611"),
    "long array": (
        header(0, 1, text(b"a") + struct.pack("<IIQ", 9, 4, HUGE)), "is truncated: 'a' alone takes"
    ),
    "array of texts": (
        header(0, 1, text(b"a") + struct.pack("<IIQ", 9, 8, HUGE)), "texts in 'a', more than"
    ),
    "texts that end early": (
        header(0, 1, text(b"a") + struct.pack("<IIQ", 9, 8, 2) + text(b"abc") + text(b"de", 9)),
        "is truncated: it ends within 'a'",
    ),
    "nested array": (
        header(0, 1, text(b"a") + struct.pack("<IIQ", 9, 9, 1)), "an array of the unknown type 9"
    ),
    "value": (header(0, 1, text(b"a") + struct.pack("<I", 77) + bytes(9)), "the unknown type 77"),
    "dimensions": (header(1, 0, text(b"x") + struct.pack("<I", 9999) + bytes(20)), "9999 dim"),
    "large side": (header(1, 0, tensor((HUGE,))), "has the shape"),
    "product": (header(1, 0, tensor((2**40, 2**40)) + bytes(32)), "is truncated: tensor 'x' ends"),
    "offset": (header(1, 0, tensor(offset=HUGE)), "beyond the file's"),
    "alignment": (header(1, 0, tensor(offset=5) + bytes(200)), "not aligned to 32"),
    "short": (header(1, 0, tensor() + bytes(32)), "is truncated: tensor 'x' ends"),
    "twice": (header(2, 0, tensor() * 2 + bytes(200)), "has the tensor 'x' twice"),
    "kind": (header(1, 0, tensor(kind=12345) + bytes(200)), "number 12345, which gguf can't read"),
    "kind of products": (header(1, 0, tensor(kind=9) + bytes(200)), "Q8_1, which gguf can't"),
    "blocks": (header(1, 0, tensor((31,), kind=8) + bytes(200)), "no whole number of Q8_0's"),
    "shape beside": (
        header(1, 1, text(b"comfy.gguf.orig_shape.x") + struct.pack("<IIQ", 9, 5, 1)
               + struct.pack("<i", 33) + tensor() + bytes(200)),
        "does not hold the elements",
    ),
    "negative shape beside": (
        header(1, 1, text(b"comfy.gguf.orig_shape.x") + struct.pack("<IIQ", 9, 5, 2)
               + struct.pack("<ii", -4, -8) + tensor() + bytes(200)),
        "does not hold the elements",
    ),
    "overlap": (
        header(2, 0, tensor() + tensor(offset=64).replace(b"x", b"y") + bytes(300)),
        "tensor 'y' overlaps 'x'",
    ),
    "no alignment": (
        header(0, 1, text(b"general.alignment") + struct.pack("<II", 4, 0)), "its alignment is 0"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files(name: str, tmp_path: Path) -> None:
    """One line, and nothing allocated that the header alone announces."""
    content, message = BROKEN[name]
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
        open_stored(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "\n" not in str(caught.value)
    assert peak < 4e6


def test_every_truncation_is_found(tmp_path: Path) -> None:
    path, _ = stored.write_gguf(tmp_path / "a.gguf", originals.original_state("umt5"))
    whole = path.read_bytes()
    names = read_gguf_header(path).tensors
    last = max(names.values(), key=lambda each: each.offset).offset
    short = tmp_path / "b.gguf"
    for length in (*range(0, 400, 7), last + 1, len(whole) // 2):
        short.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            open_stored(short)
