"""Kernels that short runs go without are tried once such runs have computed for minutes in all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import everyframe
from everyframe.core.events import Note, Planned, StageDone, VideoDone
from everyframe.core.plan import Plan
from everyframe.engine import run
from everyframe.engine.run import count_event
from everyframe.fast_paths import certificates as certificate_store
from everyframe.fast_paths.certificates import Certificate
from everyframe.fast_paths.certification import certify as certifying
from everyframe.fast_paths.certification.certify import CertifyResult
from everyframe.fast_paths.certification.target import CertificationTarget
from everyframe.fast_paths.computing_time import add_computing_time, computing_time
from everyframe.fast_paths.registry import FastPath
from everyframe.planning.fast_paths.component_certificates import IN_ALL, MANY_SECONDS
from everyframe.planning.resolve import PreparedPlan, prepare
from everyframe.runtime.batch_member import MEMBER

SIZES: dict[str, Any] = {"size": "16x16", "num_frames": 3, "num_inference_steps": 2, "seed": 5}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERYFRAME_CACHE", str(tmp_path))
    monkeypatch.delenv("EVERYFRAME_DISABLE", raising=False)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(component, path) of each trial; each finds its path no faster than plain torch."""
    found: list[tuple[str, str]] = []

    def certify(
        subject: CertificationTarget, paths: Sequence[FastPath], seconds: float
    ) -> CertifyResult:
        assert seconds <= IN_ALL
        found.extend((subject.component, path.name) for path in paths)
        made = tuple(
            Certificate(path.name, subject.component, *subject.keys, "refused", "no faster", 0.0,
                        1.0, 1.0, "2026-11-26")
            for path in paths
        )  # fmt: skip
        certificate_store.keep(made)
        return CertifyResult(made, {}, 1.0)

    monkeypatch.setattr("everyframe.fast_paths.certification.certify.certify", certify)
    return found


def request(model: str, **options: Any) -> everyframe.Request:
    return everyframe.Request(**{"prompt": "a", "model": model, **SIZES, **options})


def plant(prepared: PreparedPlan, component: str, seconds: float) -> None:
    """Seconds that earlier runs have computed."""
    add_computing_time(*keys_of(prepared, component), seconds)


def keys_of(prepared: PreparedPlan, component: str) -> tuple[str, str]:
    certificates = prepared.chooser.certificates
    assert certificates is not None
    part = prepared.plan.component(component)
    own = [each for each in prepared.fitted.runs if each.stage_call.component == component]
    return certificates.subject(component, part.precision, own).keys


def seconds_of(prepared: PreparedPlan, component: str) -> float:
    return computing_time(*keys_of(prepared, component))


def kernel(plan: Plan, component: str = "denoiser") -> tuple[str, str]:
    choices = {each.path: each for each in plan.component(component).choices}
    return choices["onednn-linear"].verdict, choices["onednn-linear"].reason


def test_kernels_are_tried_after_minutes_of_such_runs_and_not_before(
    model: str, tried: list[tuple[str, str]]
) -> None:
    asked = request(model)
    plant(prepare(asked), "denoiser", MANY_SECONDS * 0.99)
    assert kernel(prepare(asked).plan) == ("untried", "not tried yet")
    prepare(asked, will_run=True)
    assert tried == []
    plant(prepare(asked), "denoiser", MANY_SECONDS * 0.02)
    says = "the next run tries it: such runs have computed for 303 s without it"
    assert kernel(prepare(asked).plan) == ("expected", says)
    assert kernel(prepare(asked).plan, "text_encoder")[0] == "untried", "it took no time"
    events = list(run.stream(asked))
    assert ("denoiser", "onednn-linear") in tried
    assert {component for component, _ in tried} == {"denoiser"}
    message = (
        "denoiser: its fast paths were tried before this run, as runs of these sizes have "
        "computed for 303 s without them"
    )
    assert message in [event.text for event in events if isinstance(event, Note)]
    (planned,) = [event for event in events if isinstance(event, Planned)]
    assert message in planned.plan.notes
    assert kernel(planned.plan) == ("refused", "no faster")
    (done,) = [event for event in events if isinstance(event, VideoDone)]
    (part,) = (each for each in done.record["plan"]["components"] if each["name"] == "denoiser")
    assert {"path": "onednn-linear", "verdict": "refused"}.items() <= {
        key: value for each in part["choices"] if each["path"] == "onednn-linear"
        for key, value in each.items()
    }.items()  # fmt: skip
    # And once only.
    number = len(tried)
    plant(prepare(asked), "denoiser", 10 * MANY_SECONDS)
    prepare(asked, will_run=True)
    assert len(tried) == number


