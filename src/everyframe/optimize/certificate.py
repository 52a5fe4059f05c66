"""A certificate: what one fast path did for one component on one device, and the verdict.

Frozen data; how it is made is told in `certify`, where it is kept in `store`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

Verdict = Literal["certified", "refused"]

#: Less than this is not told from chance by the few rounds of a trial.
LEAST_GAIN = 1.03


@dataclass(frozen=True)
class Certificate:
    """One verdict.

    `what` is the path's name. `device` and `plan` are keys (see `keys`): another driver, library or
    model has another one. `error` is the norm of the difference to float32 over float32's norm (of
    an exact path, to the plain way), `limit` what it may be; `gain` is the plain way's time over
    this one's. All three are None where the trial did not come so far, `date` is ISO's.
    """

    what: str
    component: str
    device: str
    plan: str
    verdict: Verdict
    reason: str
    error: float | None
    limit: float | None
    gain: float | None
    date: str

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def judged(error: float, limit: float, gain: float) -> tuple[Verdict, str]:
    """The verdict on a path that ran to its end, and why. Not a number is never good enough."""
    if not error <= limit:
        said = "is not finite" if not math.isfinite(error) else f"is off by {error:.1e}"
        allowed = f"allowed {limit:.1e} of float32" if limit else "and may not differ in a bit"
        return "refused", f"{said}, {allowed}"
    if not gain >= LEAST_GAIN:
        return "refused", "no faster than the plain way"
    return "certified", "right, and faster"


def from_json(value: Any) -> Certificate | None:
    """The certificate in plain data, or None if it is no such thing."""
    if not isinstance(value, Mapping) or set(value) != {part.name for part in fields(Certificate)}:
        return None
    texts = (value[name] for name in ("what", "component", "device", "plan", "reason", "date"))
    numbers = (value[name] for name in ("error", "limit", "gain"))
    if not all(isinstance(text, str) for text in texts):
        return None
    if not all(number is None or isinstance(number, (int, float)) for number in numbers):
        return None
    if value["verdict"] not in ("certified", "refused"):
        return None
    return Certificate(**value)
