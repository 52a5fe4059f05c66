"""Who speaks when a run fails that torchrun has spread over several ranks: one of them, once.

A wrong option fails on all ranks alike, and rank 0 says it. A worker that dies is known for certain
by the process that started it; all others have only lost a peer. So each rank leaves the word to
those who may know better, and when one has spoken and ended, torchrun ends the rest. What is said
is left for torchrun's own summary too. Read next: `main.py`; `everyframe.engine.torchrun`.
"""

from __future__ import annotations

import signal
import time

from everyframe.core.errors import PeerLostError, WorkerDiedError
from everyframe.engine.torchrun import Torchrun, leave_word

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


def after_others(ranks: Torchrun, error: BaseException, text: str) -> str:
    """What this rank is to say, when nobody else has said anything until now.

    Does not return where torchrun ends this process meanwhile.
    """
    # Nothing is left to be done here that would have to be undone.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(patience(error, ranks.rank))
    said = text if not ranks.rank or f"rank {ranks.rank}" in text else f"rank {ranks.rank}: {text}"
    leave_word(said)
    return said
