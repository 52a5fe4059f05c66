"""What torchrun has told this process: which rank of how many it is, and where its errors go.

Each rank that torchrun starts is a process that stays alive whatever happens: it starts one worker,
as it would without torchrun, and the workers meet by what is in the environment. Rank 0 shows and
writes, the others say nothing unless they fail. No torch here. Read next: `launch.py`, and
`everyframe.cli.last_words` for who of them speaks when a run fails.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from everyframe.core.errors import InputError


@dataclass(frozen=True)
class Torchrun:
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


def under_torchrun(environment: Mapping[str, str] | None = None) -> Torchrun | None:
    """This process's place among the ranks that torchrun started; None if it didn't start it."""
    told = os.environ if environment is None else environment
    if "TORCHELASTIC_RUN_ID" not in told or "RANK" not in told:
        return None
    rank, size = int(told["RANK"]), int(told["WORLD_SIZE"])
    local = int(told.get("LOCAL_RANK", rank)), int(told.get("LOCAL_WORLD_SIZE", size))
    return Torchrun(rank, size, *local)


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
