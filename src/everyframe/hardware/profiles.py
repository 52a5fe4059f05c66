"""Machines that are not here, as data: what ``--as`` names or reads from a file.

A profile holds facts (memory, floating dtypes that exist, what is fast) and a maker's rates with
their sources; what follows from the facts is decided where it is for a real machine. The shipped
ones lie in ``profiles.json``; a file of one's own has one of its entries. No torch here.
Read next: `everyframe.core.facts`, `everyframe.precision.policy`.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import Field

from everyframe.core.errors import InputError, did_you_mean
from everyframe.core.facts import ALL_DTYPES, DeviceFacts, MachineFacts, Rates
from everyframe.core.options import Options

_KINDS = ("cpu", "cuda", "mps", "xpu")


class ProfileRates(Options):
    """Peak `products` a second by dtype, `memory` and `load` in bytes a second.

    `share` is how much of the peak a large matrix product usually reaches.
    """

    products: dict[str, float]
    memory: float = Field(gt=0)
    load: float = Field(default=1e9, gt=0)
    share: float = Field(default=0.5, gt=0, le=1)


class Profile(Options):
    """One device and the machine around it; memory in bytes. See `DeviceFacts` for the facts."""

    name: str
    kind: str
    memory: int = Field(gt=0)
    free_memory: int | None = Field(default=None, gt=0)
    host_memory: int = Field(default=32 * 10**9, gt=0)
    num_cores: int = Field(default=8, gt=0)
    capability: tuple[int, int] | None = None
    has_fast_bf16: bool = False
    has_fast_fp16: bool = False
    dtypes: tuple[str, ...] = ALL_DTYPES
    max_array_bytes: int | None = Field(default=None, gt=0)
    rates: ProfileRates
    sources: tuple[str, ...] = ()

    def machine(self) -> MachineFacts:
        """The facts of that machine: its device first, the processor last."""
        device = self._device()
        if self.kind == "cpu":
            return MachineFacts((device,), self.num_cores)
        host = DeviceFacts("processor", "cpu", None, self.host_memory, self.host_memory)
        return MachineFacts((device, host), self.num_cores)

    def _device(self) -> DeviceFacts:
        rates = self.rates
        return DeviceFacts(
            name=self.name,
            kind=self.kind,
            index=0 if self.kind in ("cuda", "xpu") else None,
            memory=self.memory,
            free_memory=min(self.free_memory or self.memory, self.memory),
            capability=self.capability,
            has_fast_bf16=self.has_fast_bf16,
            has_fast_fp16=self.has_fast_fp16,
            dtypes=self.dtypes,
            max_array_bytes=self.max_array_bytes,
            rates=Rates(
                products=tuple((name, rate * rates.share) for name, rate in rates.products.items()),
                memory=rates.memory,
                load=rates.load,
                source=f"{rates.share:.0%} of the maker's peak",
            ),
        )


def profile_names() -> tuple[str, ...]:
    """The names of the shipped profiles."""
    return tuple(_shipped())


def find_profile(name: str | Path) -> Profile:
    """The shipped profile of that name, or the one in the JSON file at that path.

    Raises:
        InputError: neither; or the file holds something else, and what.
    """
    shipped = _shipped()
    if str(name) in shipped:
        return _checked(shipped[str(name)], f"profile {name}")
    path = Path(name)
    if not path.is_file():
        raise InputError(
            f"there is no profile and no file {str(name)!r}{did_you_mean(str(name), shipped)}; "
            f"profiles: {', '.join(shipped)}"
        )
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is no profile: {error}") from error
    return _checked(given, str(path))


def _checked(given: Any, source: str) -> Profile:
    if not isinstance(given, dict):
        raise InputError(f"{source} is no profile: it must be an object of facts")
    try:
        profile = Profile(**given)
    except InputError as error:
        raise InputError(f"{source}: {error}") from None
    if profile.kind not in _KINDS:
        raise InputError(f"{source}: kind must be one of {', '.join(_KINDS)}, got {profile.kind!r}")
    for dtype in (*profile.dtypes, *profile.rates.products):
        if dtype not in ALL_DTYPES:
            raise InputError(f"{source}: dtypes are {', '.join(ALL_DTYPES)}, got {dtype!r}")
    if not profile.rates.products or min(profile.rates.products.values()) <= 0:
        raise InputError(f"{source}: rates.products must hold a rate above 0 for a dtype or more")
    return profile


@cache
def _shipped() -> dict[str, Any]:
    text = files("everyframe.hardware").joinpath("profiles.json").read_text(encoding="utf-8")
    shipped: dict[str, Any] = json.loads(text)
    return shipped
