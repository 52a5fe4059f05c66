"""A few hostile cases of each kind break nothing, and the runner sees what would be broken.

`benchmarks/fuzz.py` runs 10,000.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers import fuzz_runner
from helpers.fuzz_cases import KINDS, Case, Inputs, case_of, flipped, names


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return Inputs(tmp_path_factory.mktemp("inputs"))


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_input_is_answered(kind: str, inputs: Inputs, tmp_path: Path) -> None:
    for name in names(4, seed=1, kinds=(kind,)):
        verdict = fuzz_runner.run(case_of(name, inputs), tmp_path / "sandbox")
        assert not verdict.problem, str(verdict)


def test_the_same_seed_gives_the_same_cases(inputs: Inputs) -> None:
    first, second, other = (
        [case_of(name, inputs).argv for name in names(30, seed=seed)] for seed in (4, 4, 5)
    )
    assert first == second != other


def crash() -> int:
    os.kill(os.getpid(), signal.SIGSEGV)
    return 0


def fail() -> int:
    raise RuntimeError("planted")


def spin() -> int:
    while True:
        continue


def write_beside() -> int:
    Path("../stranger").write_text("planted")
    return 0


def write_stray() -> int:
    Path(os.environ["TMPDIR"], "left").write_text("planted")
    return 0


def fill() -> int:
    return len(bytearray(8 * 2**30))


def answer(code: int, text: str = "") -> Callable[[], int]:
    def give() -> int:
        print(text)
        return code

    return give


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (crash, "ended by SIGSEGV"),
        (fail, "exit code 70"),
        (spin, "hangs: more than 1 s of processor time"),
        (write_beside, "files outside of the folder: ['stranger']"),
        (write_stray, "files beside the output: ['tmp/left']"),
        (fill, "exit code 70"),
        (answer(3, "error: out of memory; try less"), "more than 3 GiB"),
        (answer(1), "exit code 1"),
        (answer(1, "error: the pipeline failed"), "exit code 1"),
        (answer(2, "error: one\nerror: two"), "2 errors in place of one line"),
        (answer(2, "Traceback (most recent call last):"), "a traceback"),
        (answer(2, "error: one line"), ""),
    ],
)
def test_the_runner_sees_it(
    command: Callable[[], int], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzz_runner, "main", lambda argv: command())
    monkeypatch.setattr(fuzz_runner, "CPU_SECONDS", 1)
    case = Case("planted 0 0", (), lambda folder: None)
    assert fuzz_runner.run(case, tmp_path / "sandbox").problem == problem


def test_other_frames_are_seen(inputs: Inputs, tmp_path: Path, monkeypatch: Any) -> None:
    def other(argv: list[str]) -> int:
        Path("out.mp4").write_bytes(inputs.videos[0].read_bytes())
        return 0

    monkeypatch.setattr(fuzz_runner, "main", other)
    case = Case("planted 0 0", (), lambda folder: None, expected=inputs.whole)
    found = fuzz_runner.run(case, tmp_path / "sandbox").problem
    assert found == "other frames than those of the unbroken run"


def test_bytes_are_changed() -> None:
    rng, data = random.Random(0), bytes(range(200)) * 10
    assert sum(flipped(data, rng) != data for _ in range(100)) >= 95
