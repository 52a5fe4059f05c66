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

#: Prefix of code for ``-c``, where a process is started without an environment of its own.
SET_HUGE_PAGES = f"import os; os.environ.setdefault({HUGE_PAGES!r}, '1'); "


def child_environment() -> dict[str, str]:
    """This process's environment with what ours need to be safe and fast."""
    return {HUGE_PAGES: "1", ONE_ARENA: "1", **os.environ, SAFE_PATH_VARIABLE: "1"}
