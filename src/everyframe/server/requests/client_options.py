"""Options that clients may set, by the marks of each option's field.

An option that may be a path, is set from Python only, or is for the user who runs the process, is
refused unless `client_fields` lists it. So a new option of this kind is refused by default.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from everyframe.core.options import Options, facts_of
from everyframe.core.request import Request
from everyframe.families.registry import all_options
from everyframe.server.data_folder import MEDIA
from everyframe.server.requests.client_fields import (
    CHECKED_PATHS,
    CLIENTS_CHOICES,
    OPERATOR,
    PATH,
    REFUSED,
)


@cache
def option_owners() -> Mapping[str, type[Options]]:
    """The class that defines each option, also of options that clients may not set."""
    owners: dict[str, type[Options]] = {}
    for options in owning_classes():
        for name in options.model_fields:
            owners.setdefault(name, options)
    return owners


def owning_classes() -> list[type[Options]]:
    """The classes that define options: common ones, and each family's."""
    return [Request, *all_options().values()]


@cache
def client_options() -> tuple[str, ...]:
    """Names of the options that clients may set."""
    return tuple(name for name in option_owners() if name not in refused_fields())


@cache
def refused_fields() -> Mapping[str, str]:
    """Fields that are refused by name, with the reason: options, and other servers' fields."""
    options = {
        name: why
        for owner in owning_classes()
        for name in owner.model_fields
        if (why := _refusal(owner, name)) is not None
    }
    return {**options, **REFUSED}


def _refusal(options: type[Options], name: str) -> str | None:
    facts = facts_of(options, name)
    if facts["names_path"] and name not in CHECKED_PATHS and name not in MEDIA:
        return PATH
    is_users = facts["person_only"] or facts["python_only"]
    return OPERATOR if is_users and name not in CLIENTS_CHOICES else None
