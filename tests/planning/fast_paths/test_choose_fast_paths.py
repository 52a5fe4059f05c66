"""What is certified is used and nothing else; each path can be pinned and turned off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import everyframe
from everyframe.core.errors import InputError
from everyframe.core.facts import DeviceFacts, MachineFacts
from everyframe.core.plan import Plan
from everyframe.fast_paths import certificates as certificate_store
from everyframe.fast_paths.certificates import Certificate
from everyframe.fast_paths.certification import certify as certifying
from everyframe.fast_paths.certification.certify import CertifyResult
from everyframe.fast_paths.certification.target import CertificationTarget
from everyframe.fast_paths.registry import switched_off
from everyframe.planning import resolve as resolver
from everyframe.planning.fast_paths import component_certificates
from everyframe.planning.fast_paths.component_certificates import Certificates, MissingCertificates
from everyframe.planning.resolve import PreparedPlan, prepare
from helpers.plans import certificates_of
from helpers.tiny_checkpoints import pipelines as tiny_pipelines

SIZES: dict[str, Any] = {"size": "16x16", "num_frames": 3, "num_inference_steps": 2, "seed": 5}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERYFRAME_CACHE", str(tmp_path))
    monkeypatch.delenv("EVERYFRAME_DISABLE", raising=False)


def prepared(model: str, *, will_run: bool = False, **options: Any) -> PreparedPlan:
    request = everyframe.Request(prompt="a", model=model, **{**SIZES, **options})
    return prepare(request, will_run=will_run)


def verdict(plan: Plan, path: str, component: str = "denoiser") -> str:
    return {each.path: each.verdict for each in plan.component(component).choices}[path]


def test_what_nobody_tried_is_expected_in_a_plan_and_not_used_in_a_run(model: str) -> None:
    shown = prepared(model).plan
    assert verdict(shown, "attention-flash") == "expected"
    # Too short a run to try it for.
    run = prepared(model, will_run=True).plan
    assert verdict(run, "attention-flash") == "untried"
    assert run.component("denoiser").fast_paths == ()


def test_what_computes_nothing_is_offered_no_path(tmp_path: Path) -> None:
    """A motion adapter's weights are copied into the UNet; no call of a run is its own."""
    tiny_pipelines.animatediff(tmp_path / "model")
    plan = prepared(str(tmp_path / "model"), **tiny_pipelines.CALLS["animatediff"]).plan
    adapter = plan.component("motion_adapter")
    assert (adapter.choices, adapter.precision.compute) == ((), "float32")
    assert plan.component("unet").choices


