"""What is said of memory beside a fault."""

from __future__ import annotations

import sys

import pytest

from everyframe.core.facts import DeviceFacts
from everyframe.hardware.peak import memory_verdict, peak_bytes


@pytest.mark.skipif(sys.platform == "win32", reason="Windows doesn't tell")
def test_the_peak_is_that_of_this_process() -> None:
    peak = peak_bytes(DeviceFacts("cpu", "cpu", None, 1, 1))
    assert peak is not None
    # Python with torch holds some hundred megabytes; a wrong unit would be off by a thousand.
    assert 2e7 < peak < 2e10
    assert "not memory" in memory_verdict(DeviceFacts("cpu", "cpu", None, 2 * peak, 0))
    assert "near the limit" in memory_verdict(DeviceFacts("cpu", "cpu", None, peak, 0))


def test_nothing_is_said_where_nothing_is_known() -> None:
    assert memory_verdict(DeviceFacts("gpu", "mps", 0, 10**9, 10**9)) == ""
