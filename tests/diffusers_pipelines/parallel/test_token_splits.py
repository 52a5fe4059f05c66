"""What a rank of a pipeline's run is planned to do: branches first, and of them tokens."""

from __future__ import annotations

import pytest

from everyframe.diffusers_pipelines.parallel.cfg_detection import CfgBranches
from everyframe.diffusers_pipelines.parallel.token_splits import rank_share
from everyframe.runtime.interface import RankShare, VideoGroup

TOGETHER = CfgBranches(2, is_together=True, answer=((2, 10),), num_calls=1)
IN_TURN = CfgBranches(2, answer=((1, 10),), num_calls=2)
ONE = CfgBranches(why="it asks its denoiser about one branch", answer=((1, 10),))


def tokens(video_group: VideoGroup, rank: int, batch: int) -> RankShare:
    """By the speeds of the group; 100 bytes a sample leave each that is not alone."""
    share = video_group.weights[rank] / sum(video_group.weights)
    return RankShare(share, share, 100 * batch * (len(video_group.weights) > 1))


def parts(branches: CfgBranches, size: int, groups: int, *, cuts: bool = True) -> list[RankShare]:
    video_group = VideoGroup((1.0,) * size, groups)
    return [
        rank_share(branches, tokens if cuts else None, video_group, rank, "it")
        for rank in range(size)
    ]


@pytest.mark.parametrize("branches", [TOGETHER, IN_TURN])
@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("groups", [1, 2])
def test_shares_are_of_the_whole(branches: CfgBranches, size: int, groups: int) -> None:
    found = parts(branches, size, groups)
    assert sum(part.tokens for part in found) == pytest.approx(1)
    assert all(part.works and part.sent_bytes for part in found)


def test_two_ranks_with_a_branch_each_send_their_answer_alone() -> None:
    """Ten numbers of four bytes, once a step."""
    for branches in (TOGETHER, IN_TURN):
        assert [part.sent_bytes for part in parts(branches, 2, 2)] == [40, 40]


def test_of_three_ranks_one_has_a_branch() -> None:
    """It sends its answer to both of the others; each of them sends half of theirs to it."""
    for branches in (TOGETHER, IN_TURN):
        found = parts(branches, 3, 2)
        assert [part.tokens for part in found] == [0.5, 0.25, 0.25]
        assert [part.sent_bytes for part in found] == [80, 120, 120]


def test_tokens_of_both_branches_are_exchanged_by_all() -> None:
    assert [part.sent_bytes for part in parts(TOGETHER, 2, 1)] == [200, 200]
    assert [part.sent_bytes for part in parts(IN_TURN, 2, 1)] == [200, 200]


def test_who_has_no_part_of_a_branch_that_can_not_be_cut_does_not_work() -> None:
    found = parts(TOGETHER, 3, 2, cuts=False)
    assert [(part.tokens, part.works) for part in found] == [
        (0.5, True), (0.5, True), (0.0, False)
    ]  # fmt: skip
    assert found[2].idle == "it makes each video on 2 devices, a branch each"
    assert [part.sent_bytes for part in found] == [40, 40, 0]
    found = parts(ONE, 2, 1, cuts=False)
    assert found[1].idle == f"it makes each video on one device: {ONE.why}"
    found = parts(TOGETHER, 2, 1, cuts=False)
    assert "cfg=2 has its branches of guidance apart" in found[1].idle
