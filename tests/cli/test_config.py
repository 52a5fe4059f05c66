"""The command line goes by configuration, under its flags; `config show` names every source."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from everyframe.cli.main import main
from everyframe.cli.parse_request import parse_request

PROMPT = "a red circle moves to the right on a blue background"


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder of configuration; the current folder is an empty one."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    folder = tmp_path / "config" / "everyframe"
    folder.mkdir(parents=True)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    return folder


def test_a_flag_goes_before_a_file(user: Path) -> None:
    (user / "everyframe.toml").write_text("num_frames = 9\nfps = 8\ncompile = true\n")
    assert parse_request({"prompt": PROMPT, "seconds": "2", "compile": False}, None).request.given(
    ) == {"prompt": PROMPT, "seconds": 2.0, "fps": 8.0, "compile": False}  # fmt: skip
    assert parse_request({}, None, without=["fps"]).request.given() == {
        "num_frames": 9, "compile": True,
    }  # fmt: skip


def test_a_projects_options_are_named(user: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("everyframe.toml").write_text("num_frames = 9\n")
    parse_request({"prompt": PROMPT}, None)
    assert "note: the project's configuration sets num_frames" in capsys.readouterr().err
    parse_request({"prompt": PROMPT, "num_frames": "3"}, None)
    assert capsys.readouterr().err == ""


def test_a_repeated_record_takes_what_records_may_not_set(
    user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from everyframe.cli import parse_request as module

    (user / "everyframe.toml").write_text('num_frames = 9\nmax_memory = "8GB"\n')
    assert module._find_configured({}, (), is_repeat=True) == {"max_memory": "8GB"}


def test_settings_hold_for_the_command_alone(
    user: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("EVERYFRAME_RUNS")
    (user / "everyframe.toml").write_text('[settings]\nruns = "/elsewhere"\nlog = "loud"\n')
    assert main(["models"]) == 2
    assert "EVERYFRAME_LOG must be one of" in capsys.readouterr().err
    (user / "everyframe.toml").write_text('[settings]\nruns = "/elsewhere"\nlog = "error"\n')
    assert main(["config", "show", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["settings"]
    assert shown["runs"] == {
        "value": "/elsewhere", "source": f"{user / 'everyframe.toml'} [settings]",
    }  # fmt: skip
    assert "EVERYFRAME_RUNS" not in os.environ
    assert main(["--help"]) == 0


def test_show_names_each_source(
    user: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (user / "everyframe.toml").write_text("fps = 8\n")
    Path("everyframe.toml").write_text('dtype = "fp32"\n[models.shapes]\nnum_frames = 9\n')
    monkeypatch.setenv("EVERYFRAME_SEED", "7")
    monkeypatch.setenv("EVERYFRAME_SEEDS", "7")
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["config", "show"]) == 0
    out, err = capsys.readouterr()
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.split()}
    assert rows["seed"] == ["7", "EVERYFRAME_SEED"]
    assert rows["num_frames"] == ["9", "project's", "file", "[models.shapes]"]
    assert rows["fps"] == ["8.0", "user's", "file"]
    assert "EVERYFRAME_SEEDS; did you mean" in err
    assert "quality" not in rows
    assert main(["config", "show", "--all", "--json"]) == 0
    options = json.loads(capsys.readouterr().out)["options"]
    assert options["quality"] == {"value": "exact", "source": "built in"}
    assert options["dtype"]["source"] == str(Path.cwd() / "everyframe.toml")


def test_a_wrong_file_is_wrong_input(user: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (user / "everyframe.toml").write_text("num_frame = 9\n")
    assert main(["plan", PROMPT, "--json"]) == 2
    out, err = capsys.readouterr()
    assert "did you mean 'num_frames'" in err
    assert json.loads(out)["code"] == 2
    assert "Traceback" not in err
