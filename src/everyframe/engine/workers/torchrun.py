"""Read torchrun's environment: rank, world size, and the file for error messages.

Each process under torchrun starts one worker, as it would without, and survives its crash.
The workers meet by the addresses in the environment. Rank 0 displays and writes; the others print
only if they fail. Imports no torch.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from everyframe.core.errors import InputError, PeerLostError, WorkerDiedError


@dataclass(frozen=True)
class TorchrunRank:
    """This process's torchrun rank: `rank` of `size`, here `local_rank` of `local_size`."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    def options(self, given: Mapping[str, Any]) -> dict[str, int]:
        """The device options that torchrun implies, merged with those given.

        Raises:
            InputError: the given options name another number of devices.
        """
        names = given.get("devices")
        if names is not None:
            self._check("devices", len(str(names).split(",")), self.local_size)
            return {}
        if given.get("num_devices") is not None:
            self._check("num_devices", int(given["num_devices"]), self.size)
        return {"num_devices": self.size}

    def _check(self, name: str, asked: int, ranks: int) -> None:
        if asked != ranks:
            where = "" if ranks == self.size else " on this machine"
            raise InputError(
                f"{name} asks for {asked} and torchrun has started {ranks} ranks{where}, one for "
                "each device; give it the same number, or leave that out"
            )


def under_torchrun(environment: Mapping[str, str] | None = None) -> TorchrunRank | None:
    """This process's torchrun rank; None if torchrun didn't start it."""
    environ = os.environ if environment is None else environment
    if "TORCHELASTIC_RUN_ID" not in environ or "RANK" not in environ:
        return None
    rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    local = int(environ.get("LOCAL_RANK", rank)), int(environ.get("LOCAL_WORLD_SIZE", size))
    return TorchrunRank(rank, size, *local)


def write_error_file(text: str) -> None:
    """Write why this rank failed to torchrun's error file, for torchrun's summary.

    The file has the format of torch.distributed.elastic's ``record``. That function would write a
    Python traceback, which helps no user, and importing it takes seconds.
    """
    place = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if place:
        details = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with open(place, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": text, "extraInfo": details}}, file)


#: Seconds to wait for other ranks' messages; diagnosing a crashed worker takes some.
_LOST_A_PEER, _ON_ALL_ALIKE = 20.0, 4.0


class Terminated(BaseException):
    """SIGTERM or SIGHUP arrived; raised so that unfinished files are removed on exit."""


def report_delay(error: BaseException, rank: int) -> float:
    """Seconds that this rank waits for another rank's message before it reports its own error."""
    if isinstance(error, PeerLostError):
        return _LOST_A_PEER + (_ON_ALL_ALIKE if rank else 0)
    if rank == 0 or isinstance(error, WorkerDiedError):
        return 0.0
    return _ON_ALL_ALIKE


def after_others(ranks: TorchrunRank, error: BaseException, text: str) -> str:
    """The message that this rank reports, after giving the other ranks time to report first.

    Does not return if torchrun ends this process meanwhile.
    """
    # Nothing here needs cleanup.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(report_delay(error, ranks.rank))
    message = (
        text if not ranks.rank or f"rank {ranks.rank}" in text else f"rank {ranks.rank}: {text}"
    )
    write_error_file(message)
    return message
