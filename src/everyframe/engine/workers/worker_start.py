"""Start of a worker process, also ahead of its job: what a worker imports takes seconds.

`worker_process.py` has the parent's handle, `worker.py` is what the process runs. This module
imports little, so that a command starts a worker while it still reads its own options.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

from everyframe.core.child_environment import child_environment
from everyframe.core.safe_path import SAFE_PATH

#: Environment variable: compute in this process, without a worker.
IN_PROCESS = "EVERYFRAME_IN_PROCESS"

#: Code that a worker runs. Its import path excludes the current folder and that of the caller's
#: script. This package's own location comes last. The parent handles Ctrl-C, which is blocked until
#: it is ignored: it would end Python in its start, with a traceback.
_CODE = (
    f"{SAFE_PATH}sys.path.append(sys.argv[2]); "
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT]); "
    "from everyframe.engine.workers.worker import serve; serve(int(sys.argv[1]))"
)
_PLACE_OF_PACKAGE = str(Path(__file__).resolve().parents[3])


@dataclass(frozen=True)
class StartedWorker:
    """A worker process that waits for a job, and the connection to it."""

    process: subprocess.Popen[bytes]
    connection: Connection


#: Workers that were started ahead of their jobs.
_AHEAD: list[StartedWorker] = []


def is_possible() -> bool:
    """Whether workers can be started here and `IN_PROCESS` does not disable them."""
    return os.name == "posix" and not os.environ.get(IN_PROCESS)


def start_ahead() -> None:
    """Start the worker that the next `take_worker` returns; it has this environment and folder."""
    _AHEAD.append(_start())


def take_worker() -> StartedWorker:
    """A worker: the one that was started ahead, else a new one."""
    return _AHEAD.pop() if _AHEAD else _start()


def end_unused() -> None:
    """End a worker that was started ahead and got no job."""
    while _AHEAD:
        unused = _AHEAD.pop()
        unused.process.kill()
        unused.process.wait()
        unused.connection.close()


def _start() -> StartedWorker:
    # Late import: it is of no use to a command that starts no worker.
    from everyframe.hardware.cpu import is_busy

    ours, theirs = Pipe()
    assert isinstance(ours, Connection)
    assert isinstance(theirs, Connection)
    environment = child_environment(is_busy=is_busy())
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", _CODE, str(theirs.fileno()), _PLACE_OF_PACKAGE],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=environment,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    return StartedWorker(process, ours)
