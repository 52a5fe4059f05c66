"""Steps of a schedule that a request gives by a pipeline's own parameters.

diffusers takes as many steps as these numbers make, whatever number of steps it is given.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from everyframe.core.errors import InputError
from everyframe.diffusers_pipelines.inputs import defaults
from everyframe.diffusers_pipelines.inputs.signature import CallSignature

_TIMESTEPS, _SIGMAS = "timesteps", "sigmas"


def has_schedule(own: Collection[str]) -> bool:
    """Whether one of these parameters is a schedule."""
    return _TIMESTEPS in own or _SIGMAS in own


def num_scheduled(interface: CallSignature, own: Mapping[str, Any]) -> int | None:
    """Steps of the schedule in `own`; None without one.

    A pipeline that takes no number of steps (LTX-2's DFR) always has one, which ends with the 0
    after the last step.
    """
    given = _listed(own.get(_TIMESTEPS)) or _listed(own.get(_SIGMAS))
    if interface.name_of("num_inference_steps") is not None:
        return len(given) or None
    declared = interface.parameters.get(_SIGMAS)
    given = given or _listed(None if declared is None else declared.default)
    return len(given) - (not given[-1]) if given else None


def check_steps(interface: CallSignature, own: Collection[str], num_steps: int) -> None:
    """Raise `InputError` for fewer steps than the pipeline's own schedule can have."""
    least = defaults.of(defaults.LEAST_SCHEDULED, interface.class_name) or 1
    if num_steps < least and not has_schedule(own):
        raise InputError(
            f"{interface.class_name} needs num_inference_steps of {least} or more, got {num_steps}"
        )


def _listed(given: Any) -> list[Any]:
    """The numbers of a list, array or tensor; none of anything else, which diffusers refuses."""
    listed = given.tolist() if hasattr(given, "tolist") else given
    return list(listed) if isinstance(listed, (list, tuple)) else []
