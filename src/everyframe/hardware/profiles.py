"""Machine profiles: facts of machines that are not present, for ``--as NAME|FILE``.

A profile holds facts (memory, floating dtypes, what is fast) and a maker's rates with their
sources. Conclusions are drawn from them by the same code as for a real machine. Shipped devices are
in ``profiles.json``, whole machines with their software in ``machines.json``; a user's file holds
one entry of either kind. Imports no torch.
"""

from __future__ import annotations

import json
import re
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from everyframe.core.errors import InputError, did_you_mean
from everyframe.core.facts import ALL_DTYPES, DeviceFacts, MachineFacts, SoftwareFacts, Throughput
from everyframe.core.options import Options
from everyframe.core.paths import expand_path

_KINDS = ("cpu", "cuda", "mps", "xpu")

#: Bytes that a machine can have; no larger number is one of a machine.
_MOST_BYTES = 1 << 62
_Bytes = Annotated[int, Field(gt=0, le=_MOST_BYTES)]


class ProfileRates(Options):
    """Peak rates: `products` a second by dtype, `memory`, `load` and `link` in bytes a second.

    `share` is the part of the peak that a large matrix product usually reaches; `link` leads to
    another device, one way.
    """

    products: dict[str, float]
    memory: float = Field(ge=1)
    load: float = Field(default=1e9, ge=1)
    share: float = Field(default=0.5, ge=0.001, le=1)
    link: float | None = Field(default=None, ge=1)


class ProfileSoftware(Options):
    """Software of the machine; fields as in `SoftwareFacts`."""

    system: str = "linux"
    system_version: str = ""
    python: str = ""
    packages: dict[str, str] = Field(default_factory=dict)
    libraries: dict[str, str] = Field(default_factory=dict)
    cuda: str | None = None
    rocm: str | None = None
    driver: str | None = None
    architectures: tuple[str, ...] = ()
    cpu_flags: tuple[str, ...] = ()
    environment: dict[str, str] = Field(default_factory=dict)

    def facts(self) -> SoftwareFacts:
        """These facts; CUDA is that of torch's version, as 12.6 of 2.13.0+cu126, unless given."""
        built = re.search(r"\+cu(\d+)(\d)$", self.packages.get("torch", ""))
        cuda = self.cuda or (f"{built[1]}.{built[2]}" if built else None)
        return SoftwareFacts(**{**self.model_dump(), "cuda": cuda})


class Profile(Options):
    """A device, `count` of it, and its host; memory in bytes. See `DeviceFacts`.

    Without `software` the installed software is unknown.
    """

    name: str
    kind: str
    count: int = Field(default=1, gt=0, le=256)
    memory: _Bytes
    free_memory: _Bytes | None = None
    host_memory: _Bytes = 32 * 10**9
    num_cores: int = Field(default=8, gt=0)
    capability: tuple[int, int] | None = None
    has_fast_bf16: bool = False
    has_fast_fp16: bool = False
    dtypes: tuple[str, ...] = ALL_DTYPES
    max_array_bytes: _Bytes | None = None
    rates: ProfileRates
    software: ProfileSoftware | None = None
    sources: tuple[str, ...] = ()

    def machine(self) -> MachineFacts:
        """Facts of the machine: its devices first, the CPU last."""
        devices: tuple[DeviceFacts, ...]
        if self.kind == "cpu":
            devices = (self._device(0),)
        else:
            host = DeviceFacts("processor", "cpu", None, self.host_memory, self.host_memory)
            devices = (*map(self._device, range(self.count)), host)
        software = self.software.facts() if self.software else None
        return MachineFacts(devices, self.num_cores, _versions(software), software)

    def _device(self, index: int) -> DeviceFacts:
        rates = self.rates
        return DeviceFacts(
            name=self.name,
            kind=self.kind,
            index=index if self.kind in ("cuda", "xpu") else None,
            memory=self.memory,
            free_memory=min(self.free_memory or self.memory, self.memory),
            capability=self.capability,
            has_fast_bf16=self.has_fast_bf16,
            has_fast_fp16=self.has_fast_fp16,
            dtypes=self.dtypes,
            max_array_bytes=self.max_array_bytes,
            rates=Throughput(
                products=tuple((name, rate * rates.share) for name, rate in rates.products.items()),
                memory=rates.memory,
                load=rates.load,
                link=rates.link,
                source=f"{rates.share:.0%} of the maker's peak",
            ),
        )