def test_modules_are_tried_in_the_first_run_that_takes_many_minutes(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert verdict(prepared(model).plan, "onednn-linear") == "untried"
    tried: list[tuple[str, float]] = []

    def make(given: Any, missing: Any, runs: Any, seconds: float) -> dict[str, str]:
        tried.extend((path.name, seconds) for each in missing for path in each.paths)
        return {}

    monkeypatch.setattr(component_certificates, "make", make)
    monkeypatch.setattr(component_certificates, "_LONG", {"cpu": 0.0})
    monkeypatch.setattr(component_certificates, "VERY_LONG", 0.0)
    assert verdict(prepared(model).plan, "onednn-linear") == "expected"
    prepared(model, will_run=True)
    assert ("onednn-linear", component_certificates.IN_ALL) in tried


def test_what_is_certified_is_used_and_what_is_refused_is_not(model: str) -> None:
    found = prepared(model)
    certificate_store.keep(certificates_of(found, "certified"))
    assert prepared(model, will_run=True).plan.component("denoiser").fast_paths == (
        "attention-flash",
    )
    certificate_store.keep(certificates_of(found, "refused"))
    refused = prepared(model, will_run=True).plan
    assert refused.component("denoiser").fast_paths == ()
    # In one line each, and in what the record holds.
    assert any(
        "without attention-flash, which was refused here: planted" in n for n in refused.notes
    )
    assert refused.to_json()["components"][1]["choices"][0]["reason"] == "planted"


def test_a_certificate_of_another_driver_is_not_used(model: str) -> None:
    found = prepared(model)
    others = [replace(each, device="other") for each in certificates_of(found, "certified")]
    certificate_store.keep(others)
    assert prepared(model, will_run=True).plan.component("denoiser").fast_paths == ()


def test_one_of_other_sizes_is_not_used(model: str) -> None:
    certificate_store.keep(certificates_of(prepared(model), "certified"))
    assert prepared(model, will_run=True, size="32x16").plan.component("denoiser").fast_paths == ()


def test_paths_are_turned_off_by_name(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate_store.keep(certificates_of(prepared(model), "certified"))
    without = prepared(model, will_run=True, disable=["attention-flash"]).plan
    assert without.component("denoiser").fast_paths == ()
    assert verdict(without, "attention-flash") == "off"
    monkeypatch.setenv("EVERYFRAME_DISABLE", "compile, attention-flash")
    assert prepared(model, will_run=True).plan.component("denoiser").fast_paths == ()
    monkeypatch.setenv("EVERYFRAME_DISABLE", "atention-flash")
    with pytest.raises(InputError, match=r"EVERYFRAME_DISABLE.*did you mean 'attention-flash'"):
        prepared(model)
    monkeypatch.delenv("EVERYFRAME_DISABLE")
    with pytest.raises(InputError, match=r"disable: there is no fast path 'bf1'.*mean 'bf16'"):
        prepared(model, disable="bf1")


def test_what_is_requested_and_disabled_is_refused_and_the_variable_goes_first(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any]
    for asked, path in ({"attention": "flash"}, "attention-flash"), ({"compile": True}, "compile"):
        with pytest.raises(InputError, match=f"and disable={path}: give one of them"):
            prepared(model, disable=[path.upper()], **asked)
    monkeypatch.setenv("EVERYFRAME_DISABLE", "attention-flash,compile")
    found = prepared(model, attention="flash", compile=True, will_run=True)
    assert found.plan.component("denoiser").fast_paths == ()


def test_without_bf16_no_decoder_has_it() -> None:
    assert switched_off(["bf16"]) == {"bf16", "bf16-decoder"}
    assert switched_off(["bf16-decoder"]) == {"bf16-decoder"}


def test_a_kernel_is_pinned_by_name(model: str) -> None:
    assert prepared(model, will_run=True, attention="flash").plan.component(
        "denoiser"
    ).fast_paths == ("attention-flash",)
    certificate_store.keep(certificates_of(prepared(model), "certified"))
    assert (
        prepared(model, will_run=True, attention="math").plan.component("denoiser").fast_paths == ()
    )
    with pytest.raises(InputError, match=r"one of flash, math on .*, got 'flahs'.*mean 'flash'"):
        prepared(model, attention="flahs")


def test_paths_of_a_record_are_used_where_they_are_certified(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record is somebody's word: nothing runs by it that was not tried here."""
    tried: list[str] = []

    def certify(subject: Any, paths: Any, seconds: float) -> Any:
        tried.extend(path.name for path in paths)
        return SimpleNamespace(untried={}, tried_seconds=0.0)

    monkeypatch.setattr("everyframe.fast_paths.certification.certify.certify", certify)
    paths = {"denoiser": ("attention-flash", "compile", "linear-gelu", "nope")}
    untried = prepared(model, will_run=True, fast_paths=paths).plan
    assert untried.component("denoiser").fast_paths == ()
    assert tried == ["attention-flash"], "a compiler is not set to work by a record"
    certificate_store.keep(certificates_of(prepared(model), "certified"))
    again = prepared(model, will_run=True, fast_paths=paths).plan
    assert again.component("denoiser").fast_paths == ("attention-flash",)
    assert again.component("text_encoder").fast_paths == (), "the record does without"
    certificate_store.keep(certificates_of(prepared(model), "refused"))
    refused = prepared(model, will_run=True, fast_paths=paths).plan
    assert refused.component("denoiser").fast_paths == ()


def test_the_plain_attentions_scores_are_forecast(model: str) -> None:
    plain = prepared(model, attention="math").plan.component("denoiser")
    fast = prepared(model, attention="flash").plan.component("denoiser")
    assert plain.working_bytes > fast.working_bytes


def test_half_precision_is_used_where_it_is_certified(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = DeviceFacts("a card", "cuda", 0, 10**10, 10**10, (9, 0), True, True)
    cpu = DeviceFacts("a processor", "cpu", None, 10**10, 10**10)
    facts = MachineFacts((card, cpu), 2, {})
    monkeypatch.setattr(resolver, "machine_facts", lambda device="auto", freed=None: facts)
    tried: list[MissingCertificates] = []

    def make(
        certificates: Certificates, missing: list[MissingCertificates], *_: Any
    ) -> dict[str, str]:
        tried.extend(missing)
        for each in missing:
            runs = [
                run for run in planned.fitted.runs if run.stage_call.component == each.component
            ]
            subject = certificates.subject(each.component, each.precision, runs)
            good = each.component == "denoiser"
            certificate_store.keep(
                Certificate(
                    path.name, each.component, subject.device_key, subject.plan_key,
                    "certified" if good else "refused", "planted", 2e-3, 2e-2, 3.0, "2026-11-22",
                )
                for path in each.paths
            )  # fmt: skip
        return {}

    monkeypatch.setattr(component_certificates, "make", make)
    planned = prepared(model)
    assert [part.precision.compute for part in planned.plan.components] == [
        "bfloat16", "bfloat16", "float32",
    ]  # fmt: skip
    run = prepared(model, will_run=True).plan
    assert {(each.component, path.name) for each in tried for path in each.paths} == {
        ("text_encoder", "bf16"), ("denoiser", "bf16"),
    }  # fmt: skip
    assert [part.precision.compute for part in run.components] == [
        "float32", "bfloat16", "float32",
    ]  # fmt: skip
    assert run.component("denoiser").fast_paths == ("bf16",)
    assert any("float32, as bf16 was refused here: planted" in note for note in run.notes)
    # Asked for by name, nobody's certificate is needed.
    asked = prepared(model, will_run=True, dtype="bf16").plan
    assert asked.component("text_encoder").precision.compute == "bfloat16"


def test_code_that_is_here_is_used_however_short_the_run_is(model: str) -> None:
    """Compiling doesn't pay for four steps; loading what is compiled takes milliseconds."""
    steps = {"num_inference_steps": 4}
    plan = prepared(model, **steps)
    file = "compiled/key/block.pt2"
    made = [
        replace(each, packages=(file,)) for each in certificates_of(plan, "certified", "compile")
    ]
    certificate_store.keep(made)
    library = certificate_store.folder() / file
    assert "compile" not in (prepared(model, **steps).plan.component("denoiser").fast_paths or ())
    library.parent.mkdir(parents=True)
    library.touch()
    part = prepared(model, **steps).plan.component("denoiser")
    assert "compile" in (part.fast_paths or ())
    (choice,) = (each for each in part.choices if each.path == "compile")
    assert choice.reason == "planted; compiled already"
    # What torch.compile has to compile again is used where it pays.
    certificate_store.keep(certificates_of(plan, "certified", "compile"))
    assert "compile" not in (prepared(model, **steps).plan.component("denoiser").fast_paths or ())
    # And what is turned off is off.
    certificate_store.keep(made)
    off = prepared(model, disable=("compile",), **steps).plan.component("denoiser")
    assert "compile" not in (off.fast_paths or ())


@pytest.mark.parametrize(
    ("compiled", "options", "stays"),
    [
        (1.05, {}, "cached-constants"),
        (1.4, {}, "compile"),
        (1.05, {"compile": True}, "compile"),
        (1.05, {"fast_paths": {"transformer": ("compile", "cached-constants")}}, "compile"),
    ],
    ids=["constants gain more", "compiled blocks gain more", "requested", "of a record"],
)
def test_compiled_blocks_have_no_use_for_constants(
    tiny_models: Callable[[str], Path], compiled: float, options: dict[str, Any], stays: str
) -> None:
    """They compute everything in each step, so only one of the two is used."""
    steps = {"num_inference_steps": 4, "size": "32x32"}
    folder = str(tiny_models("ltx"))
    plan = prepared(folder, **steps)
    library = certificate_store.folder() / "compiled/key/block.pt2"
    library.parent.mkdir(parents=True)
    library.touch()
    for path, gain in (("compile", compiled), ("cached-constants", 1.2)):
        made = certificates_of(plan, "certified", path)
        files = ("compiled/key/block.pt2",) if path == "compile" else ()
        certificate_store.keep([replace(each, gain=gain, packages=files) for each in made])
    part = prepared(folder, **steps, **options).plan.component("transformer")
    pair = {"compile", "cached-constants"}
    assert pair & {*(part.fast_paths or ())} == {stays}
    (other,) = pair - {stays}
    (choice,) = (each for each in part.choices if each.path == other)
    assert choice.verdict == "off"
    assert "compiled blocks compute constants in each step" in choice.reason


def test_a_foreign_folder_of_compiled_blocks_is_refused(model: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is no folder of compiled blocks; compile it here"):
        prepared(model, compiled=str(tmp_path))


def test_a_trial_of_the_compiler_has_the_paths_that_the_run_has(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what it compiles is for other kernels than the run's, and is of no use to it."""
    asked: list[tuple[str, tuple[str, ...]]] = []

    def certify(subject: CertificationTarget, paths: Any, *_: Any) -> CertifyResult:
        asked.extend((path.name, subject.paths) for path in paths)
        return CertifyResult((), {}, 0.0)

    monkeypatch.setattr(certifying, "certify", certify)
    steps = {"num_inference_steps": 4}
    certificate_store.keep(certificates_of(prepared(model, **steps), "certified"))
    prepared(model, will_run=True, compile=True, **steps)
    assert ("compile", ("attention-flash",)) in asked
