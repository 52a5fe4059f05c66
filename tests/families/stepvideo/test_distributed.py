"""Runs of a Step-Video among several ranks against the same run on one.

From upstream's folder layout to frames: the stages of one plan, and, with ``--slow``, whole runs by
the path that ``--num-devices`` takes. Float32 sums in another order differ by a few units in the
last place; what is dealt out whole has the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from everyframe.core.events import ComponentLoaded, Event, FramesDecoded
from everyframe.core.plan import Plan
from everyframe.core.request import Request
from everyframe.engine.distributed import Rendezvous
from everyframe.engine.run import stream
from everyframe.families.registry import stages_of
from everyframe.families.stepvideo import stages
from everyframe.parallel.communicator import Communicator, ParallelContext, SingleRank
from everyframe.parallel.head_partition import SEQUENCE_BACKENDS
from everyframe.planning.find_model import find_model
from everyframe.planning.resolve import prepare
from everyframe.runs.run_state import SaveOptions
from everyframe.runtime.interface import ShardableSpec, VideoState
from helpers.rank_pool import Group, group_of, runs_slow

#: Three pieces; 14 tokens of each branch, and three heads.
SIZES: dict[str, Any] = {"height": 16, "width": 32, "num_frames": 35, "num_inference_steps": 3}
PROMPT = "a red circle moves 红色的气球"
SLOW = (2, 5, 7)


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Any:
    yield from group_of((3, *SLOW) if runs_slow(request) else (3,))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    # Here, as ranks import this module too, and transformers takes each of them seconds.
    from helpers.tiny_checkpoints import stepvideo as tiny_stepvideo

    return str(tiny_stepvideo.stepvideo(tmp_path_factory.mktemp("models") / "tiny-step"))


@pytest.fixture(scope="module")
def plan(model: str) -> Plan:
    """Of one device; its dry runs take longer than the run."""
    return prepare(asked(model)).plan


def asked(model: str, **options: Any) -> Request:
    return Request(prompt=PROMPT, model=model, seed=5, device="cpu", **{**SIZES, **options})


def staged(
    group: Communicator, plan: Plan, model: str, backend: str = "", groups: int = 1
) -> dict[str, Any]:
    """One rank's latents and frames by the stages of a plan, what it loaded, and what it sent."""
    found, _ = find_model(asked(model), False)
    assert isinstance(found, ShardableSpec)
    video, events, latents = VideoState(5), [], []
    for stage in stages_of(found, plan, 0, ParallelContext(group, group, groups, backend)):
        video.begin_stage()
        events += list(stage.run([video]))
        if stage.name == "denoise":
            latents.append(video.latents.clone())
    return summarize(events, latents[0], group)


def summarize(
    events: Sequence[Event], latents: torch.Tensor, group: Communicator
) -> dict[str, Any]:
    frames = [each.frames for each in events if isinstance(each, FramesDecoded)]
    return {
        "latents": latents,
        "frames": np.concatenate(frames) if frames else None,
        "loaded": [each.component for each in events if isinstance(each, ComponentLoaded)],
        "sent": dict(group.sent),
    }


def check_close(found: list[dict[str, Any]], wanted: dict[str, Any]) -> None:
    """The bar for float32: latents to 1e-5, 8-bit frames by 1 at most in under 0.1 % of values."""
    largest = float(wanted["latents"].abs().max())
    for each in found:
        assert torch.equal(each["latents"], found[0]["latents"])
        assert float((each["latents"] - wanted["latents"]).abs().max()) < 1e-5 * largest
    assert [each["frames"] is None for each in found] == [False] + [True] * (len(found) - 1)
    frames = [np.round(255 * each["frames"]).astype(int) for each in (found[0], wanted)]
    apart = np.abs(frames[0] - frames[1])
    assert apart.max() <= 1
    assert (apart > 0).mean() < 1e-3


