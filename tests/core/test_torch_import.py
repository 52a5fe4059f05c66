"""torch that can't be imported is not called our bug."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from everyframe.core.torch_import import explain_import
from helpers.slow_rows import slow_unless


@pytest.mark.parametrize("command", slow_unless(["generate"], ["plan", "generate"]))
def test_a_variable_that_torch_refuses_is_wrong_input(tmp_path: Path, command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "everyframe", command, "a red circle"], cwd=tmp_path, check=False,
        capture_output=True, text=True, timeout=120, env={**os.environ, "TORCH_LOGS": "garbage"},
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: torch can't be imported here: Invalid log settings: garbage")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "words",
    [
        ["models"],
        pytest.param(["plan", "a circle", "--model", "shapes"], marks=pytest.mark.slow),
    ],
)
def test_a_variable_that_the_hubs_library_refuses_is_named(
    words: list[str], tmp_path: Path
) -> None:
    # With the dry runs of an earlier plan it would not be imported.
    env = {**os.environ, "HF_HUB_ETAG_TIMEOUT": "soon", "EVERYFRAME_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "everyframe", *words], check=False, capture_output=True, text=True,
        timeout=120, env=env,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert done.stderr == (
        "error: huggingface_hub can't be imported here: invalid literal for int() with base 10: "
        "'soon'; set HF_HUB_ETAG_TIMEOUT to another value, or unset it\n"
    )


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(ValueError, match="ours") as caught:
        raise ValueError("ours")
    assert explain_import(caught.value) is caught.value