def test_what_a_trial_left_waits_for_as_many_seconds(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often trials run out of time, they take a tenth of what was computed."""
    calls: list[str] = []

    def certify(subject: CertificationTarget, *_: Any) -> CertifyResult:
        calls.append(subject.component)
        raise KeyboardInterrupt

    monkeypatch.setattr("everyframe.fast_paths.certification.certify.certify", certify)
    asked = request(model)
    plant(prepare(asked), "denoiser", MANY_SECONDS)
    with pytest.raises(KeyboardInterrupt):
        prepare(asked, will_run=True)
    for _ in range(3):
        prepare(asked, will_run=True)
    assert calls == ["denoiser"]
    plant(prepare(asked), "denoiser", MANY_SECONDS)
    with pytest.raises(KeyboardInterrupt):
        prepare(asked, will_run=True)


def test_a_component_without_a_turn_has_it_before_the_next_run(
    model: str, tried: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first one takes of half a minute is not there for the others."""
    real: Any = certifying.certify

    def certify(subject: CertificationTarget, paths: Any, seconds: float) -> CertifyResult:
        return replace(real(subject, paths, seconds), tried_seconds=seconds)

    monkeypatch.setattr(certifying, "certify", certify)
    asked = request(model)
    prepared = prepare(asked)
    for component in ("denoiser", "vae"):
        plant(prepared, component, MANY_SECONDS)
    plan = prepare(asked, will_run=True).plan
    assert {component for component, _ in tried} == {"vae"}, "it computes most"
    (note,) = (note for note in plan.notes if "fast paths were tried" in note)
    assert note.startswith("vae: ")
    assert seconds_of(prepared, "denoiser") == MANY_SECONDS
    prepare(asked, will_run=True)
    assert {component for component, _ in tried} == {"denoiser", "vae"}


@pytest.mark.parametrize(
    "options",
    [
        {"size": "32x16"},
        {"fast_paths": {"denoiser": ()}},
        {"disable": ["onednn-linear", "native-norm", "native-gelu", "native-flash",
                     "native-gate", "native-rope", "temporal-conv", "channels-last", "winograd",
                     "cached-constants", "native-geglu", "native-attention",
                     "native-gated-linear"]},
    ],
    ids=["other sizes", "of a record", "off"],
)  # fmt: skip
def test_nothing_is_tried_where_it_would_not_be_used(
    model: str, tried: list[tuple[str, str]], options: dict[str, Any]
) -> None:
    plant(prepare(request(model)), "denoiser", 2 * MANY_SECONDS)
    prepare(request(model, **options), will_run=True)
    assert tried == []


def test_another_machine_knows_nothing_of_it(model: str) -> None:
    plant(prepare(request(model)), "denoiser", 2 * MANY_SECONDS)
    assert kernel(prepare(request(model), profile="cpu-fp32").plan)[0] == "untried"


def test_each_run_counts_its_stages_until_all_is_tried(
    model: str, tried: list[tuple[str, str]]
) -> None:
    asked = request(model)
    for number in (1, 2):
        before = seconds_of(prepare(asked), "denoiser")
        done = {e.stage: e.seconds for e in run.stream(asked) if isinstance(e, StageDone)}
        found = seconds_of(prepare(asked), "denoiser")
        assert found - before == pytest.approx(done["denoise"], abs=2e-3), number
    plant(prepare(asked), "denoiser", MANY_SECONDS)
    list(run.stream(asked))
    assert seconds_of(prepare(asked), "denoiser") == 0, "nothing is left to try"
    assert tried


def test_components_of_a_pipelines_call_share_its_seconds(tmp_path: Path) -> None:
    from helpers.tiny_checkpoints import pipelines

    folder = tmp_path / "wan"
    pipelines.wan(folder)
    asked = request(str(folder), size="32x32", num_frames=5)
    (done,) = [event for event in run.stream(asked) if isinstance(event, StageDone)]
    prepared = prepare(asked)
    parts = [each.name for each in prepared.plan.components]
    found = {name: seconds_of(prepared, name) for name in parts}
    assert sum(found.values()) == pytest.approx(done.seconds, abs=0.01)
    work = {each.component: each.operations for each in prepared.plan.stages}
    assert sorted(found, key=found.__getitem__) == sorted(work, key=work.__getitem__)


@pytest.mark.parametrize(("rank", "is_batch"), [(0, False), (0, True), (1, False)])
def test_runs_of_a_batch_count_their_share_and_other_ranks_nothing(
    model: str, rank: int, is_batch: bool
) -> None:
    prepared = prepare(request(model))
    here: Any = SimpleNamespace(parallel=SimpleNamespace(world=SimpleNamespace(rank=rank)))
    assert prepared.plan.batch is not None
    member: Any = object() if is_batch else None
    token = MEMBER.set(member)
    try:
        count_event(StageDone("denoise", 8.0), prepared, here)
    finally:
        MEMBER.reset(token)
    share = prepared.plan.batch.num_videos if is_batch else 1
    assert seconds_of(prepared, "denoiser") == (0 if rank else 8.0 / share)
