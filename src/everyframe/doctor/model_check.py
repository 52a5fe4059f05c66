"""Check whether a machine can run a model with its defaults, by a plan in another process.

The plan includes the dry run.
"""

from __future__ import annotations

import shlex
from typing import Any

from everyframe.core.errors import InputError
from everyframe.core.request import Request
from everyframe.doctor.checks import DoctorInput
from everyframe.doctor.report import Check, Finding
from everyframe.hardware.isolation import run_isolated
from everyframe.hardware.known_issues import Fix

#: Time limit. A dry run of the largest model takes some seconds, importing diffusers some more.
_SECONDS = 180.0


def plan_of(patient: DoctorInput, model: str) -> Check:
    """The check ``model``: whether it fits, dtype clashes, and the plan's notes."""
    ended = run_isolated(plan_as_json, model, patient.profile, seconds=_SECONDS)
    if not ended.is_well:
        finding = Finding(mark="error", message=f"planning {model} {ended}", fix=_look(model))
        return Check.of("model", model, [finding])
    result = ended.value
    if result["refused"] is not None:
        return Check.of(
            "model", model, [Finding(mark="note", message=str(result["refused"]), fix=_look(model))]
        )
    found = [Finding(mark="note", message=str(note)) for note in result["notes"]]
    found += [Finding(mark="error", message=str(clash)) for clash in result["dtype_errors"]]
    if result["infeasible"] is not None:
        found.append(Finding(mark="error", message=str(result["infeasible"]), fix=_look(model)))
    return Check.of("model", str(result["summary"]), found)


def _look(model: str) -> tuple[Fix, ...]:
    command = f"everyframe plan PROMPT --model {shlex.quote(model)}"
    return (Fix(do="see the whole plan", command=command),)


def plan_as_json(model: str, profile: str | None) -> dict[str, Any]:
    """Summary of the plan with the model's defaults; imports torch."""
    from everyframe.core.bytes import format_bytes
    from everyframe.planning.resolve import prepare

    refused: list[str] = []
    for request in [Request(model=model, **asked) for asked in least_asked()]:
        try:
            plan = prepare(request, profile=profile).plan
        except InputError as error:
            refused.append(str(error))
            continue
        dtypes = "/".join(dict.fromkeys(each.precision.compute for each in plan.components))
        needs = f"{format_bytes(plan.peak_bytes)} of {format_bytes(plan.device.free_memory)}"
        return {
            "refused": None,
            "summary": f"{plan.model} in {dtypes}: needs about {needs}",
            "notes": list(plan.notes),
            "dtype_errors": [str(clash) for clash in plan.dtype_errors],
            "infeasible": plan.infeasible,
        }
    return {"refused": refused[0]}


def least_asked() -> tuple[dict[str, Any], ...]:
    """Minimal inputs of models: a text, an image, or both."""
    import numpy as np

    picture = np.full((64, 64, 3), 128, np.uint8)
    prompt = "a red circle moves to the right"
    return {"prompt": prompt}, {"image": picture}, {"prompt": prompt, "image": picture}
