"""How a run is divided: chosen by forecast, shown by the plan, or refused with what is possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from everyframe.core.errors import InputError
from everyframe.core.facts import DeviceFacts, MachineFacts
from everyframe.core.parallel_plan import ParallelPlan, parse_parallel, parse_shares
from everyframe.core.plan import Plan, Settings
from everyframe.core.quality import LossyMethod, SamplingMethod
from everyframe.core.request import Request
from everyframe.parallel.token_partition import TokenGrid, TokenPartition
from everyframe.planning.load_balancing import idle_notes
from everyframe.planning.parallelism import StepCost, asked_devices, make_parallel_plan
from everyframe.planning.resolve import prepare
from everyframe.runtime.interface import RankShare, VideoGroup
from everyframe.runtime.rank_shares import grid_share

PROMPT = "a red circle moves to the right"


#: A lossy method, which has no effect where branches are apart.
LOSSY = {"method": LossyMethod(SamplingMethod("taylor1", 10))}


class TwoBranches:
    """What dividing asks of a model: 5 frames of 16 places, and a number of bytes a token moved."""

    title = "a model"
    lead_rank_components = ("text_encoder",)
    sequence_backends: tuple[str, ...] = ("",)
    is_collective = True
    has_independent_branches = False

    def num_branches(self, settings: Settings) -> int:
        return 1 if settings.guidance_scale == 1 else 2

    def rank_part(
        self, settings: Settings, video_group: VideoGroup, rank: int, element_bytes: int
    ) -> RankShare:
        partition = TokenPartition(
            TokenGrid(self.num_branches(settings), 5, 16),
            video_group.weights,
            video_group.num_cfg_groups,
        )
        return grid_share(partition, rank, partition.num_sent(rank) * element_bytes * 100)


class Whole:
    """A model whose videos are made by one device each."""

    title = "another model"


def maybe_divided(model: Any = None, guidance: float = 7.0, **options: Any) -> ParallelPlan | None:
    request = Request(prompt=PROMPT, device="cpu", **options)
    settings = Settings(
        PROMPT, None, 64, 64, 17, 12.0, 30, guidance, 1, request.num_videos,
        method=None if request.method is None else request.method.sampling,
    )  # fmt: skip
    devices = asked_devices(request, MACHINE)
    model = TwoBranches() if model is None else model
    return make_parallel_plan(request, model, settings, devices, lambda _: StepCost(1e9, 4), 1)


def divided(**options: Any) -> ParallelPlan:
    division = maybe_divided(**options)
    assert division is not None
    return division


def plan(**options: Any) -> Plan:
    return prepare(Request(prompt=PROMPT, device="cpu", **options)).plan


def card(index: int, memory: int = 24) -> DeviceFacts:
    return DeviceFacts("a card", "cuda", index, memory << 30, memory << 30, has_fast_bf16=True)


MACHINE = MachineFacts(
    devices=(card(0), card(1), card(2), DeviceFacts("a CPU", "cpu", None, 64 << 30, 64 << 30)),
    num_cores=8,
)


# ---------------------------------------------------------------- which devices


def test_one_device_is_divided_into_nothing() -> None:
    assert maybe_divided() is None
    assert maybe_divided(num_devices=1) is None


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ({"num_devices": 2}, ["cuda:0", "cuda:1"]),
        ({"devices": "0,2"}, ["cuda:0", "cuda:2"]),
        ({"devices": "cuda:2, cuda:1"}, ["cuda:2", "cuda:1"]),
        ({"devices": "cpu,cpu,cpu"}, ["cpu"] * 3),
        ({"num_devices": 5, "device": "cpu"}, ["cpu"] * 5),
        ({"device": "cuda:1"}, ["cuda:1"]),
    ],
)
def test_devices_by_number_and_by_name(asked: dict[str, Any], names: list[str]) -> None:
    found = asked_devices(Request(prompt=PROMPT, **asked), MACHINE)
    assert [device.torch_name for device in found] == names


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"num_devices": 4}, r"this machine has 3 of cuda; give at most 3, or --device cpu"),
        ({"devices": "0,3"}, r"'cuda:3' is not there: this machine has 3 of cuda"),
        ({"devices": "0,0"}, "names a device twice"),
        ({"devices": "0,cpu"}, "must be of one kind"),
        ({"devices": "0,1", "num_devices": 3}, "devices names 2 and num_devices is 3"),
    ],
)
def test_devices_that_are_not_there(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        asked_devices(Request(prompt=PROMPT, **asked), MACHINE)


def test_one_gpu_of_its_kind_is_reported() -> None:
    apple = MachineFacts((DeviceFacts("Apple GPU", "mps", None, 1, 1),), 8)
    apple = replace(apple, devices=(*apple.devices, MACHINE.cpu))
    with pytest.raises(InputError, match="this machine has 1 of mps"):
        asked_devices(Request(prompt=PROMPT, num_devices=2), apple)


# ---------------------------------------------------------------- how


class TwoWays(TwoBranches):
    """Tokens by heads, or in a ring that sends `more` times as much."""

    sequence_backends = ("ulysses", "ring")

    def __init__(self, more: float) -> None:
        self._more = more

    def rank_part(
        self, settings: Settings, video_group: VideoGroup, rank: int, element_bytes: int
    ) -> RankShare:
        part = super().rank_part(settings, video_group, rank, element_bytes)
        more = self._more if video_group.backend == "ring" else 1
        return replace(part, sent_bytes=int(part.sent_bytes * more))


@pytest.mark.parametrize(
    ("more", "parallel", "chosen"),
    [
        (3, "auto", "ulysses"),
        (0.1, "auto", "ring"),
        (0.1, "sequence=3", "ring"),
        (0.1, "ulysses=3", "ulysses"),
        (3, "ring=3", "ring"),
    ],
)
def test_the_way_is_the_faster_one_or_the_one_that_was_asked(
    more: float, parallel: str, chosen: str
) -> None:
    division = divided(model=TwoWays(more), num_devices=3, parallel=parallel)
    assert division.backend == chosen
    assert str(division) == f"data=1, cfg=1, {chosen}=3"


def test_several_videos_are_dealt_out_whole() -> None:
    division = divided(num_videos=6, num_devices=3)
    assert division.videos_per_group == (2, 2, 2)
    assert division.groups == ((0,), (1,), (2,))
    assert [division.videos_of(group) for group in range(3)] == [(0, 1), (2, 3), (4, 5)]
    assert not any(rank.sent_bytes for rank in division.ranks)


def test_one_video_is_shared() -> None:
    division = divided(num_devices=3)
    assert division.groups == ((0, 1, 2),)
    assert sum(rank.token_share for rank in division.ranks) == pytest.approx(1)
    assert sum(rank.attention_share for rank in division.ranks) == pytest.approx(1)
    assert all(rank.sent_bytes for rank in division.ranks)


def test_two_videos_on_three_devices() -> None:
    """Two groups would take as long as one device for one video; together they take two thirds."""
    assert divided(num_videos=2, num_devices=3).videos_per_group == (2,)
    assert divided(num_videos=2, num_devices=3, parallel="data=2").groups == ((0,), (1, 2))


def test_a_sequence_that_is_named_divides_each_of_several_videos() -> None:
    assert divided(num_videos=2, num_devices=2).groups == ((0,), (1,))
    assert divided(num_videos=2, num_devices=2, parallel="sequence=2").groups == ((0, 1),)


def test_guidance_needs_no_exchange_with_a_device_a_branch() -> None:
    for parallel in ("auto", "cfg=2", "sequence=2"):
        division = divided(num_devices=2, parallel=parallel)
        assert [rank.token_share for rank in division.ranks] == [0.5, 0.5]
        assert [rank.sent_bytes for rank in division.ranks] == [0, 0]


def test_branches_apart_on_three_devices() -> None:
    division = divided(num_devices=3, parallel="cfg=2")
    assert sorted(rank.token_share for rank in division.ranks) == [0.25, 0.25, 0.5]
    assert divided(num_devices=3, parallel="cfg=2", shares="1,1,2").ranks[2].token_share == 0.5


class ApartOrNot(TwoBranches):
    """A model whose ranks have a branch each, with so many bytes to send, or share both."""

    has_independent_branches = True

    def __init__(self, apart: int, together: int, ways: tuple[str, ...] = ("ring",)) -> None:
        self._sent, self.sequence_backends = {1: together, 2: apart}, ways

    def rank_part(
        self, settings: Settings, video_group: VideoGroup, rank: int, element_bytes: int
    ) -> RankShare:
        share = video_group.weights[rank] / sum(video_group.weights)
        if not self.sequence_backends and rank >= video_group.num_cfg_groups:
            return RankShare(0.0, 0.0, 0, "nothing is left", works=False)
        share = share if self.sequence_backends else 1 / video_group.num_cfg_groups
        return RankShare(share, share, self._sent[video_group.num_cfg_groups])


@pytest.mark.parametrize(
    ("model", "options", "wanted"),
    [
        (ApartOrNot(10**6, 10**9), {}, "data=1, cfg=2, ring=2"),
        (ApartOrNot(10**9, 10**6), {}, "data=1, cfg=1, ring=3"),
        (ApartOrNot(10**6, 10**9), {"parallel": "cfg=1"}, "data=1, cfg=1, ring=3"),
        (ApartOrNot(10**6, 10**9), {"parallel": "sequence=3"}, "data=1, cfg=1, ring=3"),
        (ApartOrNot(10**6, 10**9), {"guidance": 1}, "data=1, cfg=1, ring=3"),
        (ApartOrNot(10**6, 0, ()), {}, "data=1, cfg=2, sequence=1"),
        (ApartOrNot(10**6, 0, ()), {"num_videos": 3}, "data=3, cfg=1, sequence=1"),
        (ApartOrNot(10**6, 10**9), LOSSY, "data=1, cfg=1, ring=3"),
        (ApartOrNot(10**6, 10**9), {**LOSSY, "parallel": "cfg=2"}, "data=1, cfg=2, ring=2"),
        (ApartOrNot(10**6, 0, ()), LOSSY, "data=1, cfg=2, sequence=1"),
    ],
)
def test_branches_are_apart_where_that_is_faster(
    model: Any, options: dict[str, Any], wanted: str
) -> None:
    """Where ranks with other branches call the denoiser apart; by bytes, and by who has work."""
    division = divided(model=model, num_devices=3, **options)
    assert str(division) == wanted
    if not model.sequence_backends and division.cfg_degree == 2:
        assert division.active_groups == ((0, 1),)
        assert division.groups == ((0, 1, 2),)


def test_a_model_whose_tokens_nobody_deals_out_says_so() -> None:
    model = ApartOrNot(1, 1, ())
    message = "no token split of a model is known; it can be cfg=2"
    with pytest.raises(InputError, match=message):
        divided(model=model, num_devices=3, parallel="sequence=3")


def test_shares_are_followed() -> None:
    division = divided(num_devices=2, shares="24,8")
    assert [rank.token_share for rank in division.ranks] == [0.75, 0.25]
    assert [rank.attention_share for rank in division.ranks] == [0.8, 0.2]  # 10 rows: 7.5 and 2.5


@pytest.mark.parametrize("model", [TwoBranches(), Whole()])
def test_a_device_without_a_share_has_no_videos_of_its_own(model: Any) -> None:
    given = {"model": model, "num_devices": 3, "num_videos": 4, "shares": "1,0,2"}
    division = divided(**given)
    assert sum(division.videos_per_group) == 4
    assert all(any(division.ranks[r].speed for r in group) for group in division.groups)
    with pytest.raises(InputError, match="data=3 wants 3 devices with a share above 0"):
        divided(**given, parallel="data=3")


def test_idle_ranks_are_reported() -> None:
    """10 rows (5 frames of two branches), 32 columns; and a model that is not shared at all."""
    idle = [rank.idle_reason for rank in divided(num_devices=34).ranks]
    assert not any(idle[:10])
    assert all("waits during attention in space" in why for why in idle[10:32])
    assert all("it decodes only" in why for why in idle[32:])
    idle = [rank.idle_reason for rank in divided(model=Whole(), num_devices=3, num_videos=2).ranks]
    assert idle == ["", "", "another model makes each video on one device"]


@pytest.mark.parametrize(
    ("without", "message"),
    [((3,), "rank 3"), ((2, 3), "ranks 2, 3"), ((1, 3, 4), "ranks 1, 3, 4"),
     (range(1, 5), "ranks 1 to 4")],
)  # fmt: skip
def test_ranks_without_work_are_reported_together(without: Sequence[int], message: str) -> None:
    ranks = [
        SimpleNamespace(idle_reason="too many" if rank in without else "") for rank in range(5)
    ]
    division: Any = SimpleNamespace(ranks=ranks)
    assert idle_notes(division) == (f"{message}: too many",)


def test_the_plan_is_of_the_rank_with_the_most_to_do() -> None:
    """Less memory and work than one device; on CPUs its memory and cores are shared by all."""

    def work(found: Plan) -> tuple[int, float]:
        stage = next(each for each in found.stages if each.name == "denoise")
        return stage.working_bytes, stage.operations

    whole, shared = plan(), plan(num_devices=12)
    # One of 10 rows and 3 of 32 columns; keys and values of the text, which this small model
    # spends much on, are not divided.
    assert work(shared)[0] < 0.5 * work(whole)[0]
    assert 0.1 * work(whole)[1] <= work(shared)[1] < 0.2 * work(whole)[1]
    assert shared.parallel is not None
    assert shared.num_threads == max(1, whole.num_threads // 12)
    assert any(note.startswith("ranks 10, 11: there are fewer") for note in shared.notes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parallel": "cfg=2,sequence=2", "num_devices": 3},
         r"is for 4 devices, got 3; for 3 it can be auto, sequence=3 or cfg=2, which splits any"),
        ({"parallel": "sequence=2"}, r"is for 2 devices, got 1; for 1 it can be auto, sequence=1"),
        ({"parallel": "cfg=3", "num_devices": 3}, r"cfg=3: it has 2 branches; sequence=3"),
        ({"parallel": "cfg=2", "num_devices": 2, "guidance": 1}, "it has one branch; seq"),
        ({"parallel": "data=2", "num_devices": 2}, "at least 2 videos, got --num-videos 1"),
        ({"parallel": "cfg=2"}, "wants 2 devices or more, got 1"),
        ({"model": Whole(), "parallel": "sequence=2", "num_devices": 2},
         "another model makes each video on one device: parallel can be data=N"),
        ({"parallel": "ring=2", "num_devices": 2},
         "a model does not exchange its tokens by ring; it can be sequence=2"),
        ({"parallel": "cfg=2,ring=2", "num_devices": 4, "model": TwoBranches()},
         "parallel cfg=2,ring=2: a model does not"),
        ({"shares": "1,2"}, "no effect on one device"),
        ({"shares": "1,2", "num_devices": 3}, "must be 3 numbers"),
    ],
)  # fmt: skip
def test_what_can_not_be_had_says_what_can(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        divided(**options)


@pytest.mark.parametrize(
    "text", ["", "cgf=2", "cfg", "cfg=0", "cfg=two", "cfg=2;data=2", "cfg=1,cfg=2"]
)
def test_a_bad_parallel_is_refused_before_anything_else(text: str) -> None:
    with pytest.raises(InputError, match=r"parallel (must be auto|names cfg twice)"):
        Request(prompt=PROMPT, parallel=text)


def test_two_ways_to_do_the_same_are_one_too_many() -> None:
    with pytest.raises(InputError, match="names sequence and ring, which are ways to do the same"):
        parse_parallel("sequence=2,ring=2")


def test_a_misspelt_way_gets_a_guess() -> None:
    with pytest.raises(InputError, match="did you mean 'sequence'"):
        parse_parallel("sequenze=2")


@pytest.mark.parametrize("text", ["", "1", "1,x", "1,-1", "0,0", "1,inf", "1,nan"])
def test_bad_shares(text: str) -> None:
    with pytest.raises(InputError, match="shares must be 2 numbers"):
        parse_shares(text, 2)


def test_shares_beyond_sense() -> None:
    assert parse_shares("1,1000000,0", 3) == (1, 1_000_000, 0)
    with pytest.raises(InputError, match=r"up to 1,000,000 times .*has the share 0"):
        parse_shares("1e-300,1e300", 2)
