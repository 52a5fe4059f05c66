"""Run independent pieces of work on several ranks; the lead rank gets the results in order.

The pieces never depend on the number of ranks, and one rank computes each piece, so results equal
those of one rank bit for bit. A rank starts its next piece while the lead rank still fetches the
previous one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from everyframe.parallel.communicator import Communicator
from everyframe.parallel.pending import PendingSend


def run_in_order(
    group: Communicator,
    owner: Iterable[int],
    compute: Callable[[int], tuple[Tensor, Any]],
    what: str,
) -> Iterator[tuple[Tensor, Any]]:
    """On the lead rank: yield each piece's tensor (on the CPU) and plain data, in order.

    Other ranks yield nothing. ``compute(number)`` runs for this rank's pieces only, as soon as
    `owner` has named their rank.
    """
    sending: PendingSend | None = None
    for number, rank in enumerate(owner):
        if rank == group.rank:
            result, data = compute(number)
            if group.is_lead:
                yield result, data
            else:
                if sending is not None:
                    sending.wait()  # one waits to be fetched while the next is made
                sending = group.send([result], data, 0, what)
        elif group.is_lead:
            tensors, data = group.receive(rank, what)
            yield tensors[0], data
    if sending is not None:
        sending.wait()
