"""``everyframe resume``: lists, forgets, goes on; and Ctrl-C on a real run in a worker process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from everyframe.cli.main import main
from everyframe.cli.resume import resume
from everyframe.engine.output_files import OutputFiles
from everyframe.engine.workers.torchrun import Terminated
from everyframe.runs.checksummed_json import write_json
from everyframe.runs.folder import all_runs
from helpers.interrupted_runs import cut


def test_list_forget_and_go_on(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVERYFRAME_RUNS", str(tmp_path / "runs"))
    assert main(["resume", "--list"]) == 0
    assert capsys.readouterr().out == "there is no interrupted run\n"
    assert main(["resume"]) == 2
    assert "nothing to resume" in capsys.readouterr().err
    first, second = cut(model, tmp_path / "runs"), cut(model, tmp_path / "runs")
    assert main(["resume", "--list", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["run"] for row in rows] == [first.name, second.name]
    assert {row["progress"] for row in rows} == {"stage 2, 2 steps of it"}
    assert main(["resume", "--list"]) == 0
    shown = capsys.readouterr().out
    assert first.name in shown
    assert "a red circle" in shown
    assert main(["resume", "--forget"]) == 2
    assert main(["resume", first.name, "--forget"]) == 0
    capsys.readouterr()
    assert main(["resume", "-o", "clip.mp4"]) == 0
    assert capsys.readouterr().out == "clip.mp4\n"
    assert main(["generate", "a red circle", "-o", "whole.mp4", "--model", model, "--size", "16x16",
                 "--num-frames", "3", "--steps", "3", "--seed", "3"]) == 0  # fmt: skip
    assert Path("clip.mp4").read_bytes() == Path("whole.mp4").read_bytes()
    assert not list(all_runs(tmp_path / "runs"))
    assert main(["resume", first.name]) == 2


def test_files_are_named_again_from_the_folder_of_whoever_resumes(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run itself works in the folder where it began, which has no such file."""
    monkeypatch.delenv("EVERYFRAME_IN_PROCESS", raising=False)
    monkeypatch.setenv("EVERYFRAME_RUNS", str(tmp_path / "runs"))
    for name in ("began", "here"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "began")
    cut(model, tmp_path / "runs")
    shutil.copytree(model, tmp_path / "here" / "copy")
    monkeypatch.chdir(tmp_path / "here")
    assert main(["resume", "--model", "copy", "-o", "clip.mp4"]) == 0, capsys.readouterr().err
    assert Path("clip.mp4").is_file()


@pytest.mark.parametrize("error", [Terminated(signal.SIGTERM), RuntimeError("planted")])
def test_whatever_ends_a_run_its_name_is_printed(
    error: BaseException,
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVERYFRAME_RUNS", str(tmp_path / "runs"))
    folder = cut(model, tmp_path / "runs")

    def failing(*_: object) -> None:
        raise error

    monkeypatch.setattr(OutputFiles, "add", failing)
    with pytest.raises(type(error)):
        resume(folder.name)
    hint = f"interrupted; resume it: everyframe resume {folder.name}\n"
    assert capsys.readouterr().err.count(hint) == 1


def test_what_is_skipped_is_reported(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVERYFRAME_RUNS", str(tmp_path / "runs"))
    folder = cut(model, tmp_path / "runs", num_videos=2)
    folder.mark_done(3)
    assert main(["resume", folder.name, "-o", "clip.mp4"]) == 0
    out, err = capsys.readouterr()
    assert out == "clip-4.mp4\n"
    assert "finished videos are left unchanged: seed 3" in err
    assert f"resuming {folder.name}" in err


def test_a_run_of_an_earlier_version_says_what_to_do(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EVERYFRAME_RUNS", str(tmp_path / "runs"))
    folder = cut(model, tmp_path / "runs")
    write_json(folder.path / "run.json", {"schema": "everyframe.run/2"})
    assert main(["resume", folder.name]) == 2
    err = capsys.readouterr().err
    assert "finish the run with that version, or make its video again" in err
    assert err.count("\n") == 1


def test_a_damaged_run_is_one_line_and_exit_code_2(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVERYFRAME_RUNS", str(tmp_path / "runs"))
    folder = cut(model, tmp_path / "runs")
    path = folder.path / "run.json"
    whole = path.read_bytes()
    for broken in (b"", b"{", b"[]", b"null", whole[:-1], whole.replace(b": 3", b": 4", 1),
                   json.dumps({"schema": "everyframe.run/1"}).encode()):  # fmt: skip
        path.write_bytes(broken)
        for command in ([], [folder.name], [str(folder.path)]):
            assert main(["resume", *command]) == 2
            out, err = capsys.readouterr()
            assert out == ""
            assert err.startswith("error: ")
            assert err.count("\n") == 1
            assert "run.json" in err
        assert main(["resume", "--list"]) == 0
        assert "can't be read" in " ".join(capsys.readouterr().out.split())
    assert main(["resume", folder.name, "--forget"]) == 0
    assert not list(all_runs(tmp_path / "runs"))


@pytest.mark.slow
def test_ctrl_c_leaves_a_run_that_goes_on(model: str, tmp_path: Path) -> None:
    environment = {**os.environ, "EVERYFRAME_RUNS": str(tmp_path / "runs")}
    environment.pop("EVERYFRAME_IN_PROCESS")
    command = [sys.executable, "-m", "everyframe"]
    asked = ["generate", "a red circle", "--model", model, "--size", "16x16", "--num-frames", "3",
             "--steps", "40", "--seed", "3"]  # fmt: skip

    def started(*words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*command, *words], cwd=tmp_path, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip

    process = started(*asked, "-o", "clip.mp4", "--json")
    assert process.stdout is not None
    while '"denoise", "step": 9' not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    (run,) = all_runs(tmp_path / "runs")
    assert err == f"interrupted; resume it: everyframe resume {run.name}\n"
    assert not list(tmp_path.glob("*.mp4"))
    assert not run.is_busy()
    out, err = started("resume").communicate(timeout=300)
    assert out == f"{tmp_path / 'clip.mp4'}\n", err
    started(*asked, "-o", "whole.mp4").communicate(timeout=300)
    assert (tmp_path / "clip.mp4").read_bytes() == (tmp_path / "whole.mp4").read_bytes()
    assert not list(all_runs(tmp_path / "runs"))
