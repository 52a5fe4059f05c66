"""Run a function in a separate process with a time limit, so that its crash or hang is a result.

SIGFPE in a matrix library, a hang in a collective and a kill by the out-of-memory killer cannot be
caught in Python; here each is an ordinary value. Processes are forked from one that has only torch
imported (where the system allows), so each costs a tenth of a second. Output of the function is
captured and not shown. `everyframe.doctor.probes` uses this.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import util
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from everyframe.core.child_environment import set_variables
from everyframe.core.errors import DeviceLoss
from everyframe.core.safe_path import SAFE_PATH, SAFE_PATH_VARIABLE
from everyframe.hardware.cpu import is_busy
from everyframe.hardware.device_loss import loss_behind, loss_in

#: Characters of a process's output that are returned.
_KEPT = 2000

#: multiprocessing frees a killed process's semaphores at exit, and warns about them.
_IGNORE_FREED = (
    "import warnings; warnings.filterwarnings('ignore', 'resource_tracker: There appear'); "
)

#: For the process that others are forked from. If torch can't be imported it ends without a word,
#: where multiprocessing's own preloading shows a traceback; a spawned process then says why.
_PRELOAD_TORCH = "\ntry:\n import torch\nexcept Exception:\n sys.exit(1)\n"

_STARTING = threading.Lock()


@dataclass(frozen=True)
class ProcessResult:
    """Result of a process: exactly one of `value`, `error`, `signal` (by name) and `timed_out`.

    Attributes:
        seconds: time that it took.
        printed: end of what it wrote to stdout and stderr.
        loss: the lost device, if that is why it failed.
    """

    value: Any = None
    error: str | None = None
    signal: str | None = None
    timed_out: bool = False
    seconds: float = 0.0
    printed: str = ""
    loss: DeviceLoss | None = None

    @property
    def is_well(self) -> bool:
        return self.error is None and self.signal is None and not self.timed_out

    def __str__(self) -> str:
        if self.timed_out:
            return f"did not end within {self.seconds:.0f} s"
        if self.signal is not None:
            return f"died of {self.signal}"
        return self.error or "returned"


def run_isolated(function: Callable[..., Any], *arguments: Any, seconds: float) -> ProcessResult:
    """Call ``function(*arguments)`` in a new process and return how it ended.

    Args:
        function: defined in a module, not in a script; returns data that JSON can hold.
        arguments: picklable values; only this process and its child read them.
        seconds: time limit, after which the process and all its children are killed.
    """
    began = time.monotonic()
    ended = _run(_context(), function, arguments, began, seconds)
    if ended is None:
        # The forkserver died, most likely while it imported torch. A spawned process imports only
        # what the function does, so its crash can be observed.
        ended = _run(_context(fresh=True), function, arguments, began, seconds)
    if ended is None:
        return ProcessResult(error="no process could be started", seconds=time.monotonic() - began)
    return ended


def _run(
    context: Any,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    began: float,
    seconds: float,
) -> ProcessResult | None:
    """Result of the process; None if no process could be started."""
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="everyframe-") as folder:
        log = Path(folder, "printed")
        process = context.Process(
            target=_serve, args=(theirs, str(log), function, arguments), daemon=False
        )
        try:
            with safe_start(), _nobodys_script():
                process.start()
        except (OSError, EOFError):
            ours.close()
            theirs.close()
            return None
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            ours.close()
            theirs.close()
            return ProcessResult(error=f"what it needs can't be sent to a process: {error}")
        theirs.close()
        try:
            answer = _answer(ours, began + seconds)
            # A dying process may outlive its pipe for a moment; after an answer it may be ended.
            patience = 1.0 if answer else 10.0
            process.join(max(0.0, min(patience, began + seconds - time.monotonic())))
            timed_out = answer is None and process.exitcode is None
        finally:  # Ctrl-C comes through here as well
            _kill_all(process)
        taken = time.monotonic() - began
        printed = log.read_text(errors="replace")[-_KEPT:].strip() if log.exists() else ""
    return _make_result(answer, process.exitcode, timed_out, taken, printed)


def _make_result(
    answer: bytes | None, exit_code: int | None, timed_out: bool, seconds: float, printed: str
) -> ProcessResult:
    if timed_out:
        return ProcessResult(timed_out=True, seconds=seconds, printed=printed)
    if answer:
        answered = json.loads(answer)
        loss = None if answered["loss"] is None else DeviceLoss(**answered["loss"])
        return ProcessResult(
            answered["value"], answered["error"], seconds=seconds, printed=printed, loss=loss
        )
    loss = loss_in(printed)
    if exit_code is not None and exit_code < 0:
        signalled = signal_name(-exit_code)
        return ProcessResult(signal=signalled, seconds=seconds, printed=printed, loss=loss)
    error = f"ended with exit code {exit_code}"
    return ProcessResult(error=error, seconds=seconds, printed=printed, loss=loss)


def signal_name(number: int) -> str:
    """Name of a signal, such as ``SIGFPE`` for 8; the number if the system has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _context(*, fresh: bool = False) -> Any:
    """Start method of processes: fork from a clean server process, or spawn.

    On macOS a process with Metal's libraries must not fork; Windows cannot fork.
    """
    if fresh or not sys.platform.startswith("linux"):
        return multiprocessing.get_context("spawn")
    return multiprocessing.get_context("forkserver")


