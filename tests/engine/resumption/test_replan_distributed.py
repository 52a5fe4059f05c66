"""Runs of several ranks that are interrupted: resumed by as many, the same bits; by others,
the same but for rounding; and several videos of several groups, each kept where it is made.

How a run is interrupted here: `interrupted_ranks`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from everyframe.core.errors import CannotRunError, InputError, OutOfMemoryInfo
from everyframe.core.events import Step
from everyframe.core.request import Request
from everyframe.engine.resumption import replan
from everyframe.engine.resumption.resume import load_run, resume_run
from everyframe.engine.run import stream
from everyframe.media.pixels import to_uint8
from everyframe.parallel.communicator import Communicator
from everyframe.runs.folder import RunFolder, all_runs
from everyframe.runs.run_state import EVERY_STEP, SaveOptions, furthest
from helpers.interrupted_ranks import begun, check_close, copied, resume_there, summarize, videos
from helpers.rank_pool import Group, group_of

#: Two pieces to decode, and latents (6, 3, 5) that the patch of 2 does not divide.
OPTIONS: dict[str, Any] = {
    "prompt": "a red circle", "height": 24, "width": 40, "num_frames": 20, "seed": 5,
    "num_inference_steps": 3, "device": "cpu",
}  # fmt: skip


@pytest.fixture(scope="module")
def ranks() -> Any:
    yield from group_of((2, 3))


def asked(model: str, **options: Any) -> dict[str, Any]:
    return {**OPTIONS, "model": model, **options}


@pytest.fixture(scope="module")
def shared(
    ranks: Group, model: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[int, Any]]:
    """A run of two ranks, let go after 2 of its 3 steps; and the frames of an unbroken one."""
    root = tmp_path_factory.mktemp("runs")
    whole = ranks.run(2, begun, root / "whole", asked(model), 0)
    ranks.run(2, begun, root / "broken", asked(model), 2)
    (kept,) = all_runs(root / "broken")
    return kept.path, videos(whole)


def test_on_as_many_ranks_it_has_the_same_bits(
    ranks: Group, shared: tuple[Path, dict[int, Any]], tmp_path: Path
) -> None:
    path, whole = shared
    found = ranks.run(2, resume_there, copied(path, tmp_path), None)
    np.testing.assert_array_equal(videos(found)[5], whole[5])
    assert [each["steps"] for each in found] == [[(5, 3)]] * 2, (
        "nothing that was done is done again"
    )


def test_on_another_number_of_ranks_only_rounding_differs(
    ranks: Group, shared: tuple[Path, dict[int, Any]], tmp_path: Path
) -> None:
    path, whole = shared
    place = copied(path, tmp_path)
    found = ranks.run(3, resume_there, place, {"num_devices": 3})
    check_close(videos(found), whole)
    assert [each["steps"] for each in found] == [[(5, 3)]] * 3
    (note,) = (note for note in found[0]["notes"] if "begun on" in note)
    assert note.startswith(
        "begun on 2 devices, resumed on 3 devices: sums in another order differ "
    )
    plan = load_run(RunFolder(place)).plan
    assert plan.parallel is not None
    assert len(plan.parallel.ranks) == 3, "interrupted again, it goes on as it was now"


def test_with_too_little_memory_all_ranks_go_on_in_less(
    ranks: Group, shared: tuple[Path, dict[int, Any]], tmp_path: Path
) -> None:
    """And so does whoever resumes it; `test_replan_out_of_memory.py` has a launcher do so."""
    path, whole = shared
    short = OutOfMemoryInfo("denoise", 3, ("denoiser",), "step 3 of denoise", "no memory", rank=1)
    place, again = copied(path, tmp_path), copied(path, tmp_path / "again")
    found = ranks.run(2, resume_there, place, None, (), short)
    check_close(videos(found), whole)
    assert [each["steps"] for each in found] == [[(5, 3)]] * 2
    (done,) = found[0]["repairs"]
    assert "guidance branches run one after the other" in done
    kept = load_run(RunFolder(place))
    assert kept.plan.settings.saving("branches_at_once", 2) == 1
    # Broken off before another state was written.
    (again / "run.json").write_bytes((place / "run.json").read_bytes())
    later = ranks.run(2, resume_there, again, None)
    np.testing.assert_array_equal(videos(later)[5], videos(found)[5])
    assert later[0]["repairs"] == [], "it was reported before"
    for each in (found, later):
        (record,) = each[0]["record"]
        assert [repair["to"] for repair in record["repairs"]] == [done]


@pytest.mark.slow
def test_on_one_device(shared: tuple[Path, dict[int, Any]], tmp_path: Path) -> None:
    path, whole = shared
    events = resume_run(RunFolder(copied(path, tmp_path)), ranks={"num_devices": 1}, cleans=False)
    check_close(summarize(list(events), speaks=True)["frames"], whole)


@pytest.mark.slow
def test_begun_on_one_device(ranks: Group, model: str, tmp_path: Path) -> None:
    whole = summarize(
        list(stream(Request(model=model, **OPTIONS), keep=SaveOptions(None))), speaks=True
    )
    events = stream(Request(model=model, **OPTIONS), keep=SaveOptions(tmp_path, pace=EVERY_STEP))
    for event in events:
        if isinstance(event, Step) and event.stage == "denoise" and event.step == 2:
            break
    events.close()
    (kept,) = all_runs(tmp_path)
    found = ranks.run(2, resume_there, kept.path, {"num_devices": 2})
    check_close(videos(found), whole["frames"])


@pytest.mark.slow
def test_each_group_keeps_its_own_videos(ranks: Group, model: str, tmp_path: Path) -> None:
    """Three ranks make a video each, a chain of two clips; one of them is done elsewhere."""
    options = asked(model, num_videos=3, chain=2, num_inference_steps=2)
    whole = videos(ranks.run(3, begun, tmp_path / "whole", options, 0))
    ranks.run(3, begun, tmp_path / "broken", options, 3)
    (kept,) = all_runs(tmp_path / "broken")
    assert [each.part for each in kept.parts()] == [0, 1, 2]
    other = copied(kept.path, tmp_path)
    found = ranks.run(3, resume_there, kept.path, None, (5,))
    assert [each["steps"] for each in found] == [[], [(6, 2)], [(7, 2)]]
    for seed in (6, 7):
        np.testing.assert_array_equal(videos(found)[seed], whole[seed])
    # Two devices share what three had apart: each video is where it was, whoever kept it.
    places = [furthest(RunFolder(other), [seed]) for seed in (5, 6, 7)]
    assert [place.part for place in places if place is not None] == [0, 1, 2]
    found = ranks.run(2, resume_there, other, {"num_devices": 2, "parallel": "data=2"}, (5,))
    assert [each["steps"] for each in found] == [[(6, 2)], [(7, 2)]]
    for seed in (6, 7):
        np.testing.assert_array_equal(videos(found)[seed], whole[seed])


def test_under_torchrun_rank_0_has_all_videos(ranks: Group, model: str, tmp_path: Path) -> None:
    options = asked(model, num_videos=3, num_inference_steps=1)
    found = ranks.run(3, begun_as_by_torchrun, tmp_path, options)
    assert [sorted(each["frames"]) for each in found] == [[5, 6, 7], [], []]
    apart = videos(ranks.run(3, begun, tmp_path, options, 0))
    for seed, frames in apart.items():
        np.testing.assert_array_equal(to_uint8(found[0]["frames"][seed]), to_uint8(frames))


def begun_as_by_torchrun(
    group: Communicator, root: Path, options: dict[str, Any]
) -> dict[str, Any]:
    return begun(group, root, options, 0, local=(group.rank, group.size))


def test_what_can_not_be_moved(shared: tuple[Path, dict[int, Any]], tmp_path: Path) -> None:
    run = load_run(RunFolder(shared[0]))
    alone = replan.with_devices(run.request, {"num_devices": 1})
    assert alone.num_devices == 1
    assert alone.given().keys() == run.request.given().keys()
    elsewhere = replace(run.plan, device=replace(run.plan.device, name="another"))
    with pytest.raises(CannotRunError, match=r"was on cpu \(another\), and would resume on cpu"):
        replan.replan_for_devices(elsewhere, alone, None, ())
    parts = [
        replace(part, precision=replace(part.precision, compute="bfloat16"))
        for part in run.plan.components
    ]
    with pytest.raises(CannotRunError, match=r"would resume in float32 there, and was begun in bf"):
        replan.replan_for_devices(replace(run.plan, components=tuple(parts)), alone, None, ())
    with pytest.raises(InputError, match="shares must be 2 numbers"):
        replan.replan_for_devices(
            run.plan, replan.with_devices(run.request, {"num_devices": 2, "shares": "1"}), None, ()
        )
