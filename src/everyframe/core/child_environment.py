"""Environment of the processes that we start to compute in."""

from __future__ import annotations

import os
from collections.abc import Mapping

from everyframe.core.safe_path import SAFE_PATH_VARIABLE

#: torch asks Linux for pages of 2 MB where a tensor is that large: with pages of 4 kB a short run
#: of Wan, whose autoencoder allocates images for each layer, took 1.2 of 10 s more.
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"

#: Iterations for which GNU's OpenMP lets a thread spin before it sleeps. This many are longer than
#: the pause between two operations. By default there are 300,000, some milliseconds: where another
#: process has a core, threads spin in its place, and a step took 10 times as long.
SPIN_COUNT = "GOMP_SPINCOUNT"
_SPINS = "10000"

#: A user's word on the same, which `SPIN_COUNT` would overrule.
_WAIT_POLICY = "OMP_WAIT_POLICY"


def fast_defaults(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that make computing faster; those that the environment has stand."""
    found = {HUGE_PAGES: "1"} | ({} if _WAIT_POLICY in environment else {SPIN_COUNT: _SPINS})
    return {name: value for name, value in found.items() if name not in environment}


def child_environment() -> dict[str, str]:
    """This process's environment with what ours need to be safe and fast."""
    return {**os.environ, **fast_defaults(os.environ), SAFE_PATH_VARIABLE: "1"}


def set_fast_defaults() -> str:
    """Code that sets them, for ``-c`` where a process has no environment of its own."""
    return f"import os; os.environ.update({fast_defaults(os.environ)!r}); "
