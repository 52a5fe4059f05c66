"""Which components keep the weights of their linear layers in eight bits, and what that costs.

Those that were asked to; else, and only where nothing that is exact makes them fit, those that
need it. Not here: how it is done (`everyframe.precision.quantised`) and what fits (`fitting.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from everyframe.core.errors import InputError
from everyframe.core.facts import DeviceFacts
from everyframe.core.plan import ComponentPlan, Precision
from everyframe.core.request import Request

#: How far the result of a layer is from that with all weights whole, its norm over the other's; of
#: weights as they are trained, few of a row being large (tests/precision/test_quantised.py).
ERRORS = {"int8": 0.01, "fp8": 0.03}

#: What is tried of itself: the closer of the two, of which the other has no more to give.
_OF_ITSELF = "int8"

#: Where torch has no such dtype at all.
_LACKS = {"fp8": ("mps",)}

#: A component is worth it whose weights take so much less.
WORTH = 0.9


@dataclass(frozen=True)
class Quantising:
    """What is wanted: ``auto``, ``none``, ``int8`` or ``fp8``, or `exact`, by component."""

    asked: str = "none"
    exact: Mapping[str, str] | None = None

    def kinds(self, component: str) -> tuple[str, ...]:
        """What to try for a component, the most exact first; "" is weights as they are."""
        if self.exact is not None:
            return (self.exact.get(component, ""),)
        return {"auto": ("", _OF_ITSELF), "none": ("",)}.get(self.asked, (self.asked,))


#: All weights as they are.
WHOLE = Quantising()


def quantising_of(request: Request, device: DeviceFacts) -> Quantising:
    """The wishes of a request for that device.

    Raises:
        InputError: there is no such kind, or not on that device.
    """
    wanted = {request.quantize, *(request.quantized or {}).values()} - {"auto", "none", ""}
    for kind in sorted(wanted):
        if kind not in ERRORS:  # out of a record that anybody may have made
            raise InputError(f"weights are kept in {' or '.join(ERRORS)}, and not in {kind!r}")
        if device.kind in _LACKS.get(kind, ()):
            raise InputError(f"{device.name} has no {kind}; give --quantize int8")
    return Quantising(request.quantize, request.quantized)


def check_effect(wanted: Quantising, title: str, parts: Sequence[ComponentPlan]) -> None:
    """Raise `InputError` where weights were to be kept in eight bits and none are."""
    asked = wanted.exact is None and wanted.asked in ERRORS
    if asked and not any(part.precision.weights for part in parts):
        raise InputError(
            f"quantize has no effect on {title}: it is for linear layers of parts that are not "
            "made for float32, in models that are loaded here (not by a diffusers pipeline)"
        )


def told(title: str, precision: Precision, wanted: Quantising) -> tuple[str, ...]:
    """What a plan says of a component that keeps its weights so."""
    if not precision.weights:
        return ()
    by_itself = wanted.exact is None and wanted.asked == "auto"
    why = ", as it fits no other way; --quantize none refuses" if by_itself else ""
    return (
        f"{title}: weights of its linear layers are kept in {precision.weights} (lossy: a layer's "
        f"result differs by about {ERRORS[precision.weights]:.0%}{why})",
    )
