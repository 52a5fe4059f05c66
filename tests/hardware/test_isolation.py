"""Whatever a function does in its process, the caller lives and learns how it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from everyframe.core.child_environment import HUGE_PAGES, WAIT_POLICY, child_environment
from everyframe.hardware.isolation import run_isolated, signal_name
from helpers import crashing_functions
from helpers.shadowing_modules import plant

#: Starting the first process imports torch; a hang is cut off long after it could have ended.
PATIENCE = 120.0


def test_a_value_comes_back() -> None:
    ended = run_isolated(crashing_functions.answer, "a", "b", seconds=PATIENCE)
    assert ended.is_well
    assert ended.value == ["a", "b"]


@pytest.mark.parametrize("system", ["linux", "darwin"])
def test_it_allocates_in_large_pages_as_workers_do(tmp_path: Path, system: str) -> None:
    done = _program(
        tmp_path,
        "from os import getenv",
        "from everyframe.hardware.isolation import run_isolated",
        f"import sys; sys.platform = {system!r}",
        f"print(run_isolated(getenv, {HUGE_PAGES!r}, seconds=100).value)",
    )
    assert done.stdout.split() == [child_environment(is_busy=False)[HUGE_PAGES]], done.stderr


def test_its_threads_wait_as_those_of_workers_do(tmp_path: Path) -> None:
    done = _program(
        tmp_path,
        "from os import environ, getenv",
        "from everyframe.hardware import isolation",
        f"environ.pop({WAIT_POLICY!r}, None)",
        "isolation.is_busy = lambda: True",
        f"print(isolation.run_isolated(getenv, {WAIT_POLICY!r}, seconds=100).value)",
    )
    assert done.stdout.split() == ["passive"], done.stderr


def test_what_a_killed_process_had_reserved_is_freed_without_a_warning(tmp_path: Path) -> None:
    done = _program(
        tmp_path,
        "from everyframe.hardware.isolation import run_isolated",
        "from helpers.crashing_functions import reserve_and_die",
        "print(run_isolated(reserve_and_die, seconds=100).signal)",
    )
    assert (done.stdout, done.stderr) == ("SIGKILL\n", "")


def _program(folder: Path, *lines: str) -> subprocess.CompletedProcess[str]:
    """Run these lines in a program of its own: here others may have begun what is forked from."""
    program = folder / "program.py"
    program.write_text("\n".join(lines))
    tests = str(Path(crashing_functions.__file__).parent.parent)
    paths = [tests, *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run([sys.executable, str(program)], capture_output=True, text=True, env=env)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows starts no such thread")
def test_a_process_that_may_start_no_thread_says_so_in_its_log_alone(tmp_path: Path) -> None:
    done = _program(
        tmp_path,
        "import threading",
        "from everyframe.hardware.isolation import _serve",
        'def refuse(self): raise RuntimeError("can\'t start new thread")',
        "threading.Thread.start = refuse",
        f"_serve(None, {str(tmp_path / 'log')!r}, len, ([],))",
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
    assert "can't start new thread" in (tmp_path / "log").read_text()


def test_an_error_is_reported_with_what_was_printed() -> None:
    ended = run_isolated(crashing_functions.raise_error, "two\nlines", seconds=PATIENCE)
    assert not ended.is_well
    assert ended.error == "RuntimeError: two lines"
    assert "Traceback" in ended.printed


def test_what_cannot_be_sent_is_reported() -> None:
    ended = run_isolated(crashing_functions.answer, "a", lambda: "b", seconds=PATIENCE)
    assert not ended.is_well
    assert ended.error is not None
    assert "can't be sent to a process" in ended.error


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (crashing_functions.divide_by_zero, "SIGFPE"),
        (crashing_functions.segfault, "SIGSEGV"),
        (crashing_functions.be_killed, "SIGKILL"),
    ],
)
def test_a_death_is_reported_by_its_signal(function: object, name: str) -> None:
    assert callable(function)
    ended = run_isolated(function, "cpu", seconds=PATIENCE)
    assert ended.signal == name
    assert str(ended) == f"died of {name}"
    if name == "SIGFPE":
        assert ended.printed == "about to divide"


def test_leaving_the_interpreter_is_no_value() -> None:
    ended = run_isolated(crashing_functions.leave_the_interpreter, "cpu", seconds=PATIENCE)
    assert ended.error == "ended with exit code 3"


def test_a_hang_ends_at_its_limit() -> None:
    run_isolated(crashing_functions.answer, seconds=PATIENCE)  # so that torch is imported by now
    began = time.monotonic()
    ended = run_isolated(crashing_functions.hang, "cpu", seconds=1.0)
    assert ended.timed_out
    assert "did not end within 1 s" in str(ended)
    assert time.monotonic() - began < 30


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no process groups of this kind")
def test_what_it_started_ends_with_it(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    run_isolated(crashing_functions.answer, seconds=PATIENCE)  # so that torch is imported by now
    for seconds in (2.0, 10.0, 50.0):  # enough for it to have started its own, however slow
        ended = run_isolated(crashing_functions.hang_with_a_child, str(pid_file), seconds=seconds)
        assert ended.timed_out
        if pid_file.exists() and pid_file.read_text():
            break
    assert _ends(int(pid_file.read_text())), "the child outlived the limit"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no process groups of this kind")
def test_an_interruption_leaves_nothing_behind(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"

    def interrupt() -> None:
        while not (pid_file.exists() and pid_file.read_text()):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    # A shell's background jobs ignore the signal, and so would this process.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            run_isolated(crashing_functions.hang_with_a_child, str(pid_file), seconds=PATIENCE)
        thread.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert _ends(int(pid_file.read_text())), "the child outlived the interruption"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no process groups of this kind")
@pytest.mark.parametrize("system", ["linux", "darwin"])
def test_nothing_outlives_a_caller_that_is_killed(tmp_path: Path, system: str) -> None:
    pid_file = tmp_path / "pid"
    done = _program(
        tmp_path,
        "import os, signal, sys, threading, time",
        "from pathlib import Path",
        "from everyframe.hardware.isolation import run_isolated",
        "from helpers.crashing_functions import hang_with_a_child",
        f"sys.platform, pid_file = {system!r}, Path({str(pid_file)!r})",
        "def be_killed():",
        "    while not (pid_file.exists() and pid_file.read_text()):",
        "        time.sleep(0.05)",
        "    os.kill(os.getpid(), signal.SIGKILL)",
        "threading.Thread(target=be_killed).start()",
        "run_isolated(hang_with_a_child, str(pid_file), seconds=100)",
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert _ends(int(pid_file.read_text())), "the child outlived the caller"


def _ends(pid: int) -> bool:
    """Whether that process ends soon; the kernel takes a moment to bury it."""
    for _ in range(600):
        if not _is_running(pid):
            return True
        time.sleep(0.1)
    return False


def _is_running(pid: int) -> bool:
    """Whether that process still runs; a zombie doesn't."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not (stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] == "Z")