def profile_names() -> tuple[str, ...]:
    """Names of the shipped devices."""
    return tuple(_load_shipped("profiles.json"))


def machine_names() -> tuple[str, ...]:
    """Names of the shipped machines, whose software is known too."""
    return tuple(_load_shipped("machines.json"))


def find_profile(name: str | Path) -> Profile:
    """Shipped device or machine of that name, or the one in the JSON file at that path.

    Raises:
        InputError: there is neither, or the file is invalid; the text says how.
    """
    shipped = {**_load_shipped("profiles.json"), **_load_shipped("machines.json")}
    if str(name) in shipped:
        return _parse_profile(shipped[str(name)], f"profile {name}")
    path = expand_path(name, "the profile")
    if not path.is_file():
        raise InputError(
            f"there is no profile and no file {str(name)!r}{did_you_mean(str(name), shipped)}; "
            f"profiles: {', '.join(shipped)}"
        )
    return _parse_profile(read_facts(path), str(path))


def read_facts(path: Path) -> Any:
    """The JSON of a file of facts: a profile, or a report of the doctor.

    Raises:
        InputError: the file can't be read as JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        names = ", ".join((*profile_names(), *machine_names()))
        raise InputError(
            f"{path} is no profile: it can't be read as JSON ({error}); give a file of facts or "
            f"one of {names}"
        ) from error


def is_report(facts: Any) -> bool:
    """Whether a file of facts is the output of ``everyframe doctor --json``."""
    return isinstance(facts, dict) and facts.get("type") == "doctor"


def _parse_profile(given: Any, source: str) -> Profile:
    if is_report(given):
        raise InputError(
            f"{source} is a report of the doctor, which has no rates to plan a model by; "
            "`everyframe doctor --as` reads it, without --model"
        )
    if not isinstance(given, dict):
        raise InputError(f"{source} is no profile: it must be an object of facts")
    try:
        profile = Profile(**_fill_in(given))
    except InputError as error:
        raise InputError(f"{source}: {error}") from None
    if profile.kind not in _KINDS:
        raise InputError(f"{source}: kind must be one of {', '.join(_KINDS)}, got {profile.kind!r}")
    for dtype in (*profile.dtypes, *profile.rates.products):
        if dtype not in ALL_DTYPES:
            raise InputError(f"{source}: dtypes are {', '.join(ALL_DTYPES)}, got {dtype!r}")
    if not profile.rates.products or min(profile.rates.products.values()) < 1:
        raise InputError(f"{source}: rates.products must hold a rate of 1 or more for a dtype")
    return profile


def _fill_in(given: dict[str, Any]) -> dict[str, Any]:
    """Entry whose missing fields come from the shipped device that it is `like`."""
    if "like" not in given:
        return given
    devices = _load_shipped("profiles.json")
    like = given["like"]
    if not isinstance(like, str) or like not in devices:
        raise InputError(
            f"like must be a device of {', '.join(devices)}, got {like!r}"
            f"{did_you_mean(str(like), devices)}"
        )
    return {**devices[like], **{name: value for name, value in given.items() if name != "like"}}


def _versions(software: SoftwareFacts | None) -> dict[str, str]:
    """Versions that plans and records contain, as for a real machine."""
    if software is None:
        return {}
    named = {name: software.packages.get(name) for name in ("torch", "diffusers", "transformers")}
    named |= {"python": software.python or None, "cuda": software.cuda, "rocm": software.rocm}
    return {name: version for name, version in named.items() if version}


@cache
def _load_shipped(file: str) -> dict[str, Any]:
    text = files("everyframe.hardware").joinpath(file).read_text(encoding="utf-8")
    shipped: dict[str, Any] = json.loads(text)
    return shipped
