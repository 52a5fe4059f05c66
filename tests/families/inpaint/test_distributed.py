"""Inpainting among several ranks: batches of frames dealt out whole, the bits of one device.

The ranks of this module meet once and then make every run in the same processes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import everyframe
from everyframe.core.errors import InputError
from everyframe.core.events import ComponentLoaded, Event, FramesDecoded, Step, VideoDone
from everyframe.core.request import Request
from everyframe.engine.distributed import Rendezvous
from everyframe.engine.resumption.resume import resume_run
from everyframe.engine.run import stream
from everyframe.families.inpaint.denoiser import Denoiser
from everyframe.parallel.communicator import Communicator
from everyframe.runs.folder import all_runs
from everyframe.runs.run_state import EVERY_STEP, SaveOptions
from everyframe.samplers import noise
from helpers.rank_pool import Group, group_of
from helpers.slow_rows import slow_unless
from helpers.tiny_checkpoints import inpaint as tiny_inpaint

STEPS = 2


@pytest.fixture(scope="module")
def ranks() -> Any:
    yield from group_of((2, 3))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A UNet that takes no mask: what is known is put back at every step, with noise."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    made = tiny_inpaint.inpaint(folder, channels=4)
    tiny_inpaint.with_scheduler(made, "UniPCMultistepScheduler")  # it remembers steps before
    return str(made)


def request(model: str, **options: Any) -> Request:
    """Seven frames, of which the third has nothing to be repainted: three batches of two."""
    grain = np.random.default_rng(0).integers(0, 255, (7, 16, 24, 3), dtype=np.uint8)
    masks = np.zeros((7, 16, 24), np.uint8)
    for number in range(7):
        masks[number, 2:12, number : number + 9] = 255 * (number != 2)
    given = {"source": grain, "mask": masks, "control": "canny", "num_inference_steps": STEPS}
    given |= {"seed": 7, "device": "cpu", "strength": 1.0, "frames_at_once": 2}
    return Request(prompt="a red ball", model=model, **{**given, **options})


def run(
    group: Communicator | None,
    model: str,
    options: dict[str, Any],
    fault: Any = None,
    root: str | None = None,
    until: int | None = None,
) -> dict[str, Any]:
    """One rank's run, or that of a process without ranks; it ends at step `until` of denoising."""
    undo = fault(group) if fault is not None else None
    calls: list[int] = []
    answered = Denoiser.__call__

    def counted(self: Any, x: Any, t: Any) -> Any:
        if not x.is_meta:  # a dry run
            calls.append(len(x))
        return answered(self, x, t)

    Denoiser.__call__ = counted  # type: ignore[method-assign]
    try:
        if group is None:
            asked, join = request(model, **options), None
        else:
            asked = request(model, **{"num_devices": group.size, **options})
            join = Rendezvous(group.rank, lambda _: group)
        leads = group is None or group.is_lead
        keep = SaveOptions(Path(root) if root and leads else None, cleans=False, pace=EVERY_STEP)
        events: list[Event] = []
        for event in stream(asked, keep=keep, num_threads=1, join=join):
            events.append(event)
            if (
                until
                and isinstance(event, Step)
                and (event.stage, event.step) == ("denoise", until)
            ):
                break
    finally:
        Denoiser.__call__ = answered  # type: ignore[method-assign]
        if undo is not None:
            undo()
    made = [event.frames for event in events if isinstance(event, FramesDecoded)]
    steps = [event.step for event in events if isinstance(event, Step) and event.stage == "denoise"]
    return {
        "frames": np.concatenate(made) if made else None,
        "calls": calls,
        "steps": steps,
        "loaded": [event.component for event in events if isinstance(event, ComponentLoaded)],
        "done": [event.seed for event in events if isinstance(event, VideoDone)],
    }


@pytest.mark.parametrize("size", slow_unless([2], [2, 3]))
def test_one_video_on_several_ranks_has_the_bits_of_one(
    ranks: Group, model: str, size: int
) -> None:
    found, wanted = ranks.run(size, run, model, {}), run(None, model, {})
    assert np.array_equal(found[0]["frames"], wanted["frames"])
    assert all(each["frames"] is None for each in found[1:])
    # Three batches of two frames: what one device does is dealt out, and nothing is done twice.
    assert wanted["calls"] == [2] * 3 * STEPS
    rounds = {2: [2, 1], 3: [1, 1, 1]}[size]
    assert [len(each["calls"]) for each in found] == [STEPS * number for number in rounds]
    assert found[0]["steps"][-1] == wanted["steps"][-1] == 3 * STEPS
    assert "text_encoder" in found[0]["loaded"]
    assert not any("text_encoder" in each["loaded"] for each in found[1:])


