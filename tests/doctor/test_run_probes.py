"""A probe that dies, hangs, lies or is itself broken is a finding, and never the doctor's end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from everyframe.core.facts import DeviceFacts, MachineFacts
from everyframe.doctor import diagnose as diagnosing
from everyframe.doctor.checks import FACT_CHECKS
from everyframe.doctor.diagnose import diagnose
from everyframe.doctor.probes import PROBES, Probe, outcome
from everyframe.doctor.run_probes import devices_to_probe, probe
from everyframe.hardware import facts
from everyframe.hardware.isolation import ProcessResult, run_isolated
from everyframe.hardware.known_issues import known_issues
from helpers import crashing_functions

CPU = DeviceFacts("a processor", "cpu", None, 1 << 34, 1 << 34, has_fast_bf16=True)
CARD = DeviceFacts("a card", "cuda", 0, 1 << 34, 1 << 34, (9, 0))


def planted(name: str, seconds: float = 120.0, **more: Any) -> Probe:
    """A probe that does what the function of that name in `crashing_functions` does."""
    return Probe(
        "planted",
        "a planted probe",
        f"helpers.crashing_functions:{name}",
        seconds,
        "do this",
        **more,
    )


@pytest.mark.parametrize(
    ("name", "seconds", "text"),
    [
        ("divide_by_zero", 120, "died of SIGFPE"),
        ("segfault", 120, "died of SIGSEGV"),
        ("be_killed", 120, "died of SIGKILL"),
        ("hang", 2, "did not end within 2 s"),
        ("lie", 120, "products are off by 3.0e-01"),
        ("leave_the_interpreter", 120, "exit code 3"),
    ],
)
def test_a_fault_has_errors_with_its_name(name: str, seconds: float, text: str) -> None:
    run_isolated(max, 1, 2, seconds=120)  # torch is imported by now, so the limit is the probe's
    check = probe(planted(name, seconds), [CPU])
    assert check.mark == "error"
    (finding,) = check.findings
    assert text in finding.message
    assert finding.message.startswith("cpu: ")
    assert finding.fix[0].do == "do this"


def test_a_broken_card_is_not_blamed_on_software(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where torch is asked for devices, nor where a probe loses one."""
    message = "CUDA error: uncorrectable ECC error encountered"
    monkeypatch.setattr(facts, "_as_plain", crashing_functions.lose_a_card)
    (check,) = diagnose(["devices"]).checks
    (finding,) = check.findings
    assert finding.message.endswith(f", cuda:0 was lost before it was used ({message})")
    assert finding.cause == "its memory gave wrong bits"
    assert "nvidia-smi -q -d ECC" in finding.fix[0].do
    assert finding.fix[0].command is None
    (finding,) = probe(planted("lose_a_card_in_use"), [CARD]).findings
    assert finding.cause == "its memory gave wrong bits"
    assert [fix.do[:26] for fix in finding.fix] == ["`nvidia-smi -q -d ECC` (RO"]


def test_a_probe_that_finds_nothing_is_fine() -> None:
    check = probe(planted("be_well"), [CPU])
    assert (check.mark, check.findings) == ("fine", ())


def test_what_no_run_needs_is_a_note() -> None:
    assert probe(planted("lie", is_optional=True), [CPU]).mark == "note"


def test_an_error_that_is_known_brings_its_cause_and_remedy() -> None:
    (finding,) = probe(planted("raise_known_error"), [CPU]).findings
    assert finding.issue == "svd-float-half-time-embed"
    assert "autocast" in (finding.cause or "")
    assert finding.sources


def test_a_death_as_on_h20_brings_the_cublas_that_mends_it() -> None:
    item = Probe(
        "linear", "linear layers", "helpers.crashing_functions:divide_by_zero", 120.0, "do this"
    )
    (finding,) = probe(item, [CARD]).findings
    assert "cuda:0: linear layers: the probe died of SIGFPE" in finding.message
    assert finding.issue == "h20-cublas121-sigfpe"
    assert finding.fix[0].command == "pip install nvidia-cublas-cu12==12.5.2.13"
    (finding,) = probe(item, [CPU]).findings  # no cuBLAS there
    assert finding.issue is None
    (finding,) = probe(planted("divide_by_zero"), [CARD]).findings  # nor in that probe
    assert finding.issue is None


