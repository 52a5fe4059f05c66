"""A program in a fork of this process, for tests that observe it from outside.

It has its own pid, pipes, signals and exit code, as a new process has after seconds of imports.
Tests of an interpreter's own start and end need a real new process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any


def forked(
    program: Callable[[], object], folder: Path, environment: Mapping[str, str], **streams: Any
) -> subprocess.Popen[str]:
    """`program` in `folder`; what it returns or exits with is the exit code.

    `streams` are those of `subprocess.Popen`, of text.
    """

    def instead_of_another() -> None:
        code: object = 1
        try:
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # Popen waits for the end of one of them
            _begin(environment)
            code = program()
            sys.stdout.flush()
        except SystemExit as stop:
            code = stop.code
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code if isinstance(code, int) else 0 if code is None else 1)

    return subprocess.Popen(
        [sys.executable], cwd=folder, text=True, preexec_fn=instead_of_another,
        restore_signals=False, **streams,
    )  # fmt: skip


def _begin(environment: Mapping[str, str]) -> None:
    """As Python begins: with the streams that it was given, which pytest has put its own before."""
    sys.stdin = os.fdopen(0)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8")
    sys.stderr = os.fdopen(2, "w", 1, encoding="utf-8", errors="backslashreplace")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    # The settings by which this process starts others, and what those import at once, belong to
    # the process that it is a fork of.
    server: Any = forkserver._forkserver
    server._preload_modules = ["__main__"]
    tracker: Any = resource_tracker._resource_tracker
    forkserver.set_forkserver_preload = server.set_forkserver_preload
    server._forkserver_address = server._forkserver_alive_fd = server._forkserver_pid = None
    tracker._fd = tracker._pid = None
