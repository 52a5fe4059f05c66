"""Run fuzz cases, each in a fork of this process, and judge what came of them.

A case passes when the command ends by itself with an exit code for users (0, 2, 3 or 4), says what
is wrong in one line, leaves no file outside of the folder it was run in, and, where only certain
frames are right, writes those or none. Read next: `fuzz_cases.py`.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from everyframe.cli.main import main
from everyframe.media.read import read_video
from fuzz_cases import Case

#: Exit codes that are answers: done, wrong input, cannot be done here, numerics beyond repair.
ANSWERS = (0, 2, 3, 4)
#: Seconds of processor time, and of the clock on a machine that others use too.
CPU_SECONDS, WALL_SECONDS = 30, 120
#: What a case may take beside the memory that the process had before.
MEMORY_BYTES = 3 * 2**30


@dataclass(frozen=True)
class Verdict:
    """What came of a case; `problem` is empty where it passed."""

    case: Case
    problem: str
    seconds: float
    output: str = ""

    def __str__(self) -> str:
        return f"{self.case.name}: {self.problem}\n  {self.case.argv}\n{self.output[-2000:]}"


def run(case: Case, folder: Path) -> Verdict:
    """Run one case in a new folder inside `folder`, which is removed afterwards."""
    work = folder / "case"
    shutil.rmtree(folder, ignore_errors=True)
    work.mkdir(parents=True)
    case.prepare(work)
    began = time.monotonic()
    pid = os.fork()
    if not pid:
        _child(case, folder, work)
    problem = _ending(pid)
    seconds = time.monotonic() - began
    output = (work / "output.txt").read_text(errors="replace")
    problem = problem or _judge(case, folder, work, output)
    return Verdict(case, problem, seconds, output)


def _child(case: Case, folder: Path, work: Path) -> None:
    """Run the command here, and end."""
    code = 70
    try:
        os.setsid()
        faulthandler.disable()
        with open(work / "output.txt", "wb") as file, open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        # What captures the output of this process, a test's, is not the command's.
        sys.stdout = open(1, "w", errors="backslashreplace", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", errors="backslashreplace", closefd=False)  # noqa: SIM115
        os.chdir(work)
        home = work / "home"
        home.mkdir()
        os.environ |= {
            "HOME": str(home),
            "EVERYFRAME_RUNS": str(work / "runs"),
            # Shared by all cases, as by all commands of a person: what is measured once stays.
            "EVERYFRAME_CACHE": str(folder.parent / "cache"),
            "EVERYFRAME_IN_PROCESS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        had = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (had + MEMORY_BYTES,) * 2)
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 2))
        code = main([*case.argv])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _ending(pid: int) -> str:
    """Wait for the end of the command; what was wrong with it."""
    end = time.monotonic() + WALL_SECONDS
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            if os.WIFSIGNALED(status):
                number = os.WTERMSIG(status)
                if number == signal.SIGXCPU:
                    return f"hangs: more than {CPU_SECONDS} s of processor time"
                return f"ended by {signal.Signals(number).name}"
            code = os.WEXITSTATUS(status)
            return "" if code in ANSWERS else f"exit code {code}"
        time.sleep(0.005)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return f"hangs: more than {WALL_SECONDS} s"


def _judge(case: Case, folder: Path, work: Path, output: str) -> str:
    if "Traceback (most recent call last)" in output or "this is a bug in everyframe" in output:
        return "a traceback"
    errors = [line for line in output.splitlines() if line.startswith("error:")]
    if len(errors) > 1:
        return f"{len(errors)} errors in place of one line"
    strangers = [path.name for path in folder.iterdir() if path != work]
    if strangers:
        return f"files outside of the folder: {strangers}"
    made = work / "out.mp4"
    if case.expected is not None and made.exists():
        if not np.array_equal(read_video(made)[0], read_video(case.expected)[0]):
            return "other frames than those of the unbroken run"
    return ""


def run_all(cases: Iterator[Case], folder: Path) -> Iterator[Verdict]:
    """Every case's verdict, one after the other."""
    for case in cases:
        yield run(case, folder)
