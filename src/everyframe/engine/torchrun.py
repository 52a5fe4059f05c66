"""What torchrun has told this process: which rank of how many it is, and where its errors go.

Each rank that torchrun starts is a process that stays alive whatever happens: it starts one worker,
as it would without torchrun, and the workers meet by what is in the environment. Rank 0 shows and
writes, the others say nothing unless they fail. No torch here. Read next: `launcher.py`, and
`everyframe.engine.torchrun` for who of them speaks when a run fails.
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
    """This process as a rank: `rank` of `size`, on this machine `local_rank` of `local_size`."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    @property
    def is_local(self) -> bool:
        """Whether all ranks are on this machine."""
        return self.size == self.local_size

    def options(self, given: Mapping[str, Any]) -> dict[str, int]:
        """What it says of the options of a request, those that were given among them.

        Raises:
            InputError: they name another number of devices.
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
    """This process's place among the ranks that torchrun started; None if it didn't start it."""
    told = os.environ if environment is None else environment
    if "TORCHELASTIC_RUN_ID" not in told or "RANK" not in told:
        return None
    rank, size = int(told["RANK"]), int(told["WORLD_SIZE"])
    local = int(told.get("LOCAL_RANK", rank)), int(told.get("LOCAL_WORLD_SIZE", size))
    return TorchrunRank(rank, size, *local)


def leave_word(text: str) -> None:
    """Leave why this rank failed where torchrun looks for it, so that it is in its summary.

    The file is that of torch.distributed.elastic's ``record``, in its form; what it would write of
    a Python traceback is of no use to anybody here, and importing it takes seconds.
    """
    place = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if place:
        said = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with open(place, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": text, "extraInfo": said}}, file)


#: Seconds that are left to others; to find out what a worker died of takes some.
_LOST_A_PEER, _ON_ALL_ALIKE = 20.0, 4.0


class Terminated(BaseException):
    """SIGTERM or SIGHUP came; raised so that unfinished files are removed on the way out."""


def patience(error: BaseException, rank: int) -> float:
    """Seconds that a rank waits for another one's word before it says what it knows."""
    if isinstance(error, PeerLostError):
        return _LOST_A_PEER + (_ON_ALL_ALIKE if rank else 0)
    if rank == 0 or isinstance(error, WorkerDiedError):
        return 0.0
    return _ON_ALL_ALIKE


def after_others(ranks: TorchrunRank, error: BaseException, text: str) -> str:
    """What this rank is to say, when nobody else has said anything until now.

    Does not return where torchrun ends this process meanwhile.
    """
    # Nothing is left to be done here that would have to be undone.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(patience(error, ranks.rank))
    said = text if not ranks.rank or f"rank {ranks.rank}" in text else f"rank {ranks.rank}: {text}"
    leave_word(said)
    return said
