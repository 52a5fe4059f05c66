"""A call is known again in a run that is resumed, wherever that begins."""

from __future__ import annotations

from everyframe.runtime.interface import VideoState
from everyframe.runtime.memory.oom_fallback import CallCounter
from everyframe.runtime.run_logs import OomEvent


class Kept:
    """Those of before, and those that come."""

    def __init__(self, *before: OomEvent) -> None:
        self.before = before
        self.new: list[OomEvent] = []

    def known(self) -> tuple[OomEvent, ...]:
        return self.before

    def keep(self, event: OomEvent) -> None:
        self.new.append(event)


def video(seed: int, kept: Kept, step: int = 0) -> VideoState:
    return VideoState(seed, step=step, oom_log=kept)


def test_calls_count_from_the_first_of_their_video() -> None:
    """Where the first video is done already, the stage's own numbers are others."""
    kept = Kept()
    whole, rest = CallCounter(), CallCounter()
    for seed, first in ((1, 1), (2, 4)):
        whole.of(video(seed, kept))
        for number in range(first, first + 3):
            moment = whole.now(number)
            assert moment == OomEvent(seed, 0, number - first)
    rest.of(video(2, kept))
    assert rest.now(1) == OomEvent(2, 0, 0)
    assert rest.now(3) == moment


def test_a_step_is_the_same_wherever_it_is_gone_on_from() -> None:
    kept = Kept()
    whole, rest = CallCounter(), CallCounter()
    one = video(1, kept)
    whole.of(one)
    for number in (1, 2, 3):
        one.step = number - 1
        whole.now(number)
    other = video(1, kept, step=2)
    rest.of(other)
    assert rest.now(3) == whole.now(3) == OomEvent(1, 2, 0)


def test_what_is_over_is_done_at_once_and_what_comes_in_its_call() -> None:
    kept = Kept(OomEvent(1, 0, 1), OomEvent(2, 1), OomEvent(2, 3), OomEvent(2, 3), OomEvent(2, 4))
    moments, one = CallCounter(), video(2, kept, step=2)
    moments.of(one)
    # Another video's, which is done, and an earlier step's: silently; then nothing yet.
    assert [now for _, now in moments.due(3)] == [False, False]
    assert [*moments.due(3)] == []
    one.step = 3
    assert [now for _, now in moments.due(4)] == [True, True]
    one.step = 4
    assert [now for _, now in moments.due(5)] == [True]
    assert [*moments.due(5)] == []


def test_videos_by_turns_are_distinguished() -> None:
    """Encoding goes through the lots of frames, and through all videos in each."""
    kept = Kept(OomEvent(2, 0, 0), OomEvent(1, 0, 1))
    moments, videos = CallCounter(), [video(1, kept), video(2, kept)]
    seen = []
    for number in (1, 2):
        for each in videos:
            moments.of(each)
            seen += [(each.seed, number) for _ in moments.due(number)]
    assert seen == [(2, 1), (1, 2)]


def test_without_a_place_nothing_is_kept() -> None:
    moments = CallCounter()
    moments.of(VideoState(1))
    assert [*moments.due(1)] == []
    moments.keep(moments.now(1))
