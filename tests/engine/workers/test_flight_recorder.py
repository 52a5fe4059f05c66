"""The last position of a process, as a message says it."""

from __future__ import annotations

from pathlib import Path

import pytest

from everyframe.engine.workers.flight_recorder import FlightRecorder, read_last_position


@pytest.mark.parametrize(
    ("step", "num_steps", "position"),
    [
        (1, 4, "in step 1 of 4 of denoise"),
        (4, 4, "in step 4 of 4 of denoise"),
        # A step that is done names the next one, which the last has none of.
        (5, 4, "after step 4 of 4 of denoise"),
        (1, 0, "in denoise"),
    ],
)
def test_no_step_is_named_that_the_stage_does_not_have(
    tmp_path: Path, step: int, num_steps: int, position: str
) -> None:
    recorder = FlightRecorder(tmp_path / "trail-0")
    recorder.at("denoise", step, num_steps)
    assert str(read_last_position(tmp_path / "trail-0")) == position
    recorder.close()
