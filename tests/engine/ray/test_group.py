"""A group of ranks without a cluster: the errors about a rank that is gone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from everyframe.core.errors import InputError, NumericsError
from everyframe.engine.ray import group as ray_group
from everyframe.engine.ray.group import (
    HeadLostError,
    RankFailedError,
    RankLostError,
    RayGroup,
    _reason,
    placed_group,
)
from everyframe.engine.ray.rank_layout import RankPlace
from everyframe.engine.workers.error_transfer import error_data

_START = (
    "The actor died because of an error raised in its creation task, "
    "\x1b[36mray::RayRank.__init__()\x1b[39m (pid=1, ip=10.0.0.1, repr=<RayRank>)\n"
    '  File "/x/rank.py", line 7, in __init__\n'
    "OSError: [Errno 28] No space left on device: '/tmp/everyframe-ray-x/lock'"
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (_START, "OSError: [Errno 28] No space left on device: '/tmp/everyframe-ray-x/lock'"),
        (
            "The actor died unexpectedly before finishing this task.\n\tclass_name: RayRank\n",
            "The actor died unexpectedly before finishing this task",
        ),
        ("", "RuntimeError"),
    ],
)
def test_the_reason_of_a_loss_is_one_line_without_colours(text: str, reason: str) -> None:
    assert _reason(RuntimeError(text)) == reason


Message = tuple[str, Any]


def failure(error: Exception, *, keeps: bool = True) -> dict[str, Any]:
    return {"error": error_data(error), "keeps": keeps}


def explain(
    monkeypatch: pytest.MonkeyPatch, rank: int, value: Any, others: dict[int, list[Message]]
) -> Exception:
    """What explains the failure of `rank`, where others say that next."""
    by_rank = {each: object() for each in (rank, *others)}
    streams = {stream: each for each, stream in by_rank.items()}
    group = RayGroup([])
    group._places = [RankPlace("n", f"10.0.0.{at}", f"host{at}", 1) for at in range(3)]
    monkeypatch.setattr(ray_group, "_ready", list)
    monkeypatch.setattr(group, "_next", lambda stream, other, _: others[other].pop(0))
    ranks: Any = [SimpleNamespace(place=at) for at in range(3)]
    return group._explain(streams, by_rank[rank], value, ranks)


@pytest.mark.parametrize("keeps", [False, True])
def test_the_first_rank_says_whether_a_run_with_a_fault_is_of_use(
    monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    """Another rank finds the same values, and does not know."""
    first = ("error", failure(NumericsError("of rank 0"), keeps=keeps))
    found = explain(
        monkeypatch, 1, failure(NumericsError("of rank 1")), {0: [("event", None), first]}
    )
    assert isinstance(found, RankFailedError)
    assert (str(found.error), found.keeps) == ("of rank 0", keeps)


def test_another_error_of_the_first_rank_explains_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = failure(NumericsError("of rank 1"))
    found = explain(monkeypatch, 1, fault, {0: [("error", failure(InputError("other")))]})
    assert isinstance(found, RankFailedError)
    assert str(found.error) == "of rank 1"


def test_a_lost_peer_is_explained_by_whoever_knows_more(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = {"error": {"class": "PeerLostError", "text": "lost a peer"}, "keeps": True}
    messages: dict[int, list[Message]] = {
        1: [("error", lost)],
        2: [("error", failure(InputError("no")))],
    }
    found = explain(monkeypatch, 0, lost, messages)
    assert isinstance(found, RankFailedError)
    assert str(found.error) == "no"
    assert isinstance(explain(monkeypatch, 0, lost, {1: [("error", lost)]}), RankLostError)


@pytest.mark.parametrize(
    ("text", "has_node"),
    [
        ("there is no folder or file /models/a", True),
        ("'/models/a/b.png' is no picture", True),
        ("ranks 0 and 1 do not have the same plan", True),
        ("height must be a multiple of 16, got 500 (1/16)", False),
        ("no model org/name", False),
    ],
)
def test_an_error_about_files_names_the_node_that_has_them(
    monkeypatch: pytest.MonkeyPatch, text: str, has_node: bool
) -> None:
    """The same path may be fine on the machine of whoever reads it."""
    found = explain(monkeypatch, 1, failure(InputError(text)), {0: []})
    assert isinstance(found, RankFailedError)
    assert isinstance(found.error, InputError)
    node = " (rank 1 on the node host1, 10.0.0.1)" if has_node else ""
    assert str(found.error) == text + node


def headless(monkeypatch: pytest.MonkeyPatch, answers: list[bool]) -> None:
    """The head answers so, and for the last answer's time is over."""
    monkeypatch.setattr(ray_group, "has_head", lambda: answers.pop(0))
    monkeypatch.setattr(ray_group, "_HEAD", -1.0)


def test_a_group_without_its_head_goes_on_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would end this process; a head that is back begins the time anew."""
    headless(monkeypatch, [True, False, True, False, False])
    group = RayGroup([])
    for _ in range(4):
        group._check_head()
    with pytest.raises(HeadLostError, match="the head of the Ray cluster does not answer"):
        group._check_head()


def test_no_group_is_asked_for_where_there_is_no_head(monkeypatch: pytest.MonkeyPatch) -> None:
    headless(monkeypatch, [False, False])
    monkeypatch.setattr(ray_group.time, "sleep", lambda seconds: None)
    with pytest.raises(HeadLostError), placed_group(1, "CPU", 1.0):
        raise AssertionError("it was placed")
