"""Traces as files: the same comes back, and what is none or broken is one line."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from everyframe.core.errors import InputError
from everyframe.numerics.trace import file
from everyframe.numerics.trace.recorder import Recorder
from everyframe.numerics.trace.trace import Trace
from helpers import traced_modules


@pytest.fixture(scope="module")
def trace() -> Trace:
    recorder = Recorder(["net.blocks.1.attn"])
    net = traced_modules.net().bfloat16()
    recorder.watch("net", net)
    traced_modules.sample(net, tokens=40)
    return recorder.trace({"size": "2"}, {"device": "cpu"})


def test_what_was_written_is_read(trace: Trace, tmp_path: Path) -> None:
    file.write(trace, tmp_path / "a.trace")
    back = file.read(tmp_path / "a.trace")
    assert [path.name for path in tmp_path.iterdir()] == ["a.trace"]
    assert replace(back, numbers=trace.numbers, full={}) == replace(trace, full={})
    assert np.array_equal(back.numbers, trace.numbers, equal_nan=True)
    assert back.full.keys() == trace.full.keys()
    assert all(torch.equal(back.full[place], tensor) for place, tensor in trace.full.items())
    assert {tensor.dtype for tensor in back.full.values()} == {torch.bfloat16}


def test_a_default_device_of_the_caller_is_not_written_from(trace: Trace, tmp_path: Path) -> None:
    """As after ``torch.set_default_device("cuda")``; its tables are of the host."""
    with torch.device("meta"):
        file.write(trace, tmp_path / "a.trace")
        back = file.read(tmp_path / "a.trace")
    assert (back.calls, back.seen) == (trace.calls, trace.seen)


def test_it_is_small(trace: Trace, tmp_path: Path) -> None:
    file.write(replace(trace, full={}), tmp_path / "a.trace")
    assert (tmp_path / "a.trace").stat().st_size < 100 * len(trace.seen)


def test_a_cut_off_file_is_reported_at_every_length(trace: Trace, tmp_path: Path) -> None:
    file.write(trace, tmp_path / "a.trace")
    whole = (tmp_path / "a.trace").read_bytes()
    for length in (0, 1, 30, len(whole) // 2, len(whole) - 1):
        (tmp_path / "b.trace").write_bytes(whole[:length])
        with pytest.raises(InputError, match="no trace of everyframe, or was cut off"):
            file.read(tmp_path / "b.trace")


def test_flipped_bits_are_reported(trace: Trace, tmp_path: Path) -> None:
    file.write(trace, tmp_path / "a.trace")
    whole = bytearray((tmp_path / "a.trace").read_bytes())
    for place in range(100, len(whole) // 2, len(whole) // 30):
        changed = bytearray(whole)
        changed[place] ^= 255
        (tmp_path / "b.trace").write_bytes(changed)
        with pytest.raises(InputError):
            file.read(tmp_path / "b.trace")


def rewritten(source: Path, target: Path, name: str, change: object) -> Path:
    """The same zip with one member changed by `change` (bytes to bytes); None leaves it out."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for member in old.namelist():
            data = old.read(member)
            changed = change(data) if member == name else data  # type: ignore[operator]
            if changed is not None:
                new.writestr(member, changed)
    return target


def edited(**values: object) -> object:
    return lambda data: json.dumps({**json.loads(data), **values}).encode()


def table(name: str, change: object) -> object:
    def changed(data: bytes) -> bytes:
        tables = load(data)
        tables[name] = change(tables[name])  # type: ignore[operator]
        return save({key: each.contiguous() for key, each in tables.items()})

    return changed


HEADER, TABLES = "trace.json", "tables.safetensors"
NTH = torch.tensor([0, 1, 0, 0], dtype=torch.int32)
BROKEN = {
    "no header": (HEADER, lambda _: None, "a zip, and no trace"),
    "another version": (HEADER, edited(schema_="everyframe.trace/2"), "trace/1"),
    "no JSON": (HEADER, lambda _: b"{", "Invalid JSON"),
    "more than is known": (HEADER, edited(other=1), "other: Extra inputs"),
    "modules of two words": (HEADER, edited(parts=[["net", "x"]] * 99), "not named"),
    "no safetensors": (TABLES, lambda _: b"x" * 99, "broken"),
    "calls of nothing": (TABLES, table("calls", lambda t: t + 1000), "modules that it does not"),
    "calls before their parent": (
        TABLES, table("calls", lambda t: torch.cat((t[:, :3], t[:, 3:] + 500), 1)), "not in order"
    ),
    "rows that are not there": (TABLES, table("numbers", lambda t: t[:3]), "fingerprints that it"),
    "numbers of another width": (TABLES, table("numbers", lambda t: t[:, :5]), "fingerprints are"),
    "another type": (TABLES, table("seen", lambda t: t.float()), "torch.float32"),
    "numbers of half": (TABLES, table("numbers", lambda t: t.bfloat16()), "torch.bfloat16"),
    # A comparison is drawn with a column for each call.
    "a call of the millions": (TABLES, table("calls", lambda t: t + NTH * 9**8), "of calls that"),
    "a call before the first": (TABLES, table("calls", lambda t: t - NTH * 9), "of calls that"),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_what_does_not_fit_together_is_one_line(what: str, trace: Trace, tmp_path: Path) -> None:
    name, change, message = BROKEN[what]
    file.write(trace, tmp_path / "a.trace")
    broken = rewritten(tmp_path / "a.trace", tmp_path / "b.trace", name, change)
    with pytest.raises(InputError, match=message) as raised:
        file.read(broken)
    assert "\n" not in str(raised.value)


def test_a_small_file_that_unpacks_to_much(
    trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write(trace, tmp_path / "a.trace")
    monkeypatch.setattr(file, "_MOST_BYTES", 1000)
    with pytest.raises(InputError, match="unpacks to more"):
        file.read(tmp_path / "a.trace")


def test_whole_tensors_lie_in_it_as_they_are(trace: Trace, tmp_path: Path) -> None:
    """A megabyte would unpack to a gigabyte; ours are never packed."""
    file.write(replace(trace, full={}), tmp_path / "a.trace")
    with zipfile.ZipFile(tmp_path / "a.trace", "a", zipfile.ZIP_DEFLATED) as whole:
        whole.writestr("full.safetensors", bytes(100_000))
    with pytest.raises(InputError, match="unpacks to more"):
        file.read(tmp_path / "a.trace")
    noughts = tmp_path / "b.trace"
    with zipfile.ZipFile(noughts, "w", zipfile.ZIP_DEFLATED) as whole:
        whole.writestr(HEADER, bytes(50_000_000))
        whole.writestr(TABLES, b"")
    with pytest.raises(InputError, match="unpacks to more"):
        file.read(noughts)


def test_places_that_can_not_be_written(trace: Trace, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("somebody's")
    for path, message in (
        (tmp_path, "is a folder"),
        (tmp_path / "no" / "a.trace", "no folder"),
        (tmp_path / "mine.txt", "is no trace"),
    ):
        with pytest.raises(InputError, match=message):
            file.write(trace, path)
    assert (tmp_path / "mine.txt").read_text() == "somebody's"
    with pytest.raises(InputError, match="there is no trace"):
        file.read(tmp_path / "none")


def test_an_older_trace_is_replaced(trace: Trace, tmp_path: Path) -> None:
    file.write(trace, tmp_path / "a.trace")
    file.write(replace(trace, ended="early"), tmp_path / "a.trace")
    assert file.read(tmp_path / "a.trace").ended == "early"
