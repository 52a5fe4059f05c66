"""Checks that only read facts: devices, versions, libraries, known issues, environment variables.

Each maps a `DoctorInput` to a `Check`, so it works for machine profiles too. `run_probes` has the
checks that execute code.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from packaging.version import InvalidVersion, Version

from everyframe.core.bytes import format_bytes
from everyframe.core.facts import DeviceFacts, MachineFacts, SoftwareFacts
from everyframe.doctor import reference_tables
from everyframe.doctor.report import Check, Finding
from everyframe.hardware.isolation import ProcessResult
from everyframe.hardware.known_issues import Fix, Match, find


@dataclass(frozen=True)
class DoctorInput:
    """The machine to diagnose.

    Attributes:
        machine: its facts.
        profile: name of the profile, if it is not this machine.
        used: tags of what the model in question uses.
        probed: probe name -> whether all devices passed; empty before probes run, and for profiles.
        failed: how the process that collects facts ended, if it failed.
    """

    machine: MachineFacts
    profile: str | None = None
    used: frozenset[str] = frozenset()
    probed: dict[str, bool] = field(default_factory=dict)
    failed: ProcessResult | None = None

    @property
    def software(self) -> SoftwareFacts:
        """Software facts; empty for a profile of a device alone."""
        return self.machine.software or SoftwareFacts(system="linux")

    @property
    def is_real(self) -> bool:
        return self.profile is None


def devices(patient: DoctorInput) -> Check:
    """Compute devices, and GPUs that torch does not see."""
    message = "; ".join(_count_devices(patient.machine))
    found = []
    if patient.failed is not None:
        found.append(_no_answer(patient.failed))
    elif patient.software.driver and patient.is_real:
        if all(device.kind == "cpu" for device in patient.machine.devices):
            found.append(_unseen_card(patient.software))
    return Check.of("devices", message, found)


def _no_answer(failed: ProcessResult) -> Finding:
    """Why torch can't list devices: a broken GPU, or torch itself."""
    if (loss := failed.loss) is not None:
        return Finding(
            mark="error",
            message=f"when torch was asked for its devices, {loss.what} ({loss.message})",
            cause=loss.likely,
            fix=(Fix(do=loss.fix),),
        )
    # Such as TORCH_LOGS, of whose value torch's own import complains.
    named = [name for name in os.environ if name.startswith("TORCH") and name in str(failed)]
    if named:
        return Finding(
            mark="error",
            message=f"torch can't be imported with this {named[0]}",
            cause=str(failed).partition(" Valid settings:")[0],
            fix=(Fix(do="set it to what torch takes, or", command=f"unset {named[0]}"),),
        )
    return Finding(
        mark="error",
        message=f"asking torch for its devices {failed}",
        cause="torch, or a library that it loads, does not work here.",
        fix=(Fix(do="install torch again", command="pip install --force-reinstall torch"),),
    )


def _count_devices(machine: MachineFacts) -> Iterator[str]:
    """One phrase per kind of device."""
    alike: dict[tuple[str, int], list[DeviceFacts]] = {}
    for device in machine.devices:
        alike.setdefault((device.name, device.memory), []).append(device)
    for (name, memory), group in alike.items():
        times = f"{len(group)} × " if len(group) > 1 else ""
        first = group[0]
        number = ".".join(map(str, first.capability)) if first.capability else ""
        capability = f"capability {number}, " if number else ""
        free = format_bytes(min(device.free_memory for device in group))
        yield f"{times}{name} ({capability}{free} of {format_bytes(memory)} free)"


def _unseen_card(software: SoftwareFacts) -> Finding:
    build = software.packages.get("torch", "none")
    is_cpu_build = software.cuda is None and software.rocm is None
    return Finding(
        mark="error" if is_cpu_build else "note",
        message=f"there is an NVIDIA driver ({software.driver}), and torch sees no card",
        cause=(
            f"This torch ({build}) was built without CUDA."
            if is_cpu_build
            else "The driver may be too old for this torch, or the cards are hidden."
        ),
        fix=(
            Fix(
                do="install torch for CUDA, from the page that pytorch.org shows for your system",
                command="pip install --force-reinstall torch",
            ),
        ),
    )