@contextmanager
def _nobodys_script() -> Iterator[None]:
    """Context: hide the caller's script from multiprocessing; only within `safe_start`'s lock.

    multiprocessing imports that script in every process that it starts, to find functions. Ours are
    in modules, and a script that makes a video would make it twice.
    """
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


@contextmanager
def safe_start() -> Iterator[None]:
    """Context: multiprocessing starts Python without the current folder on `sys.path`.

    And with the variables of workers, as trials of fast paths are about runs in those. And without
    a warning of what killed processes left. multiprocessing has no option for this, so its function
    that starts processes is replaced meanwhile, under a lock. Processes that other threads start at
    that moment are as safe.
    """
    with _STARTING:
        begin = util.spawnv_passfds

        def begin_safely(path: bytes, args: Any, passfds: Any) -> int:
            words = list(args)
            if "-c" in words[:-1]:
                code = words.index("-c") + 1
                preload = _PRELOAD_TORCH if "multiprocessing.forkserver" in words[code] else ""
                computes = "multiprocessing.resource_tracker" not in words[code]
                variables = set_variables(is_busy=computes and is_busy())
                words[code] = SAFE_PATH + variables + _IGNORE_FREED + preload + words[code]
            return begin(path, words, passfds)

        util.spawnv_passfds = begin_safely
        try:
            yield
        finally:
            util.spawnv_passfds = begin


def _answer(connection: Connection, deadline: float) -> bytes | None:
    """Message of the process; None if it ended or timed out without one."""
    with connection:
        try:
            if connection.poll(max(0.0, deadline - time.monotonic())):
                return connection.recv_bytes()
        except (EOFError, OSError):  # it died, maybe in the middle of a word
            return b""
    return None


def _kill_all(process: Any) -> None:
    """Kill the process and its process group: a hanging compiler must not outlive it."""
    if process.pid is None:
        return
    if hasattr(os, "killpg"):
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            process.kill()  # it had no time to make a group of its own
    else:
        process.kill()
    process.join()


def _serve(
    connection: Connection, log: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    """Child process: call the function and send the result."""
    os.environ[SAFE_PATH_VARIABLE] = "1"  # for compilers that start Python themselves
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if sys.platform != "win32":
        import resource

        os.setsid()
        threading.Thread(target=_end_with_parent, daemon=True).start()
        # Crashes here are expected: write no core dump.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answer: dict[str, Any] = {"value": None, "error": None, "loss": None}
    try:
        answer["value"] = function(*arguments)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
        traceback.print_exc()
        answer["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
        loss = loss_behind(error)
        answer["loss"] = None if loss is None else asdict(loss)
    connection.send_bytes(json.dumps(answer).encode())
    connection.close()


def _end_with_parent() -> None:
    """Kill this process and its process group as soon as the one that asked for it is gone.

    Nobody else does that once the other one is killed, and a compiler works for minutes.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "multiprocessing has started this process"
    parent.join()
    os.killpg(0, signal.SIGKILL)


@contextmanager
def ends_after(seconds: float) -> Iterator[None]:
    """Context: this process exits with code 1 after `seconds`."""
    faulthandler.dump_traceback_later(max(seconds, 0.01), exit=True, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
