"""Run the doctor: collect facts once, run the requested checks, return a report.

Nothing found can crash it: facts and probes run in their own processes, and a check that raises is
reported as broken.

Read next: `checks`, `run_probes`, `report`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from everyframe._version import __version__
from everyframe.core.errors import InputError, did_you_mean
from everyframe.core.facts import MachineFacts
from everyframe.core.options import explain
from everyframe.core.paths import expand_path
from everyframe.doctor.checks import FACT_CHECKS, DoctorInput
from everyframe.doctor.probes import PROBES, Probe
from everyframe.doctor.reference_tables import look_up, table
from everyframe.doctor.report import Check, Finding, Report, verdict_line, worst
from everyframe.doctor.run_probes import devices_to_probe, probe
from everyframe.hardware.facts import query_machine
from everyframe.hardware.profiles import find_profile, is_report, read_facts

#: Known-issue tags of what every family of ours uses.
_ALWAYS_USED = ("dtype:float32", "op:conv3d", "component:vae", "attention:sdpa")


def check_names() -> tuple[str, ...]:
    """Names of all checks, in report order."""
    return (*FACT_CHECKS, *(item.name for item in PROBES))


def diagnose(
    names: Sequence[str] = (),
    *,
    profile: str | Path | None = None,
    model: str | None = None,
    smoke: bool = False,
    on_check: Callable[[Check], None] | None = None,
) -> Report:
    """Run the named checks (default: all) on this machine or on a profile.

    Args:
        names: checks to run.
        profile: name of a machine profile, or a file with facts.
        model: also plan this model, and count known issues of what it uses.
        smoke: also make a small video in each precision.
        on_check: called with each check as soon as it is done.

    Probes and `smoke` need the real machine.

    Raises:
        InputError: unknown check, profile or model.
    """
    wanted = _select_checks(names)
    patient = _patient(profile, model)
    done: list[Check] = []
    probes = [item for item in PROBES if item.name in wanted] if patient.is_real else []
    if patient.failed is not None:
        probes = []  # each would end as the question for the facts did
    if smoke and not patient.is_real:
        raise InputError("a machine that is not here can't make a video; leave out --smoke or --as")
    for check in _run(patient, wanted, probes, model, smoke):
        done.append(check)
        if on_check is not None:
            on_check(check)
    where = patient.machine.devices[0].name
    return Report(
        everyframe=__version__,
        profile=None if profile is None else str(profile),
        model=model,
        verdict=worst(check.mark for check in done),
        message=verdict_line(done, where),
        checks=tuple(done),
        tested=_tested_result(patient),
        machine=patient.machine.to_json(),
    )


def _select_checks(names: Sequence[str]) -> tuple[str, ...]:
    known = check_names()
    for name in names:
        if name not in known:
            raise InputError(
                f"there is no check {name!r}{did_you_mean(name, known)} "
                f"(checks are {', '.join(known)})"
            )
    return tuple(names) or known


def _patient(profile: str | Path | None, model: str | None) -> DoctorInput:
    if profile is not None:
        machine, failed = _made_up(profile, model), None
    else:
        asked = query_machine()
        machine, failed = asked.machine, None if asked.ended.is_well else asked.ended
    used = {*_ALWAYS_USED, *(f"dtype:{dtype}" for dtype in _dtypes(machine))}
    if model is not None:
        used.add(f"model:{model}")
    return DoctorInput(
        machine, None if profile is None else str(profile), frozenset(used), {}, failed
    )


def _made_up(profile: str | Path, model: str | None) -> MachineFacts:
    """The machine of a profile, or of the output of another machine's ``doctor --json``."""
    path = expand_path(profile, "the profile")
    given = read_facts(path) if path.is_file() else {}
    if model is not None or not is_report(given):
        return find_profile(profile).machine()
    try:
        machine = TypeAdapter(MachineFacts).validate_python(given.get("machine"))
    except ValidationError as error:
        raise InputError(f"{path}: {explain(error)}") from None
    if not machine.devices or machine.devices[-1].kind != "cpu":
        raise InputError(f"{path} is of no machine: devices must end with the CPU")
    return machine


def _dtypes(machine: MachineFacts) -> set[str]:
    """Half-precision dtypes that runs choose on this machine's first device."""
    from everyframe.precision.policy import CPU_BF16_PARAMETERS, ComponentNeeds, choose

    large = ComponentNeeds("denoiser", CPU_BF16_PARAMETERS)
    chosen, _ = choose(machine.devices[0], "auto", large)
    return {chosen.compute}


def _run(
    patient: DoctorInput,
    wanted: Sequence[str],
    probes: Sequence[Probe],
    model: str | None,
    smoke: bool,
) -> Iterator[Check]:
    """Run facts, then probes, then known issues and tested versions, which use probe results."""
    late = ("known-issues", "tested")
    for name, look in FACT_CHECKS.items():
        if name in wanted and name not in late:
            yield _safely(name, look, patient)
    devices = devices_to_probe(patient.machine)
    for item in probes:
        check = _safely(item.name, lambda _, item=item: probe(item, devices), patient)  # type: ignore[misc]
        if check.findings or check.details:  # else it had nothing to run on
            passed = {**patient.probed, item.name: check.mark == "fine"}
            patient = replace(patient, probed=passed)
        yield check
    if model is not None:
        yield _safely("model", lambda judged: _plan(judged, model), patient)
    if smoke:
        yield _safely("smoke", _smoke, patient)
    for name in late:
        if name in wanted:
            yield _safely(name, FACT_CHECKS[name], patient)


def _safely(name: str, look: Callable[[DoctorInput], Check], patient: DoctorInput) -> Check:
    """Run a check; if it raises, report it as broken and continue."""
    try:
        return look(patient)
    except Exception as error:  # noqa: BLE001 - reported as what it is
        text = f"the check itself broke: {type(error).__name__}: {' '.join(str(error).split())}"
        return Check.of(name, text[:300], [Finding(mark="broke", message=text[:300])])


def _plan(patient: DoctorInput, model: str) -> Check:
    """Whether this machine can run the model with its defaults, by its plan."""
    from everyframe.doctor.model_check import plan_of

    return plan_of(patient, model)


def _smoke(patient: DoctorInput) -> Check:
    """Run the embedded model in every precision of this device."""
    from everyframe.doctor.smoke_test import smoke

    return smoke(patient)


def _tested_result(patient: DoctorInput) -> dict[str, Any]:
    machine = replace(patient.machine, software=patient.software)
    match = look_up(machine, machine.devices[0], table().rows)
    return {"answer": match.answer, "minimum": table().minimum, "row": match.own}
