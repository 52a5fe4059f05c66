"""A report is data with a schema, with rows and variables; shared, it holds nothing private."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from everyframe.core.errors import InputError
from everyframe.core.facts import DeviceFacts, MachineFacts, SoftwareFacts
from everyframe.doctor import checks, reference_tables
from everyframe.doctor.checks import DoctorInput, devices, libraries, versions
from everyframe.doctor.diagnose import diagnose
from everyframe.doctor.report import Check, Finding, Report, shareable, verdict_line, worst
from everyframe.hardware.known_issues import read_yaml

CPU = DeviceFacts("AMD EPYC", "cpu", None, 1 << 34, 1 << 33)
CARD = DeviceFacts("NVIDIA H20", "cuda", 0, 1 << 36, 1 << 36, (9, 0))
H200 = DeviceFacts("NVIDIA H200", "cuda", 0, 1 << 37, 1 << 37, (9, 0))
PROJECT = Path(__file__).parent.parent.parent / "pyproject.toml"


def patient(*cards: DeviceFacts, **software: Any) -> DoctorInput:
    facts = SoftwareFacts(**{"system": "linux", "python": "3.11.9", **software})
    return DoctorInput(MachineFacts((*cards, CPU), 4, software=facts))


def test_json_keeps_to_the_schema() -> None:
    report = diagnose(profile="a100-oneflow")
    text = json.dumps(report.model_dump(mode="json"), allow_nan=False)
    assert Report(**json.loads(text)).checks == report.checks
    with pytest.raises(InputError, match="mood is no option"):
        Report(**{**json.loads(text), "mood": "good"})
    with pytest.raises(InputError, match="verdict"):
        Report(**{**json.loads(text), "verdict": "good"})


def test_the_verdict_counts() -> None:
    trouble, note = Finding(mark="error", message="a"), Finding(mark="note", message="b")
    one, two = Check.of("x", "x", [trouble, note]), Check.of("y", "y", [note])
    assert (one.mark, two.mark) == ("error", "note")
    assert verdict_line([one, two], "a card") == "Not ready: 1 error, 2 notes on a card."
    assert verdict_line([two], "a card") == "Ready on a card: 1 note."
    assert verdict_line([], "a card") == "Ready on a card."
    assert worst([]) == "fine"
    assert worst(["broke", "note"]) == "broke"


def test_what_is_shared_holds_nothing_private() -> None:
    private = {"/home/ada/work": "~", "wintermute": "(host)", "ada": "(user)"}
    data = {
        "message": "on WINTERMUTE, /home/ada/work/venv/libcublas.so and /Users/bob/x",
        "list": ["canada", "ada"],
        "details": ["LD_LIBRARY_PATH=/secret/a place:/b", "OMP_NUM_THREADS=1"],
        "cause": "with LD_PRELOAD=/secret/lib.so and CUBLAS_WORKSPACE_CONFIG=:4096:8 it fails",
        "environment": {
            "LD_LIBRARY_PATH": "/secret/place",
            "EVERYFRAME_RUNS": "/secret/runs",
            "NCCL_P2P_DISABLE": "1",
        },
        "number": 3,
    }
    assert shareable(data, private) == {
        "message": "on (host), ~/venv/libcublas.so and ~/x",
        "list": ["canada", "(user)"],
        "details": ["LD_LIBRARY_PATH=(set)", "OMP_NUM_THREADS=1"],
        "cause": "with LD_PRELOAD=(set) and CUBLAS_WORKSPACE_CONFIG=:4096:8 it fails",
        "environment": {
            "LD_LIBRARY_PATH": "(set)",
            "EVERYFRAME_RUNS": "(set)",
            "NCCL_P2P_DISABLE": "1",
        },
        "number": 3,
    }


def test_the_minimum_is_that_of_the_project() -> None:
    text = PROJECT.read_text()
    for name, least in reference_tables.table().minimum.items():
        pattern = rf'requires-python = ">={least}"' if name == "python" else rf'"{name}>={least}"'
        assert re.search(pattern, text), f"{name} {least} is not what pyproject.toml says"


@pytest.mark.parametrize(
    ("judged", "answer"),
    [
        (patient(packages={"torch": "2.13.0+cpu"}), "tested"),
        (patient(packages={"torch": "2.12.0+cpu"}), "untested"),
        (patient(CARD, libraries={"cublas": "12.1.3"}), "known bad"),
        (patient(CARD, libraries={"cublas": "12.5.2.13"}), "untested"),  # by us
        (patient(CARD), "untested"),  # which cuBLAS is not known
        (patient(H200, libraries={"cublas": "12.1.3"}), "untested"),  # not the card of the report
    ],
)
def test_the_answer_of_the_table(judged: DoctorInput, answer: str) -> None:
    found = reference_tables.look_up(
        judged.machine, judged.machine.devices[0], reference_tables.table().rows
    )
    assert found.answer == answer


def test_the_row_to_contribute_makes_it_tested() -> None:
    judged = patient(CARD, driver="550.1", cuda="12.6", libraries={"cublas": "12.5.2.13"})
    found = reference_tables.look_up(judged.machine, CARD, reference_tables.table().rows)
    line = reference_tables.as_line(found.own)
    (row,) = read_yaml(line)
    again = reference_tables.look_up(judged.machine, CARD, (reference_tables.TestedRow(**row),))
    assert again.answer == "tested"
    other = patient(CARD, driver="550.1", cuda="12.6", libraries={"cublas": "12.6.4.1"})
    assert (
        reference_tables.look_up(other.machine, CARD, (reference_tables.TestedRow(**row),)).answer
        == "untested"
    )
    (finding,) = checks.tested_versions(judged).findings
    assert finding.fix[0].command == line
    assert "12.4.5.8" in finding.message  # what others found


def test_two_libraries_with_the_same_specifier_are_two_conditions() -> None:
    """One took the place of the other, and a row fitted whose CUDA is another."""
    row = reference_tables.TestedRow(
        device="H20", kind="cuda", cuda=">=12.6", cublas=">=12.6", result="bad", by="report",
        date="2026-12-01", evidence="none",
    )  # fmt: skip
    judged = patient(CARD, cuda="12.4", libraries={"cublas": "12.6.4.1"})
    assert reference_tables.look_up(judged.machine, CARD, (row,)).answer == "untested"


def test_every_variable_of_the_table_means_something() -> None:
    names = [name for entry in reference_tables.variables_table() for name in entry.names]
    assert len(names) == len(set(names))
    for name in ("ONEFLOW_MLIR_CSE", "ONEFLOW_NEVER_HEARD_OF", "NEXFORT_NEW", "NEXFORT_DEBUG"):
        entry = reference_tables.meaning(name)
        assert entry is not None
        assert entry.here
    assert reference_tables.meaning("EDITOR") is None


def test_variables_are_reported_by_value() -> None:
    assert not [*reference_tables.findings({"OMP_NUM_THREADS": "²"}, 4)]
    found = list(reference_tables.findings({"NVIDIA_TF32_OVERRIDE": "1"}, 4))
    assert [finding.mark for finding in found] == ["error"]
    assert found[0].fix[0].command == "unset NVIDIA_TF32_OVERRIDE"
    assert list(reference_tables.findings({"NVIDIA_TF32_OVERRIDE": "0"}, 4)) == []
    (threads,) = reference_tables.findings({"OMP_NUM_THREADS": "1"}, 4)
    assert threads.mark == "note"
    assert list(reference_tables.findings({"OMP_NUM_THREADS": "4"}, 4)) == []


def test_a_card_that_torch_does_not_see() -> None:
    check = devices(patient(driver="550.1", packages={"torch": "2.13.0+cpu"}))
    assert check.mark == "error"
    assert "built without CUDA" in (check.findings[0].cause or "")
    check = devices(patient(driver="550.1", cuda="12.6"))
    assert check.mark == "note"
    assert devices(patient()).mark == "fine"
    assert devices(patient(CARD, driver="550.1", cuda="12.6")).mark == "fine"


@pytest.mark.parametrize(
    ("architectures", "mark"),
    [
        (("sm_80", "sm_90"), "fine"),
        (("sm_90a",), "fine"),
        (("sm_70", "sm_80"), "error"),
        (("sm_80", "compute_80"), "fine"),  # PTX is compiled for later cards
        (("sm_100",), "error"),
        ((), "fine"),  # not known
    ],
)
def test_a_build_without_kernels_for_the_card(architectures: tuple[str, ...], mark: str) -> None:
    assert versions(patient(CARD, architectures=architectures)).mark == mark


def test_two_copies_of_a_library() -> None:
    check = libraries(patient(copies={"cublas": ("/a/libcublas.so.12", "/b/libcublas.so.12")}))
    assert check.findings[0].message == "2 copies of cublas are loaded"
