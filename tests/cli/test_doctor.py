"""``everyframe doctor`` on the command line: marks, commands that fix, codes, JSON, sharing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from everyframe.cli.main import main
from everyframe.doctor.report import Report


def test_trouble_is_reported_with_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--as", "a100-oneflow"]) == 1
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert err == ""
    assert any(line.startswith("✗ known-issues") for line in lines)
    command = "export ONEFLOW_ATTENTION_ALLOW_HALF_PRECISION_ACCUMULATION=False"
    assert command in [line.strip() for line in lines]
    assert lines[-1] == "Not ready: 1 error, 1 note on NVIDIA A100-SXM4-80GB."
    # No details of what is fine.
    assert not any("oneflow 0.9" in line for line in lines)


def test_what_is_fine_is_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "versions", "known-issues", "--as", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    marks = [line[0] for line in lines if not line.startswith(" ")]
    assert marks == ["✓", "✓", "R"]
    assert lines[-1] == "Ready on 8-core AVX2 processor."


def test_all_tells_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "versions", "known-issues", "--as", "a100-oneflow", "--all"]) == 1
    out = capsys.readouterr().out
    assert "oneflow 0.9.1.dev20240615" in out
    assert "siliconflow/onediff#958" in out
    assert "flux-fp16-overflow" not in out  # its condition isn't met
    assert "sdxl-vae-fp16-nan: only with model:sdxl" in out


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--as", "h20-cublas12.1", "--json"]) == 1
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    report = Report(**json.loads(out))
    assert (report.profile, report.verdict) == ("h20-cublas12.1", "error")
    assert report.tested["answer"] == "known bad"


def test_a_report_to_paste() -> None:
    """In a process of its own: the variables are those that it was started with."""
    code = (
        "import platform; platform.node = lambda: 'wintermute'; "
        "from everyframe.cli.main import main; "
        "main(['doctor', 'devices', 'environment', '--share'])"
    )
    variables = {**os.environ, "LD_LIBRARY_PATH": str(Path.home() / "libraries")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=False
    )
    assert "- packages: torch " in done.stdout, done.stderr
    assert "LD_LIBRARY_PATH (set)" in done.stdout
    assert "wintermute" not in done.stdout
    assert "libraries/" not in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("doctor known-isues", "did you mean 'known-issues'"),
        ("doctor --as a100-oneflo", "did you mean 'a100-oneflow'"),
        ("doctor --smok", "did you mean '--smoke'"),
        ("doctor --as cpu --smoke", "can't make a video"),
    ],
)
def test_what_can_not_be_asked(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_marks_without_letters_for_them() -> None:
    import io

    from everyframe.cli.doctor import _letter

    plain = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    assert [_letter(mark, plain) for mark in ("fine", "note", "error", "broke")] == [
        "ok", "!", "x", "?",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["TORCH_LOGS", "TORCH_DISTRIBUTED_DEBUG"])
def test_a_variable_that_torch_refuses_is_named_and_nothing_else_printed(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "everyframe", "doctor", "devices"],
        capture_output=True, text=True, timeout=120, env={**os.environ, name: "garbage"},
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == ""
    assert f"torch can't be imported with this {name}" in done.stdout
    assert f"unset {name}" in done.stdout
    assert "install torch again" not in done.stdout
