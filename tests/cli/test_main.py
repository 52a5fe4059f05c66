"""The command line begins wherever it is called, and says where it can't."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from everyframe.cli import main as main_module


@pytest.mark.skipif(os.name != "posix", reason="Windows removes no folder that a process is in")
def test_a_folder_that_was_removed_is_named_as_the_cause() -> None:
    gone = 'cd "$(mktemp -d)" && rmdir "$PWD" && exec "$0" -m everyframe "$@"'
    done = subprocess.run(
        ["sh", "-c", gone, sys.executable, "models"],
        env={**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path))},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert done.stderr == (
        "error: the folder that you are in was removed; change to one that is there (cd)\n"
    )


@pytest.mark.skipif(os.name != "posix", reason="Windows removes no folder that a process is in")
def test_a_folder_that_was_removed_meanwhile_is_named_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A relative output leads nowhere then, and the system's error names no file."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")

    def fail(words: list[str]) -> Any:
        os.rmdir(tmp_path / "gone")
        return os.path.abspath("clip.mp4")

    monkeypatch.setattr(main_module, "_parse", fail)
    assert main_module.main(["models"]) == 2
    assert capsys.readouterr().err == (
        "error: the folder that you are in was removed; change to one that is there (cd)\n"
    )


@pytest.mark.parametrize("words", [["plan", "a red circle"], ["serve", "--port", "0"]])
def test_python_without_docstrings_is_refused(words: list[str]) -> None:
    """transformers reads its own when it is imported."""
    done = subprocess.run(
        [sys.executable, "-OO", "-m", "everyframe", *words],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert "PYTHONOPTIMIZE=1" in line
