"""Runs of several ranks that are broken off: gone on with by as many, the same bits; by others,
the same but for rounding; and several videos of several groups, each kept where it is made.

A run is broken off by letting go of its events on every rank, which leaves the folder as a kill
does: the state is written at every step, and nothing is written on the way out.
"""

from __future__ import annotations

import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from everyframe.core.errors import CannotRunError, InputError
from everyframe.core.events import Event, Frames, Note, Step
from everyframe.core.request import Request
from everyframe.engine import moving
from everyframe.engine.ranks import Join
from everyframe.engine.resuming import go_on, read_run
from everyframe.engine.run import stream
from everyframe.media.pixels import to_uint8
from everyframe.parallel.team import Team
from everyframe.runs.folder import RunFolder, all_runs
from everyframe.runs.keeper import EVERY_STEP, Keep, furthest
from ranks import Group, group_of

#: Two pieces to decode, and latents (6, 3, 5) that the patch of 2 does not divide.
OPTIONS: dict[str, Any] = {
    "prompt": "a red circle", "height": 24, "width": 40, "num_frames": 20, "seed": 5,
    "num_inference_steps": 3, "device": "cpu",
}  # fmt: skip
#: float32, relative to the largest value: what another number of ranks may change.
ROUNDING = 1e-5


@pytest.fixture(scope="module")
def ranks() -> Any:
    yield from group_of((2, 3))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.opensora_1_2(tmp_path_factory.mktemp("models") / "tiny-1.2"))


def told(events: list[Event], *, speaks: bool) -> dict[str, Any]:
    """What came of a rank's events: frames by seed, steps that were done, notes."""
    frames: dict[int, list[Any]] = {}
    for event in events:
        if isinstance(event, Frames) and speaks:
            frames.setdefault(event.seed, []).append(event.frames)
    return {
        "frames": {seed: np.concatenate(each) for seed, each in frames.items()},
        "steps": [(e.seed, e.step) for e in events if isinstance(e, Step) and e.stage == "denoise"],
        "notes": [event.text for event in events if isinstance(event, Note)],
    }


def begun(
    team: Team, root: Path, options: dict[str, Any], steps: int, local: Any = None
) -> dict[str, Any]:
    """One rank's run, let go after so many steps of denoising; 0 lets it come to its end."""
    request = Request(**{**OPTIONS, "num_devices": team.size, **options})
    keep = Keep(root if team.rank == 0 else None, pace=EVERY_STEP)
    events: list[Event] = []
    join = Join(team.rank, lambda _: team, local)
    with closing(stream(request, keep=keep, num_threads=1, join=join)) as coming:
        for event in coming:
            events.append(event)
            done = sum(isinstance(e, Step) and e.stage == "denoise" for e in events)
            if steps and done == steps:
                break
    return told(events, speaks=local is None or team.rank == 0)


def gone_on(
    team: Team, path: Path, devices: dict[str, Any] | None, skip: tuple[int, ...] = ()
) -> dict[str, Any]:
    """One rank goes on with the run there."""
    join = Join(team.rank, lambda _: team)
    pace = EVERY_STEP
    events = go_on(RunFolder(path), skip=skip, join=join, ranks=devices, pace=pace, cleans=False)
    return told(list(events), speaks=True)


def videos(found: list[dict[str, Any]]) -> dict[int, Any]:
    """The videos of the first rank that has each; all ranks of a group decode for it."""
    made: dict[int, Any] = {}
    for each in found:
        made = {**each["frames"], **made}
    return made


def check_close(found: dict[int, Any], wanted: dict[int, Any]) -> None:
    assert found.keys() == wanted.keys()
    for seed, frames in wanted.items():
        assert np.abs(found[seed] - frames).max() <= ROUNDING * np.abs(frames).max()


@pytest.fixture(scope="module")
def shared(
    ranks: Group, model: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[int, Any]]:
    """A run of two ranks, let go after 2 of its 3 steps; and the frames of an unbroken one."""
    root = tmp_path_factory.mktemp("runs")
    whole = ranks.run(2, begun, root / "whole", {"model": model}, 0)
    ranks.run(2, begun, root / "broken", {"model": model}, 2)
    (kept,) = all_runs(root / "broken")
    return kept.path, videos(whole)


def copied(path: Path, to: Path) -> Path:
    """A copy of a run, called as it is."""
    return Path(shutil.copytree(path, to / path.name))


def test_on_as_many_ranks_it_has_the_same_bits(
    ranks: Group, shared: tuple[Path, dict[int, Any]], tmp_path: Path
) -> None:
    path, whole = shared
    found = ranks.run(2, gone_on, copied(path, tmp_path), None)
    np.testing.assert_array_equal(videos(found)[5], whole[5])
    assert [each["steps"] for each in found] == [[(5, 3)]] * 2, (
        "nothing that was done is done again"
    )


