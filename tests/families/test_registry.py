"""Families and their options: each option is written once, explained, and known by name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from everyframe.core.errors import InputError
from everyframe.core.options import GROUPS, facts_of
from everyframe.core.request import Request
from everyframe.families.registry import (
    all_options,
    check_option_names,
    family,
    family_names,
    family_options,
)

EVERY = {"request": Request, **all_options()}


@pytest.mark.parametrize("name", EVERY)
def test_every_option_has_a_group_and_help(name: str) -> None:
    for option, field in EVERY[name].model_fields.items():
        assert facts_of(EVERY[name], option).get("group") in GROUPS, option
        assert field.description, option
        assert field.description.endswith("."), option


def test_no_option_is_written_twice() -> None:
    """What several families know is the same in each; what all share is no family's."""
    written: dict[str, str] = {}
    flags: dict[str, str] = {}
    for owner, options in EVERY.items():
        for option, field in options.model_fields.items():
            others = written.get(option, repr(field))
            assert others == repr(field), f"{option} of {owner} differs from another family's"
            assert owner == "request" or option not in Request.model_fields, option
            written[option] = others
            aliases = facts_of(options, option).get("aliases", ())
            for flag in (f"--{option.replace('_', '-')}", *aliases):
                assert flags.setdefault(flag, option) == option, flag


def test_a_family_has_the_options_that_the_registry_names() -> None:
    assert family_names() == ("opensora2", "opensora", "svd", "inpaint", "stepvideo", "pipeline")
    for name in family_names():
        assert family(name).name == name
        assert family(name).options is all_options()[name]


@pytest.mark.parametrize(
    ("given", "meant"), [("guidance", "guidance_scale"), ("asthetic", "aesthetic"), ("sed", "seed")]
)
def test_an_unknown_option_names_the_nearest(given: str, meant: str) -> None:
    with pytest.raises(InputError, match=f"no option '{given}'; did you mean '{meant}'"):
        check_option_names(Request(prompt="a", **{given: 1}))


def test_another_familys_option_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from everyframe.core.options import FamilyOptions, option
    from everyframe.families import registry

    class Other(FamilyOptions):
        tremble: float | None = option("How much it trembles.", group="Family")

    options = registry.options_of
    monkeypatch.setitem(registry._FAMILIES, "other", registry._FAMILIES["opensora"])
    monkeypatch.setattr(registry, "options_of", lambda n: Other if n == "other" else options(n))
    request = Request(prompt="a", tremble=1)
    check_option_names(request)
    with pytest.raises(InputError, match="tremble is an option of other models"):
        family_options("opensora", request)


def test_limits_are_reported() -> None:
    with pytest.raises(InputError, match=r"aesthetic must be at most 10(\.0)?, got 11"):
        family_options("opensora", Request(prompt="a", aesthetic=11))


def test_the_registry_imports_no_family_and_no_torch() -> None:
    code = (
        "import sys, everyframe.families.registry as r; r.all_options(); "
        "sys.exit('torch' in sys.modules or 'everyframe.families.opensora.family' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
