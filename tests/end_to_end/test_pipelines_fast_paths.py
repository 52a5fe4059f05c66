"""A pipeline runs by fast paths that are certified for it, like every other family, or plainly."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

import everyframe
from everyframe.core.plan import FastPathChoice
from everyframe.fast_paths import certificates
from everyframe.fast_paths.certificates import digest
from everyframe.fast_paths.certification.extract_blocks import blocks_of
from everyframe.fast_paths.modules.constant_results import CachedConstants
from everyframe.ops.attention import by_kernel
from everyframe.planning import list_fast_paths
from everyframe.planning.fast_paths import component_certificates
from everyframe.planning.list_fast_paths import survey
from everyframe.planning.resolve import PreparedPlan, prepare
from helpers.plans import certificates_of, frames_of, unchanged
from helpers.tiny_checkpoints import pipelines as tiny_pipelines

pytestmark = pytest.mark.usefixtures("own_cache")

FLASH = "attention-flash"
SMALL: dict[str, Any] = {
    "prompt": "a fox", "num_inference_steps": 2, "seed": 1, "device": "cpu",
    **tiny_pipelines.CALLS["cogvideox"],
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny-cog"
    tiny_pipelines.cogvideox(path)
    return path


def prepared(folder: Path, *, will_run: bool = False, **more: Any) -> PreparedPlan:
    request = everyframe.Request(model=str(folder), **{**SMALL, **more})
    return prepare(request, will_run=will_run)


def paths_of(found: PreparedPlan) -> dict[str, Any]:
    return {part.name: part.fast_paths for part in found.plan.components}


def theirs(folder: Path, kernel: str) -> np.ndarray[Any, Any]:
    """Frames that diffusers makes with attention by that kernel."""
    pipe = diffusers.CogVideoXPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    width, height = map(int, SMALL["size"].split("x"))
    with by_kernel(kernel):
        made = pipe(
            SMALL["prompt"], height=height, width=width, num_frames=SMALL["num_frames"],
            num_inference_steps=2, generator=torch.Generator().manual_seed(1), output_type="np",
            **SMALL.get("option", {}),
        )  # fmt: skip
    frames: np.ndarray[Any, Any] = made.frames[0]
    return frames


def test_attention_is_plain_until_a_kernel_is_certified(folder: Path) -> None:
    shown = prepared(folder)
    verdicts = {
        part.name: {each.path: each.verdict for each in part.choices}
        for part in shown.plan.components
    }
    assert verdicts["transformer"][FLASH] == "expected"
    plain = prepared(folder, will_run=True)
    assert set(paths_of(plain).values()) == {()}
    assert np.array_equal(frames_of(plain, unchanged), theirs(folder, "math"))
    certificates.keep(certificates_of(shown, "certified"))
    fast = prepared(folder, will_run=True)
    assert paths_of(fast)["transformer"] == (FLASH,)
    frames = frames_of(fast, unchanged)
    assert np.array_equal(frames, theirs(folder, "flash"))
    assert not np.array_equal(frames, frames_of(plain, unchanged)), "the kernel was put on"
    # It is one of sizes and not of words, as a prompt is padded.
    assert paths_of(prepared(folder, will_run=True, prompt="two bears"))["transformer"] == (FLASH,)
    assert paths_of(prepared(folder, will_run=True, size="48x32"))["transformer"] == ()


def test_one_survey_tries_the_paths_of_a_precision_that_it_certifies(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which paths there are follows from the precision; they are not left to a second survey."""
    asked: list[set[str]] = []

    def make(found: Any, missing: Any, runs: Any, seconds: float) -> dict[str, str]:
        names = [each.paths for each in missing if each.component == "transformer"]
        asked.append({path.name for paths in names for path in paths})
        return {}

    def prepare_first(request: everyframe.Request) -> PreparedPlan:
        found = prepare(request)
        if asked:
            return found
        part = found.plan.component("transformer")
        new = replace(part, choices=(FastPathChoice("bf16", "expected", "planted"), *part.choices))
        parts = tuple(new if each is part else each for each in found.plan.components)
        return replace(found, plan=replace(found.plan, components=parts))

    monkeypatch.setattr(component_certificates, "make", make)
    monkeypatch.setattr(list_fast_paths, "prepare", prepare_first)
    survey(everyframe.Request(model=str(folder), **SMALL), certify=True)
    assert asked[0] == {"bf16"}
    assert FLASH in asked[1]
    assert len(asked) == 2
    survey(everyframe.Request(model=str(folder), **SMALL), certify=True)
    assert len(asked) == 3, "without a precision, once is enough"