def test_signals_have_names() -> None:
    assert signal_name(8) == "SIGFPE"
    assert signal_name(250) == "signal 250"


def printed_by(script: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=True, timeout=200
    )
    return done.stdout.split()


def test_the_callers_own_script_is_not_run_again(tmp_path: Path) -> None:
    script = tmp_path / "film.py"
    script.write_text(
        "from everyframe.hardware.isolation import run_isolated\n"
        "import math\n"
        "print('once')\n"
        "print(run_isolated(math.hypot, 3, 4, seconds=100).value)\n"
    )
    assert printed_by(script) == ["once", "5.0"]


def test_the_callers_own_script_stays_its_own_when_two_threads_ask_at_once(tmp_path: Path) -> None:
    """The second one's process ran the script, and the first one's stand-in stayed in its place."""
    script = tmp_path / "film.py"
    script.write_text(
        "from everyframe.hardware.isolation import run_isolated\n"
        "import math, pathlib, sys, threading\n"
        f"print('run', file=pathlib.Path({str(tmp_path / 'runs')!r}).open('a'))\n"
        "own = sys.modules['__main__']\n"
        "work = lambda: run_isolated(math.hypot, 3, 4, seconds=100)\n"
        "threads = [threading.Thread(target=work) for _ in range(3)]\n"
        "if __name__ == '__main__':\n"
        "    [each.start() for each in threads]\n"
        "    [each.join() for each in threads]\n"
        "    print(sys.modules['__main__'] is own)\n"
    )
    assert printed_by(script) == ["True"]
    assert (tmp_path / "runs").read_text().split() == ["run"]


@pytest.mark.parametrize("system", ["linux", "darwin"])
def test_no_module_of_the_current_folder_is_imported(tmp_path: Path, system: str) -> None:
    """Neither in what others are forked from nor in what is started anew."""
    trace = plant(tmp_path / "here")
    program = tmp_path / "program.py"
    program.write_text(
        "from everyframe.hardware.isolation import run_isolated\n"
        f"import sys; sys.platform = {system!r}\n"
        "from math import sqrt\n"
        "ended = run_isolated(sqrt, 16.0, seconds=100)\n"
        "print(ended.value, ended)\n",
        encoding="utf-8",
    )
    command = [sys.executable, str(program)]
    done = subprocess.run(command, cwd=tmp_path / "here", capture_output=True, text=True)
    assert done.stdout.split()[:1] == ["4.0"], done.stdout + done.stderr
    assert not trace.exists()
