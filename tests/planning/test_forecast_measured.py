"""Forecasts against whole processes: memory within 20 %, time within a factor of 1.5.

Three families at two sizes of 300 MB and more each, every one in a process of its own, by
`benchmarks/forecasts.py`. Slow: a minute or so on a quiet machine.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "forecasts.py"


def cases() -> list[str]:
    spec = importlib.util.spec_from_file_location("forecasts", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.CASES)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases())
def test_forecasts_are_what_is_measured(case: str) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), case],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["measured_bytes"] > 300e6
    assert 0.8 < found["forecast_bytes"] / found["measured_bytes"] < 1.2, found
    assert 1 / 1.5 < found["forecast_seconds"] / found["measured_seconds"] < 1.5, found