@pytest.mark.slow
def test_more_ranks_than_batches_and_a_share_of_nothing(ranks: Group, model: str) -> None:
    wanted = run(None, model, {"frames_at_once": 4})
    found = ranks.run(3, run, model, {"frames_at_once": 4})
    assert np.array_equal(found[0]["frames"], wanted["frames"])
    assert [len(each["calls"]) for each in found] == [STEPS, STEPS, 0]
    found = ranks.run(3, run, model, {"frames_at_once": 4, "shares": "1,0,1"})
    assert np.array_equal(found[0]["frames"], wanted["frames"])
    assert [len(each["calls"]) for each in found] == [STEPS, 0, STEPS]


@pytest.mark.slow
def test_several_videos_are_dealt_out_whole_first(ranks: Group, model: str) -> None:
    wanted = run(None, model, {"num_videos": 2})
    found = ranks.run(2, run, model, {"num_videos": 2})
    assert [each["done"] for each in found] == [[7], [8]]
    assert np.array_equal(np.concatenate([e["frames"] for e in found]), wanted["frames"])
    shared = ranks.run(2, run, model, {"num_videos": 2, "parallel": "sequence=2"})
    assert np.array_equal(shared[0]["frames"], wanted["frames"])


@pytest.mark.parametrize("until", slow_unless([2], [2, 4]))
def test_a_run_that_is_interrupted_goes_on_on_one_device(
    ranks: Group, model: str, tmp_path: Path, until: int
) -> None:
    """In the middle of a round of two batches, and at its end: the same bits."""
    wanted = run(None, model, {})
    options = {"num_devices": 2}
    found = ranks.run(2, run, model, options, root=str(tmp_path), until=until)
    assert found[0]["steps"][-1] == until
    (kept,) = all_runs(tmp_path)
    events = list(resume_run(kept, ranks={"num_devices": 1}))
    made = np.concatenate([event.frames for event in events if isinstance(event, FramesDecoded)])
    assert np.array_equal(made, wanted["frames"])
    steps = [event.step for event in events if isinstance(event, Step) and event.stage == "denoise"]
    assert steps[0] > 1, "what was done is not done again"


def _other_noise(group: Communicator | None) -> Any:
    original = noise.start_noise
    if group is not None and group.rank == 1:
        noise.start_noise = lambda seed, shape: original(seed + 1, shape)
    return lambda: setattr(noise, "start_noise", original)


def test_other_noise_on_one_rank_is_seen(ranks: Group, model: str) -> None:
    found = ranks.run(2, run, model, {}, fault=_other_noise)
    assert not np.array_equal(found[0]["frames"], run(None, model, {})["frames"])


def _overflow(group: Communicator | None) -> Any:
    """What rank 1 computes in bfloat16 has an infinity in it."""
    original = torch.nn.SiLU.forward

    def forward(self: Any, x: Any) -> Any:
        out = original(self, x)
        return out * torch.inf if out.dtype == torch.bfloat16 else out

    if group is not None and group.rank == 1:
        torch.nn.SiLU.forward = forward  # type: ignore[method-assign]
    return lambda: setattr(torch.nn.SiLU, "forward", original)


@pytest.mark.slow
def test_what_one_rank_repairs_is_reported_by_the_first(ranks: Group, model: str) -> None:
    options = {"dtype": "bf16", "force": True, "num_devices": 2}
    found = ranks.run(2, list_repairs, model, options)
    assert found[0], "the first rank repaired nothing itself"
    assert all(stage in ("denoise", "given frames", "decode") for stage, _ in found[0])


def list_repairs(group: Communicator, model: str, options: dict[str, Any]) -> list[tuple[str, str]]:
    from everyframe.core.events import Repaired

    undo = _overflow(group)
    try:
        join = Rendezvous(group.rank, lambda _: group)
        asked = request(model, **options)
        events = list(stream(asked, keep=SaveOptions(None), num_threads=1, join=join))
    finally:
        undo()
    return [(event.stage, event.module) for event in events if isinstance(event, Repaired)]


def test_a_plan_tells_each_ranks_part(model: str) -> None:
    plan = everyframe.plan(request(model, num_devices=4))
    assert plan.parallel is not None
    assert [rank.token_share for rank in plan.parallel.ranks] == pytest.approx([1 / 3] * 3 + [0])
    assert all(rank.sent_bytes for rank in plan.parallel.ranks[:3])
    assert any("rank 3: there are fewer batches of frames than" in note for note in plan.notes)
    alone = everyframe.plan(request(model))
    assert [(each.name, each.operations) for each in plan.stages if each.name == "denoise"] < [
        (each.name, each.operations) for each in alone.stages if each.name == "denoise"
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parallel": "cfg=2"}, "computes its branches of guidance in its own way; sequence=2"),
        ({"shard_weights": True}, "whose weights each device has whole"),
    ],
)
def test_what_it_can_not_do_is_reported(model: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        everyframe.plan(request(model, num_devices=2, **options))
