"""On a GPU: its facts are whole, every probe is content with it, and a small video is right."""

from __future__ import annotations

import pytest

from everyframe.core.facts import MachineFacts
from everyframe.doctor.diagnose import diagnose
from everyframe.doctor.probes import PROBES, Probe

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("item", PROBES, ids=lambda item: item.name)
def test_a_probe_is_content(item: Probe) -> None:
    (check,) = diagnose([item.name]).checks
    assert check.mark in ("fine", "note"), check.findings


def test_the_libraries_are_those_that_are_loaded() -> None:
    report = diagnose(["devices", "libraries"])
    assert set(report.machine) == set(MachineFacts((), 1).to_json())
    software = report.machine["software"]
    if software["cuda"]:
        assert {"cublas", "cudnn"} <= set(software["libraries"])
        assert software["driver"]


def test_a_small_video_is_right_in_each_precision() -> None:
    report = diagnose(["devices"], smoke=True)
    (check,) = (check for check in report.checks if check.name == "smoke")
    # What a machine that does other things as well has no time for is left out, with a line.
    left_out = [finding for finding in check.findings if "did not end within" in finding.message]
    assert [*check.findings] == left_out, check.findings
    assert "cuda:0 in bfloat16: off by" in " ".join(check.details)
