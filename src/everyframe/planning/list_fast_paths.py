"""List fast paths of components and their certificates, for `everyframe fast-paths`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from everyframe.core.errors import InputError
from everyframe.core.plan import FastPathChoice, Plan
from everyframe.core.request import Request
from everyframe.fast_paths.registry import CATALOGUE, PRECISIONS, FastPath
from everyframe.planning.fast_paths import component_certificates
from everyframe.planning.resolve import PreparedPlan, prepare


@dataclass(frozen=True)
class FastPathRow:
    """One fast path of one component and its verdict; `in_use` is for a run now."""

    component: str
    path: FastPath
    choice: FastPathChoice
    in_use: bool


@dataclass(frozen=True)
class FastPathList:
    """The plan of a request and one row per path, in the order of components."""

    plan: Plan
    rows: tuple[FastPathRow, ...]


def survey(request: Request, *, certify: bool = False) -> FastPathList:
    """List every fast path of this request; `certify` also tries those not tried yet.

    Raises:
        InputError: the model can't do what is requested, or its devices are unlike each other and
            have no certificates in common.
    """
    prepared = prepare(request)
    untried: Mapping[str, str] = {}
    if certify:
        untried, has_new_precision = _certify(prepared)
        prepared = prepare(request)
        if has_new_precision:  # the other paths of that precision are known only now
            untried = {**untried, **_certify(prepared)[0]}
            prepared = prepare(request)
    rows = []
    for component in prepared.plan.components:
        listed = {choice.path for choice in component.choices}
        others = prepared.chooser.on_demand(component.name, prepared.fitted.runs)
        for choice in (*component.choices, *(each for each in others if each.path not in listed)):
            why = untried.get(f"{component.name} {choice.path}")
            if why is not None:
                choice = replace(choice, verdict="untried", reason=why)
            in_use = choice.verdict in ("certified", "pinned")
            rows.append(FastPathRow(component.name, CATALOGUE[choice.path], choice, in_use))
    return FastPathList(prepared.plan, tuple(rows))


def _certify(prepared: PreparedPlan) -> tuple[dict[str, str], bool]:
    """Create missing certificates.

    Returns paths without enough time, with the reason; and whether a precision was tried.
    """
    certificates = prepared.chooser.certificates
    if certificates is None:
        device = prepared.plan.device
        raise InputError(
            "certify tries fast paths on one device, or on several of one model, and these are "
            f"unlike each other; give --device {device.torch_name} ({device.name})"
        )
    missing = []
    for component in prepared.plan.components:
        untried = [
            each.path for each in component.choices if each.verdict in ("expected", "untried")
        ]
        # Precisions first: the attention calls and blocks depend on them.
        names = [name for name in untried if name in PRECISIONS] or untried
        paths = tuple(CATALOGUE[name] for name in names)
        if paths:
            missing.append(
                component_certificates.MissingCertificates(
                    component.name, component.precision, paths, component.choices
                )
            )
    reasons = component_certificates.make(
        certificates, missing, prepared.fitted.runs, component_certificates.ON_REQUEST
    )
    return reasons, any(path.name in PRECISIONS for each in missing for path in each.paths)
