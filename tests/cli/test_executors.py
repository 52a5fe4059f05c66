"""``--executor ray``: what is refused before anything starts, and a video of a cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from everyframe.cli.main import main
from everyframe.engine.workers.worker_start import IN_PROCESS
from everyframe.media.read import read_video
from helpers import ray_cluster
from helpers.shadowing_modules import plant

ASKED = [
    "a red circle", "--device", "cpu", "--num-frames", "5", "--size", "32x32", "--seed", "3",
    "--num-inference-steps", "4",
]  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--executor", "rai"], "executor must be one of workers, ray, got 'rai'"),
        (["--ray-address", "auto"], "--ray-address needs --executor ray"),
        (["--place-timeout", "3"], "--place-timeout needs --executor ray"),
        (["--executor", "ray", "--place-timeout", "soon"], "place-timeout must be seconds above 0"),
        (["--executor", "ray", "--place-timeout", "nan"], "place-timeout must be seconds above 0"),
        (["--executor", "ray", "--dry-run"], "a dry run plans for this machine"),
    ],
)
def test_flags_without_a_meaning_are_one_line(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", *ASKED, *flags]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert len(printed.splitlines()) == 1


def test_ray_under_torchrun_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    assert main(["generate", *ASKED, "--executor", "ray"]) == 2
    assert "torchrun has started this process" in capsys.readouterr().err


def test_without_ray_it_is_one_line_with_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["generate", *ASKED, "--executor", "ray"]) == 2
    assert "pip install 'everyframe[ray]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def cluster() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch, ray_cluster.token(patch):
        pytest.importorskip("ray", reason="Ray is not installed: pip install 'everyframe[ray]'")
        with ray_cluster.cluster(num_cpus=2) as found:
            yield found


@pytest.mark.slow
def test_a_command_makes_the_video_of_this_machine_on_a_cluster(
    cluster: Any, tmp_path: Path
) -> None:
    """Started as a person does; what lies in the current folder is imported nowhere."""
    trace = plant(tmp_path)

    environment = {name: text for name, text in os.environ.items() if name != IN_PROCESS}

    def make(name: str, *flags: str) -> Any:
        command = [sys.executable, "-m", "everyframe", "generate", *ASKED, "--num-devices", "2"]
        done = subprocess.run(
            [*command, "-o", name, *flags], cwd=tmp_path, env=environment, capture_output=True,
            text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == name
        return read_video(tmp_path / name)[0]

    there = make("there.mp4", "--executor", "ray", "--ray-address", cluster.address)
    assert not trace.exists()
    assert np.array_equal(there, make("here.mp4"))