def versions(patient: DoctorInput) -> Check:
    """Installed versions against the minimum that can work."""
    software = patient.software
    there = {"python": software.python, **software.packages}
    named = ("python", "torch", "triton", "diffusers", "transformers")
    message = ", ".join(f"{name} {there[name]}" for name in named if there.get(name))
    found = [
        Finding(
            mark="error",
            message=f"{name} {have} is older than {need}, the oldest that Everyframe works with",
            fix=(Fix(do="update it", command=_update(name, need)),),
        )
        for name, (have, need) in reference_tables.too_old(software).items()
    ]
    found += _without_kernels(patient)
    details = (f"{name} {version}" for name, version in software.packages.items())
    return Check.of("versions", message or "nothing is known of the software", found, details)


def _update(name: str, need: str) -> str:
    if name == "python":
        return f"install Python {need} or newer"
    return f'pip install -U "{name}>={need}"'


def _without_kernels(patient: DoctorInput) -> Iterator[Finding]:
    """GPUs for which this build of torch has no code, by torch's own list."""
    built = [name for name in patient.software.architectures if name.startswith(("sm_", "compute"))]
    seen = set()
    for device in patient.machine.devices:
        if device.capability is None or not built or device.capability in seen:
            continue
        seen.add(device.capability)
        if not any(_runs_on(name, device.capability) for name in built):
            yield Finding(
                mark="error",
                message=f"this torch has no kernels for {device.name}",
                cause=f"It was built for {', '.join(built)}.",
                fix=(
                    Fix(
                        do="install a build for this card, from the page that pytorch.org shows",
                        command="pip install --force-reinstall torch",
                    ),
                ),
            )


def _runs_on(architecture: str, capability: tuple[int, int]) -> bool:
    """Whether code runs on a GPU: machine code on the same major version, PTX on all later ones."""
    kind, _, number = architecture.partition("_")
    digits = "".join(letter for letter in number if letter.isdigit())
    built = int(digits[:-1]), int(digits[-1])
    if kind == "compute":
        return built <= capability
    return built[0] == capability[0] and built[1] <= capability[1]


def libraries(patient: DoctorInput) -> Check:
    """Loaded libraries against those that pip lists, and libraries loaded twice."""
    software = patient.software
    driver = [f"driver {software.driver}"] if software.driver else []
    cuda = [f"CUDA {software.cuda}"] if software.cuda else []
    rocm = [f"ROCm {software.rocm}"] if software.rocm else []
    loaded = [f"{name} {version}" for name, version in software.libraries.items()]
    found = [*_other_than_listed(software), *_twice(software)]
    return Check.of("libraries", ", ".join([*driver, *cuda, *rocm, *loaded]) or "none", found)


def _other_than_listed(software: SoftwareFacts) -> Iterator[Finding]:
    for name, version in software.libraries.items():
        package = software.package_of(name)
        if package is None or _is_same(software.packages[package], version):
            continue
        yield Finding(
            mark="note",
            message=f"{name} {version} is loaded, and pip lists {software.packages[package]}",
            cause="Another copy comes first in LD_LIBRARY_PATH, or in what torch was built with.",
            fix=(Fix(do="let torch find its own", command="unset LD_LIBRARY_PATH"),),
        )


def _is_same(listed: str, loaded: str) -> bool:
    try:
        one, other = Version(listed).release, Version(loaded).release
    except InvalidVersion:
        return listed == loaded
    length = min(len(one), len(other))
    return one[:length] == other[:length]


def _twice(software: SoftwareFacts) -> Iterator[Finding]:
    for name, paths in software.copies.items():
        yield Finding(
            mark="note",
            message=f"{len(paths)} copies of {name} are loaded",
            cause=f"They are {', '.join(paths)}; which one is called is chance.",
            fix=(Fix(do="keep one", command="unset LD_LIBRARY_PATH LD_PRELOAD"),),
        )


