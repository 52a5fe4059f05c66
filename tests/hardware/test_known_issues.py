"""Known issues keep to their schema, each has source and way out; conditions mean what they say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from everyframe.core.errors import InputError
from everyframe.core.facts import DeviceFacts, MachineFacts, SoftwareFacts
from everyframe.hardware import known_issues
from everyframe.hardware.known_issues import explaining, find, parse
from everyframe.hardware.known_issues import known_issues as entries
from everyframe.hardware.profiles import find_profile

GIB = 1 << 30
CARD = DeviceFacts("NVIDIA GeForce RTX 4090", "cuda", 0, 24 * GIB, 24 * GIB, (8, 9))
CPU = DeviceFacts("a processor", "cpu", None, 16 * GIB, 12 * GIB)

ENTRY = """
- id: an-issue
  title: It breaks
  kind: slow
  severity: slow
  where: {WHERE}
  symptom: it is slow
  cause: a fault
  fix: [{do: something}]
  here: nothing
  sources: [a/b#1]
  certainty: low
"""


def machine(*devices: DeviceFacts, **software: Any) -> MachineFacts:
    return MachineFacts(
        (*devices, CPU), 4, software=SoftwareFacts(**{"system": "linux", **software})
    )


def meets(where: str, facts: MachineFacts, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether an issue with these conditions is found on that machine."""
    issues = parse(ENTRY.replace("WHERE", where))
    monkeypatch.setattr(known_issues, "known_issues", lambda: issues)
    return bool(find(facts))


def test_all_75_are_there_and_each_once() -> None:
    names = [issue.id for issue in entries()]
    assert len(names) == len(set(names)) == 75


@pytest.mark.parametrize("issue", entries(), ids=lambda issue: issue.id)
def test_an_entry_is_whole(issue: known_issues.Issue) -> None:
    assert all("#" in source or source.startswith("https://") for source in issue.sources)
    # Facts must be able to say no: something is asked of the machine or of what is used on it.
    assert issue.where != known_issues.Condition() or issue.uses
    assert all(":" in tag for tag in issue.uses)
    texts = (issue.symptom, issue.cause, issue.here)
    assert all(text.endswith((".", ")")) for text in texts), "whole sentences"
    assert not issue.title.endswith(".")
    assert issue.decided_by != "probe" or issue.probe


@pytest.mark.parametrize(
    ("where", "facts", "met"),
    [
        ("vendor: nvidia", machine(CARD), True),
        ("vendor: amd", machine(CARD), False),
        ("vendor: cpu", machine(), True),
        ("vendor: cpu", machine(CARD), False),  # it doesn't compute on its processor
        ("vendor: nvidia, capability: '>=8.9'", machine(CARD), True),
        ("vendor: nvidia, capability: '<8.9'", machine(CARD), False),
        ("vendor: nvidia, capability: '>=8.9'", machine(replace(CARD, capability=(12, 0))), True),
        ("name: 'RTX 40[0-9]0'", machine(CARD), True),
        ("name: 'RTX 50[0-9]0'", machine(CARD), False),
        ("packages: {oneflow: '>=0.9'}", machine(packages={"oneflow": "0.9.1.dev2+cu121"}), True),
        ("packages: {oneflow: '>=0.9'}", machine(), False),
        ("packages: {torch: '<2.3'}", machine(packages={"torch": "2.13.0+cpu"}), False),
        ("cublas: '<12.3.4.1'", machine(libraries={"cublas": "12.1.3"}), True),
        # What is loaded counts, not what pip lists.
        (
            "cublas: '<12.3.4.1'",
            machine(libraries={"cublas": "12.1.3"}, packages={"nvidia-cublas-cu12": "12.6.4.1"}),
            True,
        ),
        ("cublas: '<12.3.4.1'", machine(packages={"nvidia-cublas-cu12": "12.1.3.1"}), True),
        ("cublas: '<12.3.4.1'", machine(), False),
        ("cudnn: '>=9.8,<9.13'", machine(libraries={"cudnn": "9.10.2"}), True),
        ("macos: '<14.0'", machine(system="macos", system_version="13.6.1"), True),
        ("macos: '<14.0'", machine(system="linux", system_version="6.1"), False),
        ("system: [windows, wsl]", machine(system="wsl"), True),
        ("set: {A: '1|true'}", machine(environment={"A": "true"}), True),
        ("set: {A: '1|true'}", machine(environment={"A": "trueish"}), False),
        ("unless_set: {A: '0'}", machine(), True),
        ("unless_set: {A: '0'}", machine(environment={"A": "0"}), False),
        ("unless_set: {A: '0', B: '0'}", machine(environment={"B": "0"}), False),
        ("vendor: cpu, cpu_lacks: [amx_bf16, bf16]", machine(cpu_flags=("avx2",)), True),
        ("vendor: cpu, cpu_lacks: [amx_bf16, bf16]", machine(cpu_flags=("bf16",)), False),
        ("vendor: cpu, cpu_lacks: [amx_bf16, bf16]", machine(), False),  # nobody knows
        ("devices: '>=2'", machine(CARD, CARD), True),
        ("devices: '>=2'", machine(CARD), False),
        ("devices_not_dividing: 16", machine(CARD, CARD, CARD), True),
        ("devices_not_dividing: 16", machine(CARD, CARD), False),
        ("arch: ['gfx11*']", machine(replace(CARD, name="RX 7900 (gfx1100)")), True),
        ("arch: ['gfx11*']", machine(replace(CARD, name="MI300X (gfx942)")), False),
        ("any: [{vendor: amd}, {vendor: nvidia}]", machine(CARD), True),
        ("vendor: nvidia, any: [{cuda: '<12'}]", machine(CARD, cuda="12.6"), False),
    ],
)
def test_a_condition(
    where: str, facts: MachineFacts, met: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert meets(where, facts, monkeypatch) is met


TURING = replace(CARD, capability=(7, 5))
BOTH = "max_split_size_mb:128,expandable_segments:True"


@pytest.mark.parametrize(
    ("issue", "facts", "is_met"),
    [
        *(
            ("gtx16xx-fp16-conv-nan", machine(replace(TURING, name=name)), is_met)
            for name, is_met in {
                "NVIDIA GeForce GTX 1650": True, "NVIDIA T600": True, "NVIDIA T1000 8GB": True,
                "Quadro T2000 with Max-Q Design": True, "NVIDIA T550 Laptop GPU": True,
                "NVIDIA GeForce MX450": True, "NVIDIA CMP 30HX": True,
                "Tesla T4": False, "Quadro RTX 4000": False, "NVIDIA GeForce RTX 2060": False,
            }.items()
        ),
        *(
            ("nccl-p2p-consumer", machine(*[replace(CARD, name=name)] * 2), is_met)
            for name, is_met in {
                "NVIDIA GeForce RTX 4090": True, "NVIDIA GeForce RTX 5060 Ti": True,
                "NVIDIA RTX 4000 Ada Generation": False, "Quadro RTX 5000": False,
            }.items()
        ),
        *(
            ("expandable-segments-platform", machine(system="windows", environment=given), is_met)
            for given, is_met in (
                ({"PYTORCH_CUDA_ALLOC_CONF": BOTH}, True), ({"PYTORCH_ALLOC_CONF": BOTH}, True),
                ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, False),
            )
        ),
    ],
)  # fmt: skip
def test_an_issue_of_the_file(issue: str, facts: MachineFacts, is_met: bool) -> None:
    assert (issue in {match.issue.id for match in find(facts)}) is is_met


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("WHERE", "capability: 'at least 8'", "is no version specifier"),
        ("WHERE", "cards: 2", "is no option"),
        ("severity: slow", "severity: bad", "severity must be"),
        ("fix: [{do: something}]", "fix: []", "fix"),
        ("sources: [a/b#1]", "sources: []", "sources"),
    ],
)
def test_a_wrong_entry_is_named(old: str, new: str, text: str) -> None:
    with pytest.raises(InputError, match="known issue an-issue") as error:
        parse(ENTRY.replace(old, new).replace("WHERE", ""))
    assert text in str(error.value)


def test_tags_that_nobody_uses_are_reported() -> None:
    facts = find_profile("cpu").machine()
    by_id = {match.issue.id: match for match in find(facts, ["dtype:float32"])}
    assert by_id["cpu-16bit-slow"].unused == ("dtype:bfloat16",)
    by_id = {match.issue.id: match for match in find(facts, ["dtype:bfloat16"])}
    assert by_id["cpu-16bit-slow"].unused == ()


def test_an_error_text_finds_its_issue() -> None:
    message = "RuntimeError: mat1 and mat2 must have the same dtype, but got Float and Half"
    assert [issue.id for issue in explaining(message)] == ["svd-float-half-time-embed"]
    assert explaining("all is well") == ()


def test_software_must_be_known() -> None:
    with pytest.raises(ValueError, match="software"):
        find(MachineFacts((CPU,), 4))
