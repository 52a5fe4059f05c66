"""Freed memory that stays with the process of the tests."""

from __future__ import annotations

from everyframe.hardware import memory


def keep() -> None:
    """Let `memory.empty_cache` return nothing of the host's memory in this process.

    It does so between the stages of a run and at its end, after which the system zeroes every page
    again: a tenth of the time of tests that run tiny models. What is measured of memory is measured
    in processes of its own, which return it; so `hardware/test_memory.py` sees whether they do.
    """
    memory._malloc = _all_but_trim


def _all_but_trim(function: str, *arguments: int) -> None:
    if function != "malloc_trim":
        _MALLOC(function, *arguments)


_MALLOC = memory._malloc
