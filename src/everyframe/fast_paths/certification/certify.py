"""Create certificates: run trials of fast paths in a separate process and judge the results.

A path whose trial crashes is refused with the signal's name, one that hangs with its time limit; a
new process tries the remaining paths. A path that was out of time or memory, that lacks its kernels
in C, or whose process was ended from outside, gets no certificate and is tried again next time.
`trials` runs in the process; `certificates` stores the results.
"""

from __future__ import annotations

import json
import logging
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from everyframe.fast_paths.certificates import Certificate, Verdict, judge, keep
from everyframe.fast_paths.certification.target import CertificationTarget
from everyframe.fast_paths.certification.trials import TrialRequest, run
from everyframe.fast_paths.registry import FastPath
from everyframe.hardware.isolation import ProcessResult, run_isolated
from everyframe.ops.native.library import PATIENCE

_log = logging.getLogger(__name__)

#: Seconds allowed for a process to start: it imports torch, and for some families diffusers. The
#: first one on a machine compiles the kernels in C besides.
_START = 60.0

#: Seconds after its deadline at which a trial counts as hung.
GRACE = 10.0

#: Signals that others send; a crash has one of its own, such as SIGSEGV.
_FROM_OUTSIDE = frozenset({"SIGKILL", "SIGTERM", "SIGINT", "SIGHUP"})

_NO_TIME = "there was no time to try it"


@dataclass(frozen=True)
class CertifyResult:
    """Certificates that were made.

    Attributes:
        certificates: one per path that was tried.
        untried: reason by path name.
        tried_seconds: total time without process starts.
    """

    certificates: tuple[Certificate, ...]
    untried: dict[str, str]
    tried_seconds: float


def certify(
    subject: CertificationTarget, paths: Sequence[FastPath], seconds: float, *, grace: float = GRACE
) -> CertifyResult:
    """Try these paths for up to `seconds`, and save the certificates.

    Process starts do not count towards `seconds`, as they depend on the model and not on the paths.
    """
    left, made, untried = list(paths), [], {}
    spent = 0.0
    while left and spent < seconds:
        trial, ended = _run_trials(subject, left, seconds - spent, grace)
        spent += trial.seconds
        for path in [each for each in left if each.name in trial.ended]:
            left.remove(path)
            values = trial.ended[path.name]
            why_untried = _why_untried(values)
            if why_untried is None:
                made.append(_certificate(subject, path, **values))
            else:
                untried[path.name] = why_untried
        lost = next((untried[name] for name, values in trial.ended.items() if "lost" in values), "")
        if lost:
            # No path is to blame; and a certificate would outlive what was wrong with the card.
            untried |= {path.name: lost for path in left}
            break
        culprit = next((path for path in left if path.name == trial.running), None)
        if culprit is not None and ended.signal in _FROM_OUTSIDE:
            # By a person, or by the system as memory ran out: it may be well the next time.
            left.remove(culprit)
            untried[culprit.name] = f"the process that tried it was ended by {ended.signal}"
        elif culprit is not None and not ended.is_well:
            left.remove(culprit)
            made.append(_certificate(subject, culprit, error_text=_describe_end(ended, grace)))
        elif not trial.ended:
            why = f"no process could be made to try it ({ended})"
            untried |= {path.name: why for path in left}
            break
    untried |= {path.name: _NO_TIME for path in left if path.name not in untried}
    keep(made)
    for each in made:
        _log.info("%s: %s %s: %s", each.component, each.what, each.verdict, each.reason)
    return CertifyResult(tuple(made), untried, spent)


def _why_untried(values: Mapping[str, Any]) -> str | None:
    """Why the result of a trial makes no certificate; None if it makes one."""
    if "out_of_time" in values:
        return _NO_TIME
    if "not_made" in values:
        return str(values["not_made"])  # a compiler that failed may be mended
    if "out_of_memory" in values:
        # Others may have had that memory, and what they leave is no fault of the path.
        return f"there was too little free memory to try it ({values['out_of_memory']})"
    return f"the device was lost ({values['lost']})" if "lost" in values else None


@dataclass(frozen=True)
class _TrialLog:
    """Messages of a trial process: result by path, the path that was `running` last, its time."""

    ended: dict[str, dict[str, Any]]
    running: str | None
    seconds: float


def _run_trials(
    subject: CertificationTarget, paths: Sequence[FastPath], seconds: float, grace: float
) -> tuple[_TrialLog, ProcessResult]:
    with tempfile.TemporaryDirectory(prefix="everyframe-") as folder:
        file = Path(folder, "log")
        file.touch()
        orders = TrialRequest(subject, tuple(paths), str(file), seconds, grace)
        start = _START + (PATIENCE if orders.uses_kernels else 0.0)
        ended = run_isolated(run, orders, seconds=start + seconds + grace)
        lines = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
    results: dict[str, dict[str, Any]] = {}
    running = None
    for line in lines[1:]:
        name = line.pop("path")
        if line.pop("began", False):
            running = name
        else:
            results[name] = line
            running = None
    spent = time.time() - lines[0]["ready"] if lines else ended.seconds
    return _TrialLog(results, running, spent), ended


def _describe_end(ended: ProcessResult, grace: float) -> str:
    if ended.signal is None and ended.error == "ended with exit code 1":
        return f"did not end, {grace:.0f} s after its time was over"
    return str(ended)


def _certificate(
    subject: CertificationTarget,
    path: FastPath,
    *,
    error: float | None = None,
    limit: float | None = None,
    gain: float | None = None,
    worst: str = "",
    error_text: str = "",
    packages: Sequence[str] = (),
) -> Certificate:
    verdict: Verdict = "refused"
    reason = error_text
    if error is not None and limit is not None and gain is not None:
        verdict, reason = judge(error, limit, gain)
        if not error <= limit:
            reason = f"{worst} {reason}"
    return Certificate(
        what=path.name,
        component=subject.component,
        device=subject.device_key,
        plan=subject.plan_key,
        verdict=verdict,
        reason=reason,
        error=_finite(error),
        limit=_finite(limit),
        gain=_finite(gain),
        date=date.today().isoformat(),
        packages=tuple(packages),
    )


def _finite(value: float | None) -> float | None:
    """The value, or None if JSON can't express it; the reason then states it."""
    return value if value is not None and math.isfinite(value) else None
