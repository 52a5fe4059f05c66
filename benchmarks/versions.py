"""The versions that a result page names, in one line of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # some benchmarks run on a copy of the package, which is found later
    from everyframe.core.facts import MachineFacts


def versions_of(facts: MachineFacts) -> str:
    """Name and version of everything that the machine's facts know."""
    return ", ".join(f"{name} {version}" for name, version in facts.versions.items())