def test_on_another_number_of_ranks_only_rounding_differs(
    ranks: Group, shared: tuple[Path, dict[int, Any]], tmp_path: Path
) -> None:
    path, whole = shared
    place = copied(path, tmp_path)
    found = ranks.run(3, gone_on, place, {"num_devices": 3})
    check_close(videos(found), whole)
    assert [each["steps"] for each in found] == [[(5, 3)]] * 3
    (said,) = (note for note in found[0]["notes"] if "begun on" in note)
    assert said.startswith(
        "begun on 2 devices, goes on on 3 devices: what is summed in another ord"
    )
    plan = read_run(RunFolder(place)).plan
    assert plan.division is not None
    assert len(plan.division.ranks) == 3, "broken off again, it goes on as it was now"


@pytest.mark.slow
def test_on_one_device(shared: tuple[Path, dict[int, Any]], tmp_path: Path) -> None:
    path, whole = shared
    events = go_on(RunFolder(copied(path, tmp_path)), ranks={"num_devices": 1}, cleans=False)
    check_close(told(list(events), speaks=True)["frames"], whole)


@pytest.mark.slow
def test_begun_on_one_device(ranks: Group, model: str, tmp_path: Path) -> None:
    whole = told(list(stream(Request(model=model, **OPTIONS), keep=Keep(None))), speaks=True)
    events = stream(Request(model=model, **OPTIONS), keep=Keep(tmp_path, pace=EVERY_STEP))
    for event in events:
        if isinstance(event, Step) and event.stage == "denoise" and event.step == 2:
            break
    events.close()
    (kept,) = all_runs(tmp_path)
    found = ranks.run(2, gone_on, kept.path, {"num_devices": 2})
    check_close(videos(found), whole["frames"])


def test_each_group_keeps_its_own_videos(ranks: Group, model: str, tmp_path: Path) -> None:
    """Three ranks make a video each, a chain of two clips; one of them is done elsewhere."""
    options = {"model": model, "num_videos": 3, "chain": 2, "num_inference_steps": 2}
    whole = videos(ranks.run(3, begun, tmp_path / "whole", options, 0))
    ranks.run(3, begun, tmp_path / "broken", options, 3)
    (kept,) = all_runs(tmp_path / "broken")
    assert [each.part for each in kept.parts()] == [0, 1, 2]
    other = copied(kept.path, tmp_path)
    found = ranks.run(3, gone_on, kept.path, None, (5,))
    assert [each["steps"] for each in found] == [[], [(6, 2)], [(7, 2)]]
    for seed in (6, 7):
        np.testing.assert_array_equal(videos(found)[seed], whole[seed])
    # Two devices share what three had apart: each video is where it was, whoever kept it.
    places = [furthest(RunFolder(other), [seed]) for seed in (5, 6, 7)]
    assert [place.part for place in places if place is not None] == [0, 1, 2]
    found = ranks.run(2, gone_on, other, {"num_devices": 2, "parallel": "data=2"}, (5,))
    assert [each["steps"] for each in found] == [[(6, 2)], [(7, 2)]]
    for seed in (6, 7):
        np.testing.assert_array_equal(videos(found)[seed], whole[seed])


def test_under_torchrun_rank_0_has_all_videos(ranks: Group, model: str, tmp_path: Path) -> None:
    options = {"model": model, "num_videos": 3, "num_inference_steps": 1}
    found = ranks.run(3, begun_as_by_torchrun, tmp_path, options)
    assert [sorted(each["frames"]) for each in found] == [[5, 6, 7], [], []]
    apart = videos(ranks.run(3, begun, tmp_path, options, 0))
    for seed, frames in apart.items():
        np.testing.assert_array_equal(to_uint8(found[0]["frames"][seed]), to_uint8(frames))


def begun_as_by_torchrun(team: Team, root: Path, options: dict[str, Any]) -> dict[str, Any]:
    return begun(team, root, options, 0, local=(team.rank, team.size))


def test_what_can_not_be_moved(shared: tuple[Path, dict[int, Any]], tmp_path: Path) -> None:
    run = read_run(RunFolder(shared[0]))
    asked = moving.asked_anew(run.request, {"num_devices": 1})
    assert asked.num_devices == 1
    assert asked.given().keys() == run.request.given().keys()
    elsewhere = replace(run.plan, device=replace(run.plan.device, name="another"))
    with pytest.raises(CannotRunError, match=r"was on cpu \(another\), and would go on on cpu"):
        moving.divided_anew(elsewhere, asked, None, ())
    parts = [
        replace(part, precision=replace(part.precision, compute="bfloat16"))
        for part in run.plan.components
    ]
    with pytest.raises(CannotRunError, match=r"would go on in float32 there, and was begun in bfl"):
        moving.divided_anew(replace(run.plan, components=tuple(parts)), asked, None, ())
    with pytest.raises(InputError, match="shares must be 2 numbers"):
        moving.divided_anew(
            run.plan, moving.asked_anew(run.request, {"num_devices": 2, "shares": "1"}), None, ()
        )