@pytest.mark.parametrize("size", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)])
@pytest.mark.parametrize(
    # Rings of this family are in `families/test_contract_distributed.py` as well.
    "backend",
    [
        pytest.param(backend, marks=[pytest.mark.slow] * (backend == "ring"))
        for backend in SEQUENCE_BACKENDS
    ],
)
def test_one_video_on_several_ranks(
    ranks: Group, plan: Plan, model: str, size: int, backend: str
) -> None:
    found = ranks.run(size, staged, plan, model, backend)
    check_close(found, staged(SingleRank(), plan, model))
    assert found[0]["loaded"] == ["step_llm", "clip", "denoiser", "vae"]
    assert all(each["loaded"] == ["denoiser", "vae"] for each in found[1:])
    if size > 2:  # with two, each has a branch
        went = {"ring": "keys and values go round", "ulysses": "heads are gathered"}[backend]
        assert any(each["sent"].get(went) for each in found)
    pieces = [each["sent"].get("frames are handed over", 0) for each in found[1:]]
    assert sum(pieces) > 3 * 16 * 32 * 4  # one of them at least was made elsewhere


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_one_video_with_weights_in_eight_bits(ranks: Group, model: str, kind: str) -> None:
    """All ranks round alike, so nothing but the order of sums is left here too."""
    rounded = prepare(asked(model, quantize=kind)).plan
    alone = staged(SingleRank(), rounded, model)
    check_close(ranks.run(3, staged, rounded, model, "ulysses"), alone)
    assert rounded.component("denoiser").precision.weight_dtype == kind


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_branches_apart(ranks: Group, plan: Plan, model: str, size: int) -> None:
    found = ranks.run(size, staged, plan, model, "ulysses", groups=2)
    check_close(found, staged(SingleRank(), plan, model))


@pytest.mark.slow
@pytest.mark.parametrize("backend", SEQUENCE_BACKENDS)
def test_weights_that_come_block_by_block(
    ranks: Group, plan: Plan, model: str, backend: str
) -> None:
    """Out of their files on every rank: the same bits as with weights that stay."""
    parts = tuple(replace(part, block_offload=True, from_disk=True) for part in plan.components)
    streamed = ranks.run(3, staged, replace(plan, components=parts), model, backend)
    kept = ranks.run(3, staged, plan, model, backend)
    assert torch.equal(streamed[0]["latents"], kept[0]["latents"])
    assert np.array_equal(streamed[0]["frames"], kept[0]["frames"])


# ---------------------------------------------------------------- by the path of --num-devices


def run(group: Communicator, model: str, options: dict[str, Any]) -> dict[str, Any]:
    """One rank of a whole run, planned by itself and compared with the others."""
    denoise, latents = stages.DenoiseStage.run, []

    def watched(self: Any, videos: Sequence[VideoState]) -> Iterator[Event]:
        yield from denoise(self, videos)
        latents.append(videos[0].latents.clone())

    stages.DenoiseStage.run = watched  # type: ignore[method-assign]
    try:
        request = asked(model, num_devices=group.size, **options)
        join = Rendezvous(group.rank, lambda _: group)
        events = list(stream(request, keep=SaveOptions(None), num_threads=1, join=join))
    finally:
        stages.DenoiseStage.run = denoise  # type: ignore[method-assign]
    return summarize(events, latents[0], group)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ulysses=3", "ring=3", "cfg=2"])
def test_a_whole_run(ranks: Group, plan: Plan, model: str, parallel: str) -> None:
    found = ranks.run(3, run, model, {"parallel": parallel})
    check_close(found, staged(SingleRank(), plan, model))
    round_trips = sum(each["sent"].get("keys and values go round", 0) for each in found)
    assert bool(round_trips) == (parallel == "ring=3")


@pytest.mark.slow
def test_a_plan_has_the_backend_and_its_bytes(model: str) -> None:
    """What each rank sends is in the plan, for each backend; a forecast chooses between them."""
    by_heads = prepare(asked(model, num_devices=3, parallel="ulysses=3")).plan.parallel
    ring = prepare(asked(model, num_devices=3, parallel="ring=3")).plan.parallel
    assert by_heads is not None
    assert ring is not None
    assert str(by_heads) == "data=1, cfg=1, ulysses=3"
    assert str(ring) == "data=1, cfg=1, ring=3"
    for division in (by_heads, ring):
        assert sum(rank.token_share for rank in division.ranks) == pytest.approx(1)
        assert sum(rank.attention_share for rank in division.ranks) == pytest.approx(1)
        assert all(rank.sent_bytes for rank in division.ranks)
    assert by_heads.ranks[0].sent_bytes != ring.ranks[0].sent_bytes
