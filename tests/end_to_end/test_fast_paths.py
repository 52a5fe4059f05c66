"""A run by fast paths: what the record holds of them, and the same bits from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import everyframe
from everyframe.core.events import Note, Planned, VideoDone
from everyframe.engine import run
from everyframe.engine.records.recorded_request import request_from
from everyframe.ops.attention import AttentionCore

ASKED: dict[str, Any] = {
    "prompt": "a red circle", "size": "32x32", "num_frames": 3, "num_inference_steps": 2, "seed": 3,
}  # fmt: skip


def record_of(model: str, **options: Any) -> dict[str, Any]:
    events = list(run.stream(everyframe.Request(model=model, **ASKED, **options)))
    return next(event.record for event in events if isinstance(event, VideoDone))


@pytest.mark.slow
def test_a_record_brings_its_paths_back_where_they_are_certified(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing is certified here, so a run of its own choice would take the plain way.
    monkeypatch.setenv("EVERYFRAME_CACHE", str(tmp_path))
    record = record_of(model, attention="flash")
    again = request_from(record, {"model": model, "attention": None})
    assert again.fast_paths is not None
    assert again.fast_paths["denoiser"] == ("attention-flash",)
    assert again.attention is None, "a kernel that nobody tried is for a person to ask for"
    # Another kernel, asked for beside the record, is chosen for anew.
    assert request_from(record, {"model": model, "attention": "math"}).fast_paths is None
    fast = everyframe.generate(model=model, **ASKED, attention="flash", output="float")
    slow = everyframe.generate(model=model, **ASKED, attention="math", output="float")
    assert not isinstance(fast, list)
    assert not isinstance(slow, list)
    assert (fast.frames != slow.frames).any(), "the two kernels round differently"
    pinned = everyframe.generate(
        from_record=fast.record, model=model, attention="flash", output="float"
    )
    assert not isinstance(pinned, list)
    assert (pinned.frames == fast.frames).all()


def test_the_kernel_that_is_pinned_is_the_one_that_runs(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set()
    right = AttentionCore.forward

    def forward(self: AttentionCore, *given: Any) -> Any:
        import torch

        if not given[0].is_meta:  # the plan's dry run
            seen.add(torch.backends.cuda.flash_sdp_enabled())
        return right(self, *given)

    monkeypatch.setattr(AttentionCore, "forward", forward)
    for kernel, is_fused in (("math", False), ("flash", True)):
        seen.clear()
        events = list(run.stream(everyframe.Request(model=model, **ASKED, attention=kernel)))
        assert seen == {is_fused}
        planned = next(event for event in events if isinstance(event, Planned))
        assert planned.plan.component("denoiser").choices[0].reason.endswith(kernel)
        assert not any("refused" in event.text for event in events if isinstance(event, Note))
