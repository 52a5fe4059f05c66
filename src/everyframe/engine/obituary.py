"""What is said of a worker that died: of what, where it was, what is known of that, what to do.

The libraries that were loaded are asked for in a process of their own, since this one has none.
No torch here. Read next: `launch.py`, `trail.py`; `everyframe.hardware.known_issues`.
"""

from __future__ import annotations

from everyframe.core.errors import WorkerDiedError
from everyframe.core.facts import MachineFacts
from everyframe.engine.process import Worker
from everyframe.engine.trail import Whereabouts, read_trail
from everyframe.hardware.isolated import signal_name
from everyframe.hardware.known_issues import Issue, explaining, find
from everyframe.hardware.lost import loss_in
from everyframe.hardware.machine import ask
from everyframe.runs.folder import RunFolder

#: Libraries that matter to a crash on a GPU, and what they are called.
_LIBRARIES = {"cublas": "cuBLAS", "cudnn": "cuDNN", "hipblas": "hipBLAS", "nccl": "NCCL"}


def obituary(worker: Worker, code: int, run: RunFolder | None) -> WorkerDiedError:
    """The error for a worker that ended with that exit code, negative for a signal.

    `run` is where how far it came is kept.
    """
    where = read_trail(worker.trail)
    rank = f" of rank {worker.job.rank}" if len(worker.job.weights) > 1 else ""
    # A negative code is the signal that ended it.
    died = f"died of {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
    said = [f"the worker process{rank} {died} {where}"]
    if code == -9:
        said.append(
            "nobody here ended it, so most likely the system did, because memory ran out: a "
            "smaller --size or --num-frames takes less, and `everyframe plan` forecasts how much"
        )
    elif (loss := loss_in(worker.printed())) is not None:
        said.append(f"its device was lost {loss}")
    else:
        said += _of_the_machine(ask().machine, signal_name(-code), where, worker.printed())
    return WorkerDiedError("; ".join([*said, *kept_in(run)]))


def kept_in(run: RunFolder | None) -> list[str]:
    """What is said of a run that is kept where it ended."""
    return [] if run is None else [f"what it came to is kept: everyframe resume {run.name}"]


def _of_the_machine(
    machine: MachineFacts, signal: str, where: Whereabouts, printed: str
) -> list[str]:
    """What was loaded, which known issue that is, and what to do about it."""
    software, said = machine.software, []
    if software is not None:
        loaded = [
            f"{title} {version}"
            for name, title in _LIBRARIES.items()
            if (version := software.library(name)) is not None
        ]
        torch = software.packages.get("torch")
        said.append("loaded were " + ", ".join([f"torch {torch}", *loaded]))
    issue = matching(machine, signal, printed)
    if issue is None:
        said.append("no known issue matches; `everyframe doctor` tries what this machine can do")
        return said
    mend = issue.mend[0]
    command = f": {mend.command}" if mend.command else ""
    said.append(f"this is known ({issue.id}: {issue.title}); {mend.do}{command}")
    return said


def matching(machine: MachineFacts, signal: str, printed: str) -> Issue | None:
    """The known issue that this most likely is: of this machine, and telling of that signal.

    What was printed may name one by its own words.
    """
    if machine.software is None:
        return None
    here = [match.issue for match in find(machine)]
    by_words = [issue for issue in explaining(printed) if issue in here]
    by_signal = [issue for issue in here if issue.severity == "crash" and _tells(issue, signal)]
    return next(iter([*by_words, *by_signal]), None)


def _tells(issue: Issue, signal: str) -> bool:
    return signal in " ".join((issue.title, issue.symptom, issue.cause, *issue.messages))