def known_issues(patient: DoctorInput) -> Check:
    """Known issues that match this machine, except those that can't occur here."""
    matches = find(_machine_facts(patient), patient.used)
    found = [finding for match in matches if (finding := _issue(match, patient)) is not None]
    avoided = sum(match.issue.avoided and not match.unused for match in matches)
    message = f"{len(found)} of this machine" if found else "none of this machine"
    if avoided:
        message += f"; {avoided} more that Everyframe avoids"
    return Check.of("known-issues", message, found, map(_in_short, matches))


def _in_short(match: Match) -> str:
    """One line about an issue whose conditions match, reported or not."""
    if match.unused:
        return f"{match.issue.id}: only with {', '.join(match.unused)}. {match.issue.here}"
    way = "avoided" if match.issue.avoided else f"decided by {match.issue.decided_by}"
    return f"{match.issue.id}: {way}. {match.issue.here}"


def _machine_facts(patient: DoctorInput) -> MachineFacts:
    machine = patient.machine
    return MachineFacts(machine.devices, machine.num_cores, machine.versions, patient.software)


def _issue(match: Match, patient: DoctorInput) -> Finding | None:
    """The finding for a known issue; None if it can't occur, or a probe passed."""
    issue = match.issue
    if issue.avoided or match.unused or match.needs == "plan":
        return None
    passed = patient.probed.get(issue.probe or "")
    if match.needs == "probe" and passed is not None:
        return None  # the probe tells by itself, with what it saw
    certain = match.needs is None and issue.certainty != "low"
    return Finding(
        mark="error" if issue.is_severe and certain else "note",
        message=issue.title + ("" if certain else " (not certain: only a probe can tell)"),
        cause=f"{issue.symptom} {issue.cause} {issue.here}",
        fix=issue.fix,
        issue=issue.id,
        sources=issue.sources,
        evidence={"device": match.device.name} if match.device else {},
    )


def environment(patient: DoctorInput) -> Check:
    """Environment variables that are set and change results, with their effect here."""
    found = tuple(
        reference_tables.findings(patient.software.environment, patient.machine.num_cores)
    )
    environment = patient.software.environment
    message = "variables that change results" if found else "nothing set that changes results"
    details = (f"{name}={value}" for name, value in environment.items())
    return Check.of("environment", message, found, details)


def tested_versions(patient: DoctorInput) -> Check:
    """Whether this combination was tested; if not, the row to contribute."""
    match = reference_tables.look_up(
        _machine_facts(patient), patient.machine.devices[0], reference_tables.table().rows
    )
    least = ", ".join(
        f"{name} {version}" for name, version in reference_tables.table().minimum.items()
    )
    found = []
    if match.answer == "known bad":
        assert match.row is not None
        found.append(
            Finding(
                mark="error",
                message=f"this combination is known to be bad: {match.row.evidence}",
                sources=(match.row.source,) if match.row.source else (),
            )
        )
    elif match.answer == "untested":
        others = f"; others report it good ({match.row.evidence})" if match.row else ""
        row = "if all is fine here, contribute this row of tested.yaml"
        found.append(
            Finding(
                mark="note",
                message=f"no report yet that this combination works{others}",
                fix=(Fix(do=row, command=reference_tables.as_line(match.own)),)
                if patient.is_real
                else (),
                sources=(match.row.source,) if match.row and match.row.source else (),
            )
        )
    return Check.of("tested", f"{match.answer}; at least {least}", found)


FactCheck = Callable[[DoctorInput], Check]

#: Checks on facts by name, in report order.
FACT_CHECKS: dict[str, FactCheck] = {
    "devices": devices,
    "versions": versions,
    "libraries": libraries,
    "environment": environment,
    "known-issues": known_issues,
    "tested": tested_versions,
}
