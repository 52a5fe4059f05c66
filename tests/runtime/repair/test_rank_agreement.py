"""What ranks with the same results agree on; whole runs are in `engine/test_distributed.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from everyframe.numerics.fault import Cause, Fault
from everyframe.numerics.fault_locator import Located
from everyframe.numerics.tensor_stats import Range
from everyframe.parallel.communicator import FakeCommunicator
from everyframe.runtime.repair.rank_agreement import RankAgreement

SMALL, INFINITE = Range(-1.0, 1.0), Range(-1.0, float("inf"))


class Among(FakeCommunicator):
    """The first of three ranks; the others send `as_sent`."""

    def __init__(self, as_sent: Sequence[Any]) -> None:
        super().__init__(0, (1.0,) * 3)
        self._sent = as_sent

    def all_gather_object(self, value: Any, what: str) -> list[Any]:
        return [value, *self._sent]

    def gather(self, x: Tensor, sizes: Sequence[int], what: str) -> Tensor:
        return torch.cat([x, *map(torch.tensor, self._sent)])


def located(place: str, cause: Cause = "range") -> Located:
    return Located((Fault("net", place, "linear", cause, torch.bfloat16, SMALL, INFINITE, None),))


def as_sent(by: Located) -> Any:
    """What a rank sends of it."""
    sent: list[Any] = []

    class Sends(Among):
        def all_gather_object(self, value: Any, what: str) -> list[Any]:
            sent.append(value)
            return [value]

    RankAgreement(Sends(())).located(by)
    return sent[0]


NOTHING = Located(())


def test_all_go_by_the_first_rank_that_found_a_fault() -> None:
    ranks = RankAgreement(Among([as_sent(located("a")), as_sent(located("b"))]))
    assert ranks.located(NOTHING) == located("a")
    assert ranks.culprit == ""
    own = located("own")
    assert ranks.located(own) is own


def test_a_rank_that_alone_has_it_is_named() -> None:
    ranks = RankAgreement(Among([as_sent(NOTHING), as_sent(located("b"))]))
    assert ranks.located(NOTHING) == located("b")
    assert ranks.culprit == ", on rank 2 alone"
    again = RankAgreement(Among([as_sent(NOTHING)] * 2)).located(NOTHING)
    assert again is NOTHING


def test_weights_that_are_not_finite_come_before_what_they_made() -> None:
    ranks = RankAgreement(Among([as_sent(located("b")), as_sent(located("c.weight", "weights"))]))
    assert ranks.located(located("a")) == located("c.weight", "weights")


def test_an_error_of_another_rank_is_one_here() -> None:
    other = Located((), error=RuntimeError("two dtypes met"))
    found = RankAgreement(Among([as_sent(NOTHING), as_sent(other)])).located(NOTHING)
    assert str(found.error) == "on rank 2: RuntimeError: two dtypes met"


@pytest.mark.parametrize("others", [[[True], [True]], [[True], [False]]])
def test_a_result_is_finite_where_it_is_on_all_ranks(others: list[list[bool]]) -> None:
    ranks = RankAgreement(Among(others))
    assert ranks.are_finite(SMALL) == all(each[0] for each in others)
    assert not ranks.are_finite(INFINITE)
    assert RankAgreement().are_finite(SMALL)
