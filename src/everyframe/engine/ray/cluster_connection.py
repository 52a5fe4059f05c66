"""Join a Ray cluster as a driver, and leave it: its token, its address, and what Ray prints.

A wrong address is found before Ray tries it for minutes. The command's output is its own.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
from pathlib import Path

from everyframe.core.errors import InputError, first_line

_MODE = "RAY_AUTH_MODE"
_ADDRESS = re.compile(r"(?P<host>[^\s/:]+|\[[0-9a-fA-F:.]+\]):(?P<port>\d{1,5})")
#: Seconds until a cluster's machine has to answer.
_ANSWER = 10.0


def require_token() -> None:
    """Switch token authentication on unless a person chose; Ray reads it once, on import.

    Raises:
        InputError: Ray was imported without it.
    """
    if _MODE in os.environ:
        return
    if sys.modules.get("ray") is not None:
        raise InputError(
            f"Ray was imported without token authentication: set {_MODE}=token before that, or "
            f"{_MODE}=disabled to let whoever reaches the cluster's ports run code on it"
        )
    os.environ[_MODE] = "token"


def join_cluster(address: str) -> None:
    """Join the cluster as a driver, and undo what Ray changes in this process besides.

    It takes over SIGTERM, and puts our current folder on its workers' import path.

    Raises:
        InputError: there is no cluster at the address, or it refuses the token.
    """
    _check_address(address)
    import ray
    from ray.exceptions import AuthenticationError, RayError

    here, handler = os.getcwd(), signal.getsignal(signal.SIGTERM)
    # Only this package's location belongs there.
    os.chdir(Path(__file__).parents[3])
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR",
                 include_dashboard=False if address == "local" else None)  # fmt: skip
    except AuthenticationError as error:
        raise InputError(
            f"no Ray cluster can be joined at {address!r}: its token is not known here; copy it to "
            "~/.ray/auth_token (`ray get-auth-token` prints it on a machine of the cluster)"
        ) from error
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        raise _no_cluster(address, first_line(error)) from error
    finally:
        os.chdir(here)
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
    _print_losses(False)


def leave_cluster() -> None:
    """Leave it, which ends what this process started there."""
    import ray

    ray.shutdown()
    _print_losses(True)


def has_head() -> bool:
    """Whether the head of this process's cluster answers.

    Without it Ray's calls block for a minute, and then Ray ends this process.
    """
    import ray

    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    try:
        _reach(host, port)
    except OSError:
        return False
    return True


def _reach(host: str, port: str) -> None:
    """Raise `OSError` and its like where nothing answers."""
    socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER).close()


def _check_address(address: str) -> None:
    """Raise `InputError` for an address of another form, or at which nothing answers."""
    asked = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    found = _ADDRESS.fullmatch(asked)
    if found is None:
        if address in ("auto", "local"):
            return  # Ray looks for one, or starts one
        raise InputError(f"ray-address must be auto, local or HOST:PORT, got {address!r}")
    try:
        _reach(found["host"], found["port"])
    except (OSError, OverflowError, UnicodeError) as error:
        raise _no_cluster(asked, getattr(error, "strerror", None) or first_line(error)) from error


def _no_cluster(address: str, why: str) -> InputError:
    return InputError(
        f"no Ray cluster can be joined at {address!r} ({why.rstrip(' .')}); start one "
        "(RAY_AUTH_MODE=token ray start --head), give --ray-address HOST:PORT, or compare the "
        "token in ~/.ray/auth_token, since a wrong one is refused like this"
    )


def _print_losses(is_wanted: bool) -> None:
    """Whether Ray prints each lost actor and node to standard output, where our paths go.

    Each is an event of the job. ``log_to_driver`` does not reach these, so it takes the switch that
    Ray's own debugger uses.
    """
    import ray._private.worker

    ray._private.worker._worker_logs_enabled = is_wanted