def test_the_doctor_goes_on_after_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dead, hanging and nonsensical probes together: all reported, the last line counts them."""
    names = ("divide_by_zero", "give_nonsense", "hang", "be_well")
    plants = tuple(
        Probe(
            name,
            name,
            f"helpers.crashing_functions:{name}",
            3.0,
            "do this",
            is_optional=name == "hang",
        )
        for name in names
    )
    monkeypatch.setattr(diagnosing, "PROBES", plants)
    reported: list[str] = []
    report = diagnose([*names, "known-issues"], on_check=lambda check: reported.append(check.name))
    marks = {check.name: check.mark for check in report.checks}
    assert reported == [*names, "known-issues"]
    assert marks["divide_by_zero"] == "error"
    assert marks["give_nonsense"] == "broke"
    assert marks["hang"] == "note"
    assert marks["be_well"] == "fine"
    assert report.has_errors
    assert report.message.startswith("Not ready: 1 error, 1 check that broke, 1 note")


def test_a_torch_that_kills_is_reported_and_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    dead = ProcessResult(signal="SIGSEGV", seconds=0.1)
    monkeypatch.setattr(facts, "run_isolated", lambda *args, **kwargs: dead)
    report = diagnose(["devices", "products"])
    (check,) = report.checks  # no probe is tried: it would end in the same way
    assert check.findings[0].message == "asking torch for its devices died of SIGSEGV"
    assert report.has_errors


def test_a_look_that_raises_is_broken_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def look(patient: object) -> None:
        raise KeyError("nothing")

    monkeypatch.setitem(FACT_CHECKS, "versions", look)
    report = diagnose(["devices", "versions"], profile="cpu")
    assert [check.mark for check in report.checks] == ["fine", "broke"]
    assert "the check itself broke: KeyError" in report.checks[1].message


def test_one_of_each_kind_is_probed() -> None:
    cards = [CARD, DeviceFacts("a card", "cuda", 1, 1, 1, (9, 0)),
             DeviceFacts("another", "cuda", 2, 1, 1, (8, 0))]  # fmt: skip
    probed = devices_to_probe(MachineFacts((*cards, CPU), 4))
    assert [device.torch_name for device in probed] == ["cuda:0", "cuda:2"]
    assert devices_to_probe(MachineFacts((CPU,), 4)) == (CPU,)


def test_a_probe_that_one_of_two_cards_skips_ran_on_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "everyframe.doctor.run_probes.run_isolated",
        lambda *given, seconds: ProcessResult(
            outcome(skipped="no bf16" if given[2] == "cuda:1" else None), seconds=1.0
        ),
    )
    other = replace(CARD, name="an old card", index=1)
    check = probe(planted("be_well"), [CARD, other])
    assert check.message == "a planted probe, on cuda:0"
    assert probe(planted("be_well"), [other]).message == "not run: no bf16"


def test_probes_that_known_issues_name_are_there() -> None:
    names = {item.name for item in PROBES}
    assert {issue.probe for issue in known_issues() if issue.probe} <= names


def test_a_probe_that_passed_settles_an_issue_that_only_it_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from dataclasses import replace

    from everyframe.doctor.checks import DoctorInput
    from everyframe.doctor.checks import known_issues as check_issues
    from everyframe.hardware.profiles import find_profile

    machine = find_profile("m1").machine()
    patient = DoctorInput(machine, None, frozenset())
    assert check_issues(patient).mark == "note"
    assert check_issues(replace(patient, probed={"strides": True})).mark == "fine"


def test_bf16_that_is_slower_than_facts_say(monkeypatch: pytest.MonkeyPatch) -> None:
    from everyframe.doctor import run_probes

    value = {"wrong": [], "notes": [], "skipped": None, "measured": {"bf16_over_float32": 3.0}}
    monkeypatch.setattr(
        run_probes, "run_isolated", lambda *args, **kwargs: ProcessResult(value=value)
    )
    item = next(item for item in PROBES if item.name == "bf16")
    assert probe(item, [CPU]).findings[0].message == (
        "cpu: bf16 takes 3.0 times as long as float32, although it should be quicker"
    )
    emulating = DeviceFacts("old", "cpu", None, 1, 1, has_fast_bf16=False)
    assert probe(item, [emulating]).mark == "fine"  # nobody chooses bf16 there


def test_what_mends_it_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hang that ends with two variables set, as NCCL's between consumer cards."""
    monkeypatch.delenv("PLANTED_MENDED", raising=False)
    run_isolated(max, 1, 2, seconds=120)  # torch is imported by now, so the limit is the probe's
    for seconds in (3, 15, 75):  # in which a machine, however slow, can make a process
        item = planted("hang_unless_mended", seconds, again_with={"PLANTED_MENDED": "1"})
        (finding,) = probe(item, [CPU]).findings
        assert f"did not end within {seconds} s" in finding.message
        if finding.fix[0].command:
            break
    assert finding.fix[0].command == "export PLANTED_MENDED=1"
    item = planted("hang", 0.5, again_with={"PLANTED_MENDED": "1"})
    (finding,) = probe(item, [CPU]).findings
    assert [fix.do for fix in finding.fix] == ["do this"]


def test_a_torch_that_ends_the_process_is_named_by_its_signal(tmp_path: Path) -> None:
    """The whole program, with a torch in its way that dies while it is imported."""
    (tmp_path / "torch.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, "-m", "everyframe", "doctor", "devices", "versions", "products"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1
    assert "asking torch for its devices died of SIGSEGV" in done.stdout
    assert "versions" in done.stdout
    assert "Traceback" not in done.stderr


def test_numbers_that_json_can_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("lie_beyond_measure", "measure_nothing_known")
    plants = [
        Probe(name, name, f"helpers.crashing_functions:{name}", 120.0, "do this") for name in names
    ]
    monkeypatch.setattr(diagnosing, "PROBES", plants)
    report = diagnose(names)
    assert [check.mark for check in report.checks] == ["error", "broke"]
    text = json.dumps(report.model_dump(mode="json"), allow_nan=False)
    assert '"error": "inf"' in text
