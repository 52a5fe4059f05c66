"""Run fuzz cases, each in a fork of this process, and judge the results.

A case passes if the command ends by itself with an exit code for users (0, 2, 3 or 4), names the
error in one line, and leaves no file but its output. If only certain frames are right, it must
write those or none. Read next: `fuzz_cases.py`.
"""

from __future__ import annotations

import faulthandler
import gc
import io
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from everyframe.cli.main import main
from everyframe.media.read import read_video
from helpers.fuzz_cases import PROMPT, STDIN, Case, Inputs

#: Exit codes that are answers: done, wrong input, cannot be done here, numerics beyond repair.
ANSWERS = (0, 2, 3, 4)
#: Seconds of processor time, and of the clock on a machine that others use too.
CPU_SECONDS, WALL_SECONDS = 30, 120
#: What a case may take beside the memory that the process had before.
MEMORY_BYTES = 3 * 2**30
#: Files that may stay: runs, torch's cache of its compiler, and the sockets of a process that ends
#: as a fork must, without tidying up.
_LEFT = ("runs/", "tmp/torchinductor_", "tmp/pymp-")


@dataclass(frozen=True)
class Verdict:
    """What came of a case; `problem` is empty where it passed."""

    case: Case
    problem: str
    seconds: float
    output: str = ""

    def __str__(self) -> str:
        return f"{self.case.name}: {self.problem}\n  {self.case.argv}\n{self.output[-2000:]}"


def warm_up(inputs: Inputs) -> None:
    """Have this process import and measure once what each fork of it would."""
    model = ("--num-frames", "5", "--size", "32x32", "--model")
    commands = [
        ("plan", PROMPT, *model, str(inputs.opensora)),
        ("plan", "--image", str(inputs.media[0]), *model, str(inputs.svd)),
        ("plan", PROMPT, "--option", "max_sequence_length=16", *model, str(inputs.wan)),
        ("plan", PROMPT, "--option", "max_sequence_length=16", *model, str(inputs.modular)),
        *(("inspect", str(path)) for path in inputs.videos),
        ("paths",), ("models",), ("resume", "none"), ("trace", "--help"),
    ]  # fmt: skip
    # The cache is shared by all cases, as by all commands of a person.
    os.environ |= {
        "EVERYFRAME_CACHE": str(inputs.folder / "cache"),
        "EVERYFRAME_IN_PROCESS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    for words in commands:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            main(words)
    # A fork copies the tables of all memory that this process holds.
    gc.collect()
    gc.freeze()


def run(case: Case, folder: Path) -> Verdict:
    """Run one case in a new folder inside `folder`, which is removed afterwards."""
    work = folder / "case"
    shutil.rmtree(folder, ignore_errors=True)
    work.mkdir(parents=True)
    for own in ("home", "tmp"):
        (work / own).mkdir()
    case.prepare(work)
    before = _files(work)
    began = time.monotonic()
    pid = os.fork()
    if not pid:
        _child(case, folder, work)
    problem = _ending(pid)
    seconds = time.monotonic() - began
    output = (work / "output.txt").read_text(errors="replace")
    made = sorted(path for path, found in _files(work).items() if before.get(path) != found)
    problem = problem or _judge(case, folder, work, output) or _misplaced(case, made)
    return Verdict(case, problem, seconds, output)


def _child(case: Case, folder: Path, work: Path) -> None:
    """Run the command here, and end."""
    code = 70
    try:
        os.setsid()
        faulthandler.disable()
        stdin = work / STDIN if (work / STDIN).exists() else os.devnull
        with open(work / "output.txt", "wb") as file, open(stdin, "rb") as given:
            os.dup2(given.fileno(), 0)
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        # What captures the output of this process, a test's, is not the command's.
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", errors="backslashreplace", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", errors="backslashreplace", closefd=False)  # noqa: SIM115
        os.chdir(work)
        os.environ |= {
            "HOME": str(work / "home"),
            "TMPDIR": str(work / "tmp"),
            "EVERYFRAME_RUNS": str(work / "runs"),
            "EVERYFRAME_IN_PROCESS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        tempfile.tempdir = None  # was asked for by the parent
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
    if "error: out of memory" in output:
        return f"more than {MEMORY_BYTES / 2**30:g} GiB"
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


def _files(work: Path) -> dict[str, tuple[int, int]]:
    """Each file below the folder -> what changes when it is written."""
    found = {}
    for folder, _, names in os.walk(work):
        for name in names:
            path = os.path.join(folder, name)
            facts = os.lstat(path)
            found[os.path.relpath(path, work)] = (facts.st_size, facts.st_mtime_ns)
    return found


def _misplaced(case: Case, made: list[str]) -> str:
    """What was written that is neither the output, its record nor a run."""
    words = [*case.argv, ""]
    outputs = [words[at + 1] for at, word in enumerate(words[:-1]) if word in ("-o", "--report")]
    allowed = {os.path.normpath(each) for each in outputs}
    allowed |= {os.path.splitext(each)[0] for each in allowed}
    is_named = "-o" in words or words[0] != "generate"
    stray = [
        path
        for path in made
        if path not in ("output.txt", STDIN)
        and not path.startswith(_LEFT)
        and not any(path.startswith(each) for each in allowed)
        and (is_named or os.sep in path)
    ]
    return f"files beside the output: {stray}" if stray else ""
