"""Environment of the processes that we start to compute in."""

from __future__ import annotations

import os

from everyframe.core.safe_path import SAFE_PATH_VARIABLE

#: torch asks Linux for pages of 2 MB where a tensor is that large: with pages of 4 kB a short run
#: of Wan, whose autoencoder allocates images for each layer, took 1.2 of 10 s more. A user's own
#: value stands.
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"

#: glibc gives threads arenas of their own, whose freed memory the others can't have: with a thread
#: for each run, a batch of four of the embedded model took 600 MB in place of 540. Threads that
#: compute allocate in turns, so one arena is as fast.
ONE_ARENA = "MALLOC_ARENA_MAX"

#: How threads of OpenMP wait for each other. GNU's spin, which is fastest if each has a core;
#: beside two busy programs, 30 steps of the embedded model took 36 s so, in place of 2.6 s.
WAIT_POLICY = "OMP_WAIT_POLICY"


def child_environment(*, is_busy: bool) -> dict[str, str]:
    """This process's environment with what ours need to be safe and fast.

    `is_busy`: whether other programs use the cores (`hardware.cpu.is_busy`).
    """
    return {ONE_ARENA: "1", **_read_by_torch(is_busy), **os.environ, SAFE_PATH_VARIABLE: "1"}


def set_variables(*, is_busy: bool) -> str:
    """Prefix of code for ``-c``, where a process is started without an environment of its own."""
    given = _read_by_torch(is_busy)
    return f"import os; [os.environ.setdefault(*each) for each in {[*given.items()]}]; "


def _read_by_torch(is_busy: bool) -> dict[str, str]:
    """What torch and its libraries read when they are imported."""
    return {HUGE_PAGES: "1", **({WAIT_POLICY: "passive"} if is_busy else {})}
