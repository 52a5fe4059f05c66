"""A result holds nothing private, reads as it was written, and is compared with its like alone."""

from __future__ import annotations

import getpass
import json
import os
import platform
from pathlib import Path
from typing import Any

import pytest

from everyframe.cli.main import main
from everyframe.core.errors import InputError
from everyframe.doctor.benchmark.comparison import compare_results
from everyframe.doctor.benchmark.result import BenchResult, read_result, write_result

MACHINE: dict[str, Any] = {
    "device": "A card", "kind": "cuda", "memory": 24 * 10**9, "capability": "8.9",
    "processor": "A processor", "instructions": "AVX512", "num_cores": 8, "num_threads": 8,
    "host_memory": 64 * 10**9, "system": "linux", "versions": {"torch": "2.13.0"},
}  # fmt: skip
BLOCK: dict[str, Any] = {
    "work": "blocks, 256x256", "precision": "bfloat16", "paths": ["attention-flash"],
    "seconds": 0.5, "plain_seconds": 1.0, "operations": 1e12, "peak_bytes": 10**9,
    "forecast_bytes": 11 * 10**8, "forecast_seconds": 0.9,
}  # fmt: skip
VIDEO: dict[str, Any] = {
    "work": "shapes, 64x64", "precision": "float32", "import_seconds": 3.0,
    "first_frame_seconds": 2.0, "seconds": 4.0, "warm_seconds": 2.0, "steps_per_second": 20.0,
}  # fmt: skip
FAST: dict[str, Any] = {
    "name": "attention-flash", "verdict": "certified", "gain": 2.0, "error": 1e-3, "limit": 2e-3,
    "reason": "right, and faster",
}  # fmt: skip


def result(**changes: Any) -> BenchResult:
    whole: dict[str, Any] = {
        "schema": 1, "everyframe": "0.1.0", "date": "2026-11-23", "load": 0.1, "machine": MACHINE,
        "peaks": [{"name": "float32", "kind": "product", "rate": 1e12, "size": 2048},
                  {"name": "copy", "kind": "copy", "rate": 1e11, "size": 10**9}],
        "fast_paths": [FAST], "blocks": [BLOCK], "video": VIDEO, "seconds": 100.0,
    }  # fmt: skip
    return BenchResult.model_validate({**whole, **changes})


def saved(path: Path, **changes: Any) -> str:
    write_result(result(**changes), path)
    return str(path)


def test_a_file_reads_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_result(result(), path)
    assert json.loads(path.read_text())["schema"] == 1
    assert read_result(path) == result()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "can't be read as JSON"),
        ("[]", "is no result of everyframe bench"),
        ('{"type": "doctor"}', "is no result of everyframe bench"),
        ('{"type": "bench", "schema": 2}', "is of schema 2 and this version reads 1"),
        ('{"type": "bench", "schema": 1, "everyframe": 3}', "everyframe must be text"),
        ("[" * 10**5, "can't be read as JSON"),
        ("[1]" * 10**6, "a.json is too large for a result of everyframe bench"),
    ],
)
def test_another_file_is_wrong_input(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(InputError, match=says):
        read_result(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"peaks": [{"name": "copy", "kind": "copy", "rate": 0, "size": 1}]}, "peaks.rate"),
        ({"blocks": [{**BLOCK, "seconds": 0.0}]}, "blocks.seconds"),
        ({"video": {**VIDEO, "warm_seconds": -1.0}}, "video.warm_seconds"),
    ],
)
def test_a_measurement_that_nothing_can_be_compared_with_is_wrong_input(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({**result().to_json(), **changes}))
    with pytest.raises(InputError, match=f"{says} must be more than 0"):
        read_result(path)


def test_ratios_above_one_are_for_the_second_machine(tmp_path: Path) -> None:
    faster = result(
        peaks=[{"name": "float32", "kind": "product", "rate": 4e12, "size": 4096}],
        blocks=[{**BLOCK, "seconds": 0.25, "peak_bytes": 2 * 10**9}],
    )
    rows = {row.name: row.ratio for row in compare_results(result(), faster).rows}
    assert rows["peak: product in float32"] == 4
    assert rows["blocks, 256x256, bfloat16: a step"] == 2
    assert rows["blocks, 256x256, bfloat16: memory"] == 0.5
    assert rows["shapes, 64x64, float32: steps"] == 1


def test_other_work_is_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = {"blocks": [{**BLOCK, "work": "blocks, 720p"}], "everyframe": "0.2.0", "load": 3.0,
             "machine": {**MACHINE, "num_threads": 4}}  # fmt: skip
    found = compare_results(result(), result(**other))
    assert not [row for row in found.rows if "blocks" in row.name]
    assert any("blocks, 720p" in note and "not compared" in note for note in found.notes)
    assert any("different versions" in note for note in found.notes)
    assert any("second machine was busy" in note for note in found.notes)
    assert any("threads: 8 and 4" in note for note in found.notes)
    a, b = saved(tmp_path / "a.json"), saved(tmp_path / "b.json", **other)
    assert main(["bench", "compare", a, b]) == 0
    assert "1.00" in capsys.readouterr().out
    assert main(["bench", "compare", a, b, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["type"] == "bench_comparison"


def test_nothing_alike_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = {"peaks": [], "blocks": [{**BLOCK, "precision": "float16"}], "video": None}
    a, b = saved(tmp_path / "a.json"), saved(tmp_path / "b.json", **alone)
    assert main(["bench", "compare", a, b]) == 2
    assert "nothing can be compared" in capsys.readouterr().err
    for words in (["compare", a], ["compare", a, b, b], ["compar", a, b]):
        assert main(["bench", *words]) == 2


@pytest.mark.slow  # a minute of measuring
def test_this_machine_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "here.json"
    assert main(["bench", "--quick", "--device", "cpu", "-o", str(path)]) == 0
    text, found = path.read_text(), read_result(path)
    assert {"float32", "bfloat16", "copy"} <= {peak.name for peak in found.peaks}
    assert all(peak.rate > 1e6 for peak in found.peaks)
    assert found.blocks[0].seconds > 0
    assert found.video is not None
    assert found.video.steps_per_second > 0
    assert found.failed == {}
    private = {platform.node(), os.path.expanduser("~"), getpass.getuser()}
    assert not [each for each in private - {"root", "/"} if each in text]
    assert main(["bench", "compare", str(path), str(path)]) == 0
    assert "steps a second" in capsys.readouterr().out


def test_a_device_that_is_not_there_is_wrong_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--device", "cuda:77"]) == 2
    assert "cuda:77" in capsys.readouterr().err


def test_a_part_that_dies_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from everyframe.core.facts import DeviceFacts
    from everyframe.doctor.benchmark import machine, peaks
    from helpers import crashing_functions

    monkeypatch.setattr(peaks, "measure_peaks", crashing_functions.divide_by_zero)
    lines: list[str] = []
    device = DeviceFacts("a processor", "cpu", None, 10**9, 10**9)
    measuring = machine._Measuring(device, 1, lines.append)
    assert measuring.peaks() == ()
    assert "SIGFPE" in measuring.failed["peaks"]
    assert lines
