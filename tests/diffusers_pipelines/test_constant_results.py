"""Pipelines with constant results computed once: diffusers' bits, in plan, record and trial."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import everyframe
from everyframe.core.errors import InputError
from everyframe.fast_paths import certificates
from everyframe.fast_paths.certification.certify import certify
from everyframe.fast_paths.modules.constant_results import PATH, CachedConstants
from everyframe.fast_paths.registry import CATALOGUE
from everyframe.ops.attention import by_kernel
from everyframe.planning.resolve import PreparedPlan, prepare
from helpers.plans import certificates_of, frames_of, unchanged
from helpers.tiny_checkpoints import pipelines as tiny_pipelines

pytestmark = pytest.mark.usefixtures("own_cache")


def prepared(name: str, folder: Path, **more: Any) -> PreparedPlan:
    asked: dict[str, Any] = {
        "prompt": "a fox", "num_inference_steps": 4, "seed": 1, "device": "cpu",
        **tiny_pipelines.CALLS[name],
    }  # fmt: skip
    return prepare(everyframe.Request(model=str(folder), **{**asked, **more}), will_run=True)


def theirs(name: str, folder: Path, prompt: str, **more: Any) -> np.ndarray[Any, Any]:
    """Frames by diffusers alone."""
    pipe = tiny_pipelines.loaded(folder)
    call = {**tiny_pipelines.CALLS[name], **more}
    width, height = map(int, call.pop("size").split("x"))
    own = call.pop("option", {})
    with by_kernel("math"):
        made = pipe(
            prompt, height=height, width=width, num_inference_steps=4, output_type="np",
            generator=torch.Generator().manual_seed(1), **call, **own,
        )  # fmt: skip
    frames: np.ndarray[Any, Any] = made.frames[0]
    return frames


SLOW = [pytest.param(each, marks=pytest.mark.slow) for each in ("wan", "hunyuan", "cogvideox")]


@pytest.mark.parametrize("name", ["ltx", *SLOW])
def test_it_has_diffusers_bits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / name
    getattr(tiny_pipelines, name)(folder)
    caches: list[CachedConstants] = []

    class Noted(CachedConstants):
        def __enter__(self) -> CachedConstants:
            caches.append(self)
            return super().__enter__()

    place = "everyframe.diffusers_pipelines.constant_results.CachedConstants"
    monkeypatch.setattr(place, Noted)
    certificates.keep(certificates_of(prepared(name, folder), "certified", PATH))
    for prompt, more in (("a fox", {}), ("two bears", {}), ("a fox", {"guidance_scale": 1.0})):
        asked = prepared(name, folder, prompt=prompt, **more)
        if more:  # certificates are of a plan's sizes, and one branch is another size
            certificates.keep(certificates_of(asked, "certified", PATH))
            asked = prepared(name, folder, prompt=prompt, **more)
        used = {part.name: part.fast_paths for part in asked.plan.components}
        assert used["transformer"] == (PATH,)
        assert used["vae"] == ()
        assert np.array_equal(frames_of(asked, unchanged), theirs(name, folder, prompt, **more))
    assert caches
    assert all(each.modules for each in caches), [each.modules for each in caches]


def test_the_plan_shows_it_and_it_can_be_disabled(tmp_path: Path) -> None:
    folder = tmp_path / "ltx"
    tiny_pipelines.ltx(folder)
    (choice,) = (
        each
        for each in prepared("ltx", folder).plan.component("transformer").choices
        if each.path == PATH
    )
    assert choice.verdict == "untried"
    certificates.keep(certificates_of(prepared("ltx", folder), "certified", PATH))
    assert prepared("ltx", folder).plan.component("transformer").fast_paths == (PATH,)
    off = prepared("ltx", folder, disable=[PATH])
    assert off.plan.component("transformer").fast_paths == ()
    with pytest.raises(InputError, match=f"did you mean .{PATH}"):
        prepared("ltx", folder, disable=["cached-constant"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ltx", "cogvideox"])
def test_a_trial_in_a_process_of_its_own_has_a_verdict(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    getattr(tiny_pipelines, name)(folder)
    found = prepared(name, folder)
    assert found.chooser.certificates is not None
    runs = [run for run in found.fitted.runs if run.stage_call.component == "transformer"]
    precision = found.plan.component("transformer").precision
    subject = found.chooser.certificates.subject("transformer", precision, runs)
    (made,) = certify(subject, [CATALOGUE[PATH]], 60.0).certificates
    assert made.error == 0, made.reason
    assert made.gain is not None
