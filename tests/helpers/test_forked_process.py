"""A forked program can start processes, whatever the one that it is a fork of has started."""

from __future__ import annotations

import os
from pathlib import Path

from everyframe.hardware.isolation import run_isolated
from helpers.forked_process import forked


def test_a_forked_program_starts_processes_of_its_own(tmp_path: Path) -> None:
    assert run_isolated(os.getpid, seconds=60).value not in (None, os.getpid())
    program = forked(lambda: int(run_isolated(os.getpid, seconds=60).value is None), tmp_path,
                     os.environ)  # fmt: skip
    assert program.wait(60) == 0
