"""Known issues as data, and a matcher that compares their conditions with machine facts.

``known_issues.yaml`` holds the entries and `Issue` is their schema. `find` reports which issues
match the facts and whether the affected features are in use; it runs nothing. Probes that test the
rest are in `everyframe.doctor.probes`. ``docs/reference/known-issues.md`` is generated from the
entries.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import yaml
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version
from pydantic import Field, field_validator

from everyframe.core.errors import InputError
from everyframe.core.facts import DeviceFacts, MachineFacts, SoftwareFacts
from everyframe.core.options import Options

Kind = Literal[
    "overflow", "rounding", "wrong-kernel", "unsupported", "mismatch", "dtype", "distributed",
    "memory", "slow", "differs",
]  # fmt: skip

#: Effect of an issue on a run, worst first.
Severity = Literal["crash", "hang", "wrong", "error", "memory", "slow", "differs"]

#: Severities that stop a run or spoil its result; the others cost time or memory.
SEVERE = ("crash", "hang", "wrong", "error")

Vendor = Literal["nvidia", "amd", "apple", "intel", "ascend", "cpu"]


class Condition(Options):
    """Conditions on a machine; all that are given must hold. Versions are PEP 440 specifiers.

    Attributes:
        vendor: vendor of one device; ``cpu`` for a machine that computes on its CPU.
        capability: CUDA capability of the same device.
        name: regular expression for its name.
        arch: patterns of ROCm architecture names.
        devices: number of accelerators.
        devices_not_dividing: holds if the number of accelerators does not divide this one.
        packages: installed packages.
        cublas: the loaded version; `cudnn` likewise.
        set: regular expressions that whole values of variables match; `unless_set`: that they do
            not.
        any: one of these conditions must hold too.
    """

    vendor: Vendor | None = None
    capability: str | None = None
    name: str | None = None
    arch: tuple[str, ...] = ()
    devices: str | None = None
    devices_not_dividing: int | None = Field(default=None, gt=1)
    packages: dict[str, str] = Field(default_factory=dict)
    cuda: str | None = None
    cublas: str | None = None
    cudnn: str | None = None
    driver: str | None = None
    macos: str | None = None
    system: tuple[Literal["linux", "wsl", "macos", "windows"], ...] = ()
    set: dict[str, str] = Field(default_factory=dict)
    unless_set: dict[str, str] = Field(default_factory=dict)
    cpu_lacks: tuple[str, ...] = ()
    any: tuple[Condition, ...] = ()

    @field_validator("capability", "devices", "cuda", "cublas", "cudnn", "driver", "macos")
    @classmethod
    def _is_specifier(cls, value: str | None) -> str | None:
        return value if value is None else _checked_specifier(value)

    @field_validator("packages")
    @classmethod
    def _are_specifiers(cls, value: dict[str, str]) -> dict[str, str]:
        return {name: _checked_specifier(text) for name, text in value.items()}

    @field_validator("set", "unless_set")
    @classmethod
    def _are_patterns(cls, value: dict[str, str]) -> dict[str, str]:
        for pattern in value.values():
            re.compile(pattern)
        return value


class Fix(Options):
    """One way out: what to `do`, and the `command` or setting that does it."""

    do: str
    command: str | None = None


class Issue(Options):
    """One known issue.

    Attributes:
        uses: features that must be in use for it to matter (``dtype:float16``, ``model:flux``).
        decided_by: what settles whether it applies: ``facts``, a ``probe`` or a ``plan``.
        set: variables that fix it.
        here: what Everyframe does about it.
        avoided: that makes it impossible in Everyframe's runs.
        probe: the doctor's nearest probe.
    """

    id: str = Field(pattern=r"^[a-z0-9-]+$")
    title: str
    kind: Kind
    severity: Severity
    where: Condition = Condition()
    uses: tuple[str, ...] = ()
    decided_by: Literal["facts", "probe", "plan"] = "facts"
    symptom: str
    messages: tuple[str, ...] = ()
    cause: str
    fix: tuple[Fix, ...] = Field(min_length=1)
    set: dict[str, str] = Field(default_factory=dict)
    here: str
    avoided: bool = False
    probe: str | None = None
    sources: tuple[str, ...] = Field(min_length=1)
    certainty: Literal["high", "medium", "low"]

    @property
    def is_severe(self) -> bool:
        """Whether it stops a run or spoils its result."""
        return self.severity in SEVERE


@dataclass(frozen=True)
class Match:
    """An issue whose conditions the facts meet.

    `device` is the matching device, if the conditions are about one. `unused` are its features that
    are not known to be in use.
    """

    issue: Issue
    device: DeviceFacts | None
    unused: tuple[str, ...]

    @property
    def needs(self) -> str | None:
        """``probe`` or ``plan`` if the facts alone prove nothing, else None."""
        return None if self.issue.decided_by == "facts" else self.issue.decided_by


@cache
def known_issues() -> tuple[Issue, ...]:
    """All entries of the file, validated, in order."""
    text = files("everyframe.hardware").joinpath("known_issues.yaml").read_text(encoding="utf-8")
    return parse(text)


def parse(text: str) -> tuple[Issue, ...]:
    """Parse the issues of a YAML list. Raises `InputError` that names the invalid entry."""
    entries = read_yaml(text)
    if not isinstance(entries, list):
        raise InputError("known issues must be a list")
    issues = []
    for place, entry in enumerate(entries):
        name = entry.get("id", place) if isinstance(entry, dict) else place
        if not isinstance(entry, dict):
            raise InputError(f"known issue {name} must be an object")
        try:
            issues.append(Issue(**entry))
        except InputError as error:
            raise InputError(f"known issue {name}: {error}") from None
    return tuple(issues)


def read_yaml(text: str) -> Any:
    """Parse YAML to plain data; with libyaml, if present, ten times as fast."""
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def find(machine: MachineFacts, uses: Collection[str] = ()) -> tuple[Match, ...]:
    """Known issues whose conditions this machine meets. `uses` are the features in use."""
    if machine.software is None:
        raise ValueError("known issues need the facts of the software too")
    matches = []
    for issue in known_issues():
        place = _where(issue.where, machine, machine.software)
        if place is not None:
            unused = tuple(tag for tag in issue.uses if tag not in uses)
            matches.append(Match(issue, place.device, unused))
    return tuple(matches)


def explaining(message: str) -> tuple[Issue, ...]:
    """Known issues whose messages match this text."""
    return tuple(
        issue for issue in known_issues() if any(known in message for known in issue.messages)
    )


@dataclass(frozen=True)
class _Place:
    """Marks conditions as met, and on which device."""

    device: DeviceFacts | None


def _where(where: Condition, machine: MachineFacts, software: SoftwareFacts) -> _Place | None:
    """Place where the conditions hold; None if they do not, or if a fact is unknown."""
    place = _Place(None)
    if where.vendor or where.capability or where.name or where.arch or where.cpu_lacks:
        devices = [device for device in machine.devices if _is_device(where, device, software)]
        if not devices or (where.vendor == "cpu" and machine.devices[0].kind != "cpu"):
            return None
        place = _Place(devices[0])
    if not all(_machine_conditions(where, machine, software)):
        return None
    if where.any:
        found = [_where(part, machine, software) for part in where.any]
        held = next((part for part in found if part is not None), None)
        return held if held is None or place.device is None else place
    return place


def _is_device(where: Condition, device: DeviceFacts, software: SoftwareFacts) -> bool:
    if where.vendor is not None and vendor_of(device, software) != where.vendor:
        return False
    if where.capability is not None:
        number = ".".join(map(str, device.capability)) if device.capability else None
        if not _fits(number, where.capability):
            return False
    if where.name is not None and not re.search(where.name, device.name):
        return False
    if where.arch:
        arch = re.search(r"\((gfx\w+)", device.name)
        if arch is None or not any(fnmatch(arch[1], pattern) for pattern in where.arch):
            return False
    flags = set(software.cpu_flags)
    return not where.cpu_lacks or (bool(flags) and flags.isdisjoint(where.cpu_lacks))


def _machine_conditions(
    where: Condition, machine: MachineFacts, software: SoftwareFacts
) -> Iterator[bool]:
    num_devices = sum(device.kind != "cpu" for device in machine.devices)
    for package, versions in where.packages.items():
        yield _fits(software.packages.get(package), versions)
    asked: tuple[tuple[str | None, str | None], ...] = (
        (software.cuda, where.cuda),
        (software.library("cublas"), where.cublas),
        (software.library("cudnn"), where.cudnn),
        (software.driver, where.driver),
        (software.system_version if software.system == "macos" else None, where.macos),
        (str(num_devices), where.devices),
    )
    yield from (specifier is None or _fits(version, specifier) for version, specifier in asked)
    if where.devices_not_dividing is not None:
        yield num_devices > 0 and where.devices_not_dividing % num_devices != 0
    yield not where.system or software.system in where.system
    for name, pattern in where.set.items():
        yield re.fullmatch(pattern, software.environment.get(name, "")) is not None
    # Any one of these variables avoids the issue.
    yield not any(
        re.fullmatch(pattern, software.environment.get(name, ""))
        for name, pattern in where.unless_set.items()
    )


def vendor_of(device: DeviceFacts, software: SoftwareFacts) -> str:
    """``nvidia``, ``amd``, ``apple``, ``intel``, ``ascend`` or ``cpu``."""
    if device.kind == "cuda":
        is_amd = software.rocm is not None or "(gfx" in device.name
        return "amd" if is_amd else "nvidia"
    return {"mps": "apple", "xpu": "intel", "npu": "ascend"}.get(device.kind, "cpu")


def _fits(version: str | None, versions: str) -> bool:
    """Whether a version meets the specifier; development builds count, unknown versions do not."""
    if not version:
        return False
    try:
        return SpecifierSet(versions).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


def _checked_specifier(text: str) -> str:
    try:
        SpecifierSet(text)
    except InvalidSpecifier as error:
        raise ValueError(f"{text!r} is no version specifier") from error
    return text