def test_scores_of_plain_attention_are_in_the_forecast(folder: Path) -> None:
    plain, fast = (
        prepared(folder, attention=kernel).plan.component("transformer")
        for kernel in ("math", "flash")
    )
    assert plain.working_bytes > fast.working_bytes


def test_constant_results_are_in_the_forecast(folder: Path) -> None:
    """As many as are stored at most, which are 64 MB of a small model."""
    plain, cached = (
        prepared(folder, fast_paths={"transformer": paths}, force=True)
        for paths in ((), ("cached-constants",))
    )
    assert paths_of(cached)["transformer"] == ("cached-constants",)
    grown = {
        part.name: part.working_bytes - plain.plan.component(part.name).working_bytes
        for part in cached.plan.components
    }
    most = CachedConstants(torch.nn.Linear(2, 2))._memory.left
    assert grown == {"transformer": most, "text_encoder": 0, "vae": 0}
    assert most == 64 * 2**20


def test_half_precision_has_to_be_certified_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a card, as a plan that is only shown expects it: one part that was refused is float32."""
    shown = everyframe.plan(model=str(folder), profile="cuda-sm80", **{**SMALL, "device": "auto"})
    choices = {part.name: part.choices for part in shown.components}
    assert [each.verdict for each in choices["transformer"] if each.path == "bf16"] == ["expected"]
    off = everyframe.plan(
        model=str(folder), profile="cuda-sm80", disable=["bf16"], **{**SMALL, "device": "auto"}
    )
    assert {part.precision.compute for part in off.components} == {"float32"}
    assert not off.dtype_errors


def test_what_is_tried_is_the_pipelines_own_call(folder: Path) -> None:
    """In another process as well, which is sent the call and builds the rest."""
    found = prepared(folder)
    (run,) = [run for run in found.fitted.runs if run.stage_call.component == "transformer"]
    assert run.stage_call.is_foreign
    certificates = found.chooser.certificates
    assert certificates is not None
    precision = found.plan.component("transformer").precision
    subject = certificates.subject("transformer", precision, [run])
    sent = pickle.loads(pickle.dumps(subject))
    assert len(pickle.dumps(subject)) < 200_000, "no module goes along"
    (block,) = blocks_of(sent)
    assert block.name == "transformer_blocks.0"
    assert block.count == len(run.stage_call.module().transformer_blocks)
    answer = block.alone(())(*block.given.args, **block.given.kwargs)
    assert all(each.isfinite().all() for each in answer)
    assert digest(sent.plan_key) == digest(subject.plan_key)


@pytest.mark.slow
def test_paths_of_a_pipeline_are_tried_and_listed(folder: Path) -> None:
    request = everyframe.Request(model=str(folder), **SMALL)
    rows = {(row.component, row.choice.path): row.choice for row in survey(request).rows}
    assert rows["transformer", FLASH].verdict == "expected"
    tried = survey(request, certify=True)
    rows = {(row.component, row.choice.path): row.choice for row in tried.rows}
    assert rows["transformer", FLASH].verdict in ("certified", "refused")
    assert rows["transformer", FLASH].error is not None
    compiled = everyframe.Request(model=str(folder), **{**SMALL, "num_inference_steps": 6})
    listed = {(row.component, row.choice.path): row.choice for row in survey(compiled).rows}
    assert "on demand" in listed["transformer", "compile"].reason
