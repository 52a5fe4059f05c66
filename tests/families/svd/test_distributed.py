"""Whole runs of a Stable Video Diffusion among several ranks against the same run on one.

The ranks of this module meet once and then make every run in the same processes. That the UNet's
answer is right to rounding is tested in `test_contract_distributed.py`; here is what is around it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import everyframe
from everyframe.core.events import Repaired, StageStarted
from everyframe.core.request import Request
from everyframe.engine.distributed import Rendezvous
from everyframe.engine.run import stream
from everyframe.families.svd import denoiser, stages
from everyframe.parallel.communicator import Communicator
from everyframe.runs.run_state import SaveOptions
from helpers.events import frames_by_seed
from helpers.rank_pool import Group, group_of

#: Latents of 3x5, which no level divides, and three chunks to decode.
SIZES: dict[str, Any] = {
    "height": 24, "width": 40, "num_frames": 5, "num_inference_steps": 3, "decode_chunk_size": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def ranks() -> Any:
    yield from group_of((2, 3))


@pytest.fixture(scope="module")
def model(tiny_models: Callable[[str], Path]) -> str:
    return str(tiny_models("svd"))


def request(model: str, **options: Any) -> Request:
    image = np.linspace(0, 255, 24 * 40 * 3).reshape(24, 40, 3).astype(np.uint8)
    given = {**SIZES, "seed": 5, "device": "cpu", "image": image, **options}
    return Request(model=model, **given)


def run(
    group: Communicator | None, model: str, options: dict[str, Any], fault: Any = None
) -> dict[str, Any]:
    """One rank's run, or that of one process without ranks: frames, latents, what it did."""
    latents: dict[int, torch.Tensor] = {}
    inner = stages.DenoiseStage.run

    def kept(self: Any, videos: Any) -> Any:
        yield from inner(self, videos)
        latents.update({video.seed: video.latents.clone() for video in videos})

    stages.DenoiseStage.run = kept  # type: ignore[method-assign]
    undo = fault() if fault is not None else None
    try:
        if group is None:
            asked, join = request(model, **options), None
        else:
            asked = request(model, **{"num_devices": group.size, **options})
            join = Rendezvous(group.rank, lambda _: group)
        events = list(stream(asked, keep=SaveOptions(None), num_threads=1, join=join))
    finally:
        stages.DenoiseStage.run = inner  # type: ignore[method-assign]
        if undo is not None:
            undo()
    return {
        "frames": frames_by_seed(events),
        "latents": latents,
        "stages": [each.stage for each in events if isinstance(each, StageStarted)],
        # Of the part that all ranks share; the first alone reports a chunk's decoding.
        "repairs": [
            each.module for each in events if isinstance(each, Repaired) and each.stage == "denoise"
        ],
        "sent": {} if group is None else dict(group.sent),
    }


def check_close(found: list[dict[str, Any]], wanted: dict[str, Any]) -> None:
    """The bar for float32: latents to 1e-5, 8-bit frames by 1 in under 0.1 % of their values."""
    for each in found:
        for seed, latents in each["latents"].items():
            right = wanted["latents"][seed]
            assert (latents - right).abs().max() < 1e-5 * right.abs().max()
    frames = {seed: frames for each in found for seed, frames in each["frames"].items()}
    assert frames.keys() == wanted["frames"].keys()
    for seed, right in wanted["frames"].items():
        bytes_of = [np.round(255 * each).astype(int) for each in (frames[seed], right)]
        apart = np.abs(bytes_of[0] - bytes_of[1])
        assert apart.max() <= 1
        assert (apart > 0).mean() < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_one_video_on_several_ranks(ranks: Group, model: str, size: int) -> None:
    found = ranks.run(size, run, model, {})
    check_close(found, run(None, model, {}))
    assert all(each["stages"] == found[0]["stages"] for each in found)
    # The second chunk was decoded by the second rank, and every chunk came to the first.
    assert found[1]["sent"]["frames are handed over"] > 2 * 24 * 40 * 3 * 4
    assert not found[1]["frames"]


@pytest.mark.slow
def test_without_guidance_and_with_fewer_frames_than_ranks(ranks: Group, model: str) -> None:
    options = {"num_frames": 2, "max_guidance_scale": 1.0}
    check_close(ranks.run(3, run, model, options), run(None, model, options))


@pytest.mark.slow
def test_branches_apart_have_the_bits_of_branches_one_after_the_other(
    ranks: Group, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same arithmetic, only dealt out: each branch is computed as one device computes it."""
    found = ranks.run(2, run, model, {"parallel": "cfg=2"})
    inner = denoiser.Denoiser.__init__

    def one_after_the_other(self: Any, unet: Any, picture: Any, settings: Any, device: str) -> None:
        inner(self, unet, picture, settings.with_saving("branches_at_once", 1), device)

    monkeypatch.setattr(denoiser.Denoiser, "__init__", one_after_the_other)
    wanted = run(None, model, {})
    assert all(torch.equal(each["latents"][5], wanted["latents"][5]) for each in found)
    assert np.array_equal(found[0]["frames"][5], wanted["frames"][5])


@pytest.mark.slow
def test_three_ranks_for_two_branches(ranks: Group, model: str) -> None:
    check_close(ranks.run(3, run, model, {"parallel": "cfg=2"}), run(None, model, {}))


@pytest.mark.slow
def test_two_videos_are_dealt_out_whole_and_have_the_same_bits(ranks: Group, model: str) -> None:
    found = ranks.run(2, run, model, {"num_videos": 2})
    assert [sorted(each["frames"]) for each in found] == [[5], [6]]
    wanted = run(None, model, {"num_videos": 2})["frames"]
    assert all(
        np.array_equal(each["frames"][s], wanted[s]) for each, s in zip(found, (5, 6), strict=True)
    )


def _overflow() -> Any:
    """The first convolution over time has an infinity, wherever it is computed in bfloat16."""
    original = torch.nn.Conv3d.forward

    def forward(self: Any, x: Any) -> Any:
        out = original(self, x)
        return out * torch.inf if out.dtype == torch.bfloat16 else out

    torch.nn.Conv3d.forward = forward  # type: ignore[method-assign]
    return lambda: setattr(torch.nn.Conv3d, "forward", original)


@pytest.mark.slow
def test_a_repair_is_the_same_on_every_rank(ranks: Group, model: str) -> None:
    """Each looks for the fault alone; an exchange in the middle of that would never end."""
    options = {"dtype": "bf16", "force": True}
    found = ranks.run(2, run, model, options, fault=_overflow)
    assert found[0]["repairs"] == found[1]["repairs"] != []
    assert np.isfinite(found[0]["frames"][5]).all()


def test_a_plan_tells_each_ranks_part_and_bytes(model: str) -> None:
    """10 frames of two branches and 30 pixels of them, for 12 ranks."""
    plan = everyframe.plan(request(model, num_devices=12))
    assert plan.parallel is not None
    parts = plan.parallel.ranks
    assert [part.attention_share for part in parts] == [0.1] * 10 + [0.0] * 2
    assert [part.token_share for part in parts] == [0.1] * 6 + [2 / 30] * 6
    assert all(part.sent_bytes > 1000 for part in parts)
    note = "ranks 10, 11: there are fewer frames than devices: it waits during work in space"
    assert note in plan.notes
