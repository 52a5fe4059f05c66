"""What the doctor finds on the ten machines that ship: their known issues, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from everyframe.core.errors import InputError
from everyframe.doctor.diagnose import check_names, diagnose
from everyframe.doctor.report import Report
from everyframe.hardware.profiles import find_profile, machine_names

#: Machine -> the known issues that are errors on it, each with the command that fixes it.
SICK = {
    "a100-oneflow": {
        "onediff-svd-attention-half-accum-nan": (
            "export ONEFLOW_ATTENTION_ALLOW_HALF_PRECISION_ACCUMULATION=False"
        )
    },
    "a30-oneflow": {
        "onediff-svd-attention-half-accum-nan": (
            "export ONEFLOW_ATTENTION_ALLOW_HALF_PRECISION_ACCUMULATION=False"
        )
    },
    "rtx2080ti-nexfort": {
        "nexfort-sm75-timestep-embedding": "export NEXFORT_FUSE_TIMESTEP_EMBEDDING=0"
    },
    "h20-cublas12.1": {"h20-cublas121-sigfpe": "pip install nvidia-cublas-cu12==12.5.2.13"},
    "3gpu-opensora": {
        "opensora-sp-divisibility": ("torchrun --nproc_per_node 2 scripts/inference.py CONFIG")
    },
}
WELL = ("v100-oneflow", "rtx4090-nexfort", "h20-cublas12.5.2.13", "m1", "cpu", "4gpu-stepvideo")

#: Troubles that are no known issue: what else is wrong with the machine, by check.
OTHERS = {"rtx2080ti-nexfort": {"versions"}, "h20-cublas12.1": {"tested"}}


def find_errors(report: Report) -> dict[str, list[Any]]:
    """Check -> its findings that are errors."""
    return {
        check.name: [finding for finding in check.findings if finding.mark == "error"]
        for check in report.checks
        if any(finding.mark == "error" for finding in check.findings)
    }


def test_each_machine_has_its_expectation() -> None:
    assert {*SICK, *WELL} == set(machine_names())


@pytest.mark.parametrize("name", sorted(SICK))
def test_what_is_wrong_is_reported_with_what_mends_it(name: str) -> None:
    report = diagnose(profile=name)
    found = find_errors(report)
    assert report.has_errors
    assert "Not ready" in report.message
    issues = {finding.issue: finding for finding in found.pop("known-issues")}
    assert set(issues) == set(SICK[name])
    for issue, command in SICK[name].items():
        assert issues[issue].fix[0].command == command
        assert issues[issue].cause
        assert issues[issue].sources
    assert set(found) == OTHERS.get(name, set())


@pytest.mark.parametrize("name", WELL)
def test_where_nothing_is_wrong_nothing_is_reported(name: str) -> None:
    report = diagnose(profile=name)
    assert find_errors(report) == {}
    assert not report.has_errors
    assert report.message.startswith("Ready on ")
    assert not any(check.mark == "broke" for check in report.checks)


def test_the_old_torch_is_named_with_the_least_that_works() -> None:
    versions = find_errors(diagnose(["versions"], profile="rtx2080ti-nexfort"))["versions"]
    texts = [finding.message for finding in versions]
    assert any("torch 2.3.0 is older than 2.11" in text for text in texts)
    assert 'pip install -U "torch>=2.11"' in [finding.fix[0].command for finding in versions]


def test_what_is_loaded_and_what_pip_lists_are_distinguished() -> None:
    (check,) = diagnose(["libraries"], profile="h20-cublas12.1").checks
    assert check.findings[0].message == "cublas 12.1.3 is loaded, and pip lists 12.6.4.1"
    (check,) = diagnose(["libraries"], profile="h20-cublas12.5.2.13").checks
    assert check.mark == "fine"


def changed(name: str, folder: Path, **software: Any) -> Path:
    """A file with that machine and other software."""
    profile = find_profile(name).model_dump(mode="json")
    profile["software"].update(software)
    path = folder / "mine.json"
    path.write_text(json.dumps(profile))
    return path


@pytest.mark.parametrize("value", ["0", "False", "false"])
def test_the_setting_that_mends_it_mends_it(tmp_path: Path, value: str) -> None:
    name = "ONEFLOW_ATTENTION_ALLOW_HALF_PRECISION_ACCUMULATION"
    report = diagnose(profile=changed("a100-oneflow", tmp_path, environment={name: value}))
    assert find_errors(report) == {}
    # And the variable is reported with its value here.
    (finding,) = next(check for check in report.checks if check.name == "environment").findings
    assert finding.message == f"{name}={value}"
    assert "attention sums in float32" in (finding.cause or "")


def test_the_setting_that_does_not_mend_it_does_not(tmp_path: Path) -> None:
    environment = {"ONEFLOW_ATTENTION_ALLOW_HALF_PRECISION_ACCUMULATION": "1"}
    report = diagnose(profile=changed("a100-oneflow", tmp_path, environment=environment))
    assert set(find_errors(report)) == {"known-issues"}


def test_a_card_with_the_same_chip_and_no_report_is_well(tmp_path: Path) -> None:
    profile = find_profile("h20-cublas12.1").model_dump(mode="json")
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**profile, "name": "NVIDIA H200"}))
    assert find_errors(diagnose(profile=path)) == {}


def test_imaginairy_on_an_m1(tmp_path: Path) -> None:
    packages = {"torch": "2.13.0", "imaginairy": "14.3.0"}
    report = diagnose(["known-issues"], profile=changed("m1", tmp_path, packages=packages))
    assert [each.issue for each in find_errors(report)["known-issues"]] == [
        "svd-float-half-time-embed"
    ]


def test_a_device_alone_has_no_software_to_judge() -> None:
    report = diagnose(profile="cuda-sm80")
    assert not report.has_errors


def test_probes_are_for_the_machine_that_is_here() -> None:
    names = {check.name for check in diagnose(profile="cpu").checks}
    assert names == {"devices", "versions", "libraries", "environment", "known-issues", "tested"}


def test_a_check_that_is_not_there() -> None:
    with pytest.raises(InputError, match=r"did you mean 'known-issues'\? \(checks are devices"):
        diagnose(["known-isues"], profile="cpu")
    assert {"products", "known-issues"} <= set(check_names())


def test_a_made_up_machine_makes_no_video() -> None:
    with pytest.raises(InputError, match="leave out --smoke or --as"):
        diagnose(profile="cpu", smoke=True)


def test_a_machine_of_somebodys_report(tmp_path: Path) -> None:
    """What ``doctor --json`` printed elsewhere can be judged here, say with newer known issues."""
    first = diagnose(profile="a100-oneflow")
    path = tmp_path / "theirs.json"
    path.write_text(json.dumps(first.model_dump(mode="json")))
    again = diagnose(profile=path)
    assert again.checks == first.checks
    assert again.machine == first.machine
    with pytest.raises(InputError, match=r"no rates to plan a model by; .* without --model"):
        diagnose(profile=path, model="shapes")


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "[" * 10**5,
        '{"type": "doctor", "machine": {"devices": 3}}',
        '{"type": "doctor", "machine": {"devices": [], "num_cores": 4}}',
    ],
)
def test_a_file_that_holds_no_facts(tmp_path: Path, text: str) -> None:
    path = tmp_path / "theirs.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"theirs\.json"):
        diagnose(profile=path)
