"""Look up and create fast-path certificates for the components of a plan.

Before a long run, missing certificates that it needs at once are created (at most 3 s, and 30 s
before a run of many minutes on a CPU, or one after many minutes of such runs).
`everyframe fast-paths --certify` creates all of them (at most 2 minutes). `blocked_paths.py` has
the reasons that overrule any trial.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from everyframe.core.facts import DeviceFacts
from everyframe.core.plan import ComponentPlan, FastPathChoice, Precision
from everyframe.core.quality import PRODUCTS
from everyframe.fast_paths.certificates import Certificate, device_key, plan_key
from everyframe.fast_paths.certificates import find as stored
from everyframe.fast_paths.certification.target import CertificationTarget
from everyframe.fast_paths.computing_time import (
    add_computing_time,
    computing_time,
    reset_computing_time,
)
from everyframe.fast_paths.registry import CATALOGUE, PRECISIONS, FastPath
from everyframe.planning.dry_runs import DryRun, largest_scores

_log = logging.getLogger(__name__)

#: Seconds for certificates in the first run of a plan, and before one of many minutes.
AT_ONCE, IN_ALL = 3.0, 30.0
#: The same if the user asks for all: a slow CPU needs more than 30 s for a pipeline.
ON_REQUEST = 120.0

#: Seconds for `--compile` to compile and try a block of every kind.
FOR_COMPILING = 900.0

#: Operations of a run from which trying attention pays: about ten seconds of computing.
_LONG = {"cpu": 1e12}
_LONG_ON_CARDS = 1e13

#: Operations of a run from which half a minute of trials pays: a quarter of an hour on a core.
VERY_LONG = 1e14

#: Seconds of earlier runs that count as much: with these, trials take a tenth of past computing.
MANY_SECONDS = 10 * IN_ALL

#: Reason for a path of a record: it is tried however short the run is, to reproduce the bits.
RECORDED = "the record has it; a first run tries it"

#: Bytes of attention scores from which their memory matters.
_MUCH = 64e6


@dataclass(frozen=True)
class Certificates:
    """Certificates of a device with that many threads, created once per plan."""

    device: DeviceFacts
    num_threads: int

    def of(
        self, component: str, precision: Precision, runs: Sequence[DryRun]
    ) -> Mapping[str, Certificate]:
        """Certificates of a component, by path name."""
        return stored(*self.subject(component, precision, runs).keys)

    def subject(
        self, component: str, precision: Precision, runs: Sequence[DryRun]
    ) -> CertificationTarget:
        """The component as a certification target."""
        work: dict[object, float] = {}
        for run in runs:
            for product, operations in run.found.work.products:
                total = operations * run.stage_call.num_calls
                work[product] = work.get(product, 0.0) + total
        if precision.weight_dtype in PRODUCTS:  # a path of the plain layers, like any other
            precision = replace(precision, weight_dtype="")
        heaviest = sorted(work.items(), key=lambda pair: pair[1], reverse=True)
        return CertificationTarget(
            component=component,
            device=self.device,
            num_threads=self.num_threads,
            precision=precision,
            plan_key=plan_key(component, precision, [run.key for run in runs]),
            device_key=device_key(self.device, self.num_threads),
            calls=tuple(run.call() for run in runs),
            products=tuple(heaviest),  # type: ignore[arg-type]
        )


def is_long(runs: Sequence[DryRun], device: DeviceFacts) -> bool:
    """Whether a run computes enough that some seconds of fast-path trials pay."""
    return operations(runs) >= _LONG.get(device.kind, _LONG_ON_CARDS)


def is_very_long(runs: Sequence[DryRun], past_seconds: float = 0.0) -> bool:
    """Whether a run, with the past ones, computes so much that half a minute of trials pays."""
    return operations(runs) + VERY_LONG * past_seconds / MANY_SECONDS >= VERY_LONG


@dataclass(frozen=True)
class MissingCertificates:
    """Paths of one component that lack a certificate in this precision; `choices` are on all."""

    component: str
    precision: Precision
    paths: tuple[FastPath, ...]
    choices: tuple[FastPathChoice, ...] = ()

    @property
    def has_kernels(self) -> bool:
        """Whether kernels of long runs are among the paths."""
        return any(path.in_long_runs for path in self.paths)


def missing_at_once(
    parts: Sequence[ComponentPlan], runs: Sequence[DryRun], device: DeviceFacts
) -> list[MissingCertificates]:
    """Certificates that the plan expects and needs now.

    Always precisions, and attention with large scores, since memory planning depends on them; other
    paths for long runs only, and with kernels that earlier runs are the reason of.
    """
    long = is_long(runs, device)
    found = []
    for part in parts:
        holds_much = largest_scores(_runs_of(part.name, runs)) > _MUCH
        expected = {
            CATALOGUE[each.path]: each.reason == RECORDED
            for each in part.choices
            if each.verdict == "expected"
        }
        tries_all = long or holds_much or any(path.in_long_runs for path in expected)
        wanted = tuple(
            path
            for path, is_recorded in expected.items()
            if tries_all or is_recorded or path.name in PRECISIONS or path.on_demand
        )
        if wanted:
            found.append(MissingCertificates(part.name, part.precision, wanted, part.choices))
    return found


def make_at_once(
    certificates: Certificates | None, parts: Sequence[ComponentPlan], runs: Sequence[DryRun]
) -> list[str] | None:
    """Create the certificates that these components need now.

    Returns notes on kernels that are tried because of earlier runs; None if no path was expected.
    """
    if not any(each.verdict == "expected" for part in parts for each in part.choices):
        return None
    if certificates is None:
        return []
    missing = missing_at_once(parts, runs, certificates.device)

    keys = {
        each.component: certificates.subject(each.component, each.precision, own).keys
        for each in missing
        if each.has_kernels and not is_very_long(own := _runs_of(each.component, runs))
    }
    past = {name: computing_time(*each) for name, each in keys.items()}
    is_long = certificates.device.kind == "cpu" and is_very_long(runs)
    make(certificates, missing, runs, IN_ALL if is_long or past else AT_ONCE)
    return [
        f"{name}: its fast paths were tried before this run, as runs of these sizes have computed "
        f"for {seconds:.0f} s without them"
        for name, seconds in past.items()
        if computing_time(*keys[name]) < seconds
    ]


def count_stage(
    certificates: Certificates | None,
    parts: Sequence[ComponentPlan],
    runs: Sequence[DryRun],
    stage: str,
    seconds: float,
) -> None:
    """Count the seconds of a stage for its components with untried kernels, by their operations."""
    if certificates is None:
        return
    here = [run for run in runs if run.stage_call.stage == stage]
    for part in parts:
        share = operations(_runs_of(part.name, here)) / max(operations(here), 1.0)
        is_untried = any(
            each.verdict == "untried" and CATALOGUE[each.path].in_long_runs for each in part.choices
        )
        if share and is_untried:
            subject = certificates.subject(part.name, part.precision, _runs_of(part.name, runs))
            add_computing_time(*subject.keys, share * seconds)


def make(
    certificates: Certificates,
    missing: Sequence[MissingCertificates],
    runs: Sequence[DryRun],
    seconds: float,
) -> dict[str, str]:
    """Create missing certificates within a total of `seconds`; return skipped paths and why.

    The component with the most work comes first.
    """
    if not missing:
        return {}
    # Late import: brings torch, and most plans miss none.
    from everyframe.fast_paths.certification.certify import certify

    left = seconds
    untried: dict[str, str] = {}
    for each in sorted(missing, key=lambda each: -operations(_runs_of(each.component, runs))):
        subject = certificates.subject(
            each.component, each.precision, _runs_of(each.component, runs)
        )
        on_demand = tuple(path for path in each.paths if path.on_demand)
        at_once = tuple(path for path in each.paths if path.at_once)
        rest = tuple(path for path in each.paths if not (path.at_once or path.on_demand))
        # Some need sizes only; a process without a family's code starts sooner.
        for paths, needed, most in (
            (at_once, replace(subject, calls=()), left),
            (rest, subject, left),
            (on_demand, subject, FOR_COMPILING),
        ):
            if paths and most > 0:
                if each.has_kernels:
                    # Reset before the trials: if they are interrupted, the next run does not repeat
                    # them.
                    reset_computing_time(*subject.keys)
                if paths is on_demand:
                    needed = replace(subject, paths=_others(subject, each))
                made = certify(needed, paths, most)
                untried |= {f"{each.component} {name}": why for name, why in made.untried.items()}
                left -= 0.0 if paths is on_demand else made.tried_seconds
    for name, why in untried.items():
        _log.info("%s: %s", name, why)
    return untried


def _others(subject: CertificationTarget, missing: MissingCertificates) -> tuple[str, ...]:
    """Paths that a run uses besides those that are missing, in its order."""
    certified = stored(*subject.keys)
    gains = {
        choice.path: choice.gain if choice.path not in certified else certified[choice.path].gain
        for choice in missing.choices
        if choice.verdict in ("certified", "pinned")
        or (choice.path in certified and certified[choice.path].verdict == "certified")
    }
    names = sorted(gains, key=lambda name: -(gains[name] or 0.0))
    return tuple(name for name in names if name not in PRECISIONS and not CATALOGUE[name].on_demand)


def _runs_of(component: str, runs: Sequence[DryRun]) -> list[DryRun]:
    return [run for run in runs if run.stage_call.component == component]


def operations(runs: Sequence[DryRun]) -> float:
    """Operations of matrix products in all calls for one video."""
    return sum(run.found.work.operations * run.stage_call.num_calls for run in runs)
