"""Smoke test of new hardware: run the embedded model in every precision and fast path.

On-demand fast paths are left out, since compiling takes minutes. Each case runs in its own process
with the same seed and noise, and is compared with float32 on the CPU frame by frame.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from everyframe.core.facts import DeviceFacts
from everyframe.doctor.checks import DoctorInput
from everyframe.doctor.report import Check, Finding
from everyframe.fast_paths.registry import PLAIN, PRECISIONS, for_device, kernel_of
from everyframe.hardware.isolation import run_isolated
from everyframe.hardware.known_issues import Fix

#: Seconds for all cases, which keeps the test under 2 minutes, and the least left to try one.
_SECONDS = 115.0
_LEAST = 5.0
#: A case that times out counts as hung if it had this many times the reference's time.
_PATIENCE = 2.0

#: Maximum mean difference of a frame per precision, for pixels in 0..1. float32 on another device
#: differs by rounding only; half precision moves edges by fractions of a pixel.
_BUDGETS = {"float32": 1 / 255, "bfloat16": 8 / 255, "float16": 8 / 255}

_ASKED: dict[str, Any] = {
    "prompt": "a red circle moves to the right on a blue background",
    "seed": 7,
    "num_frames": 9,
    "num_inference_steps": 4,
}


def smoke(patient: DoctorInput) -> Check:
    """The check ``smoke``: an error for each precision and path with wrong frames."""
    device = patient.machine.devices[0]
    reference = run_isolated(frames_of, "cpu", "float32", None, seconds=_SECONDS)
    seconds = reference.seconds
    if not reference.is_well:
        finding = Finding(mark="error", message=f"the embedded model on the CPU {reference}")
        return Check.of("smoke", "float32 on the CPU", [finding], seconds=seconds)
    found: list[Finding] = []
    details = []
    for dtype, path in _cases(device):
        left, way = _SECONDS - seconds, _way(dtype, path)
        if left < _LEAST:
            message = f"no time was left for {way}: 2 minutes are over"
            found.append(Finding(mark="note", message=message))
            continue
        ended = run_isolated(frames_of, device.torch_name, dtype, path, seconds=left)
        seconds += ended.seconds
        if ended.timed_out and left < _PATIENCE * reference.seconds:
            message = (
                f"{way} {ended}, which were left: the CPU took {reference.seconds:.0f} s; "
                "on a machine that does nothing else there is time for all"
            )
            found.append(Finding(mark="note", message=message))
            continue
        if not ended.is_well:
            found.append(_wrong(device, way, str(ended)))
            continue
        worst = _worst_frame(ended.value, reference.value)
        details.append(f"{device.torch_name} in {way}: off by {255 * worst:.2f} of 255 at most")
        if not worst <= _BUDGETS[dtype]:
            found.append(_wrong(device, way, f"is off by {255 * worst:.1f} of 255 in a frame"))
    ways = "; ".join(_way(*case) for case in _cases(device))
    message = f"a video on {device.torch_name} against float32 on the CPU: {ways}"
    return Check.of("smoke", message, found, details, seconds)


def _way(dtype: str, path: str | None) -> str:
    return dtype if path is None else f"{dtype} by {path}"


def _cases(device: DeviceFacts) -> tuple[tuple[str, str | None], ...]:
    """Each dtype without fast paths, then each path in the default dtype.

    On the CPU, plain float32 is the reference itself, and fp16 takes minutes.
    """
    paths = [
        path.name
        for path in for_device(device)
        if path.name not in PRECISIONS and not path.on_demand
    ]
    if device.kind == "cpu":
        return (("bfloat16", None), *(("float32", path) for path in paths))
    dtypes = [dtype for dtype in _BUDGETS if dtype in device.dtypes]
    taken = "bfloat16" if device.has_fast_bf16 else "float16"
    return (*((dtype, None) for dtype in dtypes), *((taken, path) for path in paths))


def _wrong(device: DeviceFacts, way: str, how: str) -> Finding:
    return Finding(
        mark="error",
        message=f"the embedded model on {device.torch_name} in {way} {how}",
        fix=(
            Fix(do="compute in float32", command="everyframe generate … --dtype fp32"),
            Fix(do="or on the CPU", command="everyframe generate … --device cpu"),
        ),
    )


def frames_of(device: str, dtype: str, path: str | None) -> list[Any]:
    """Frames of the small video as values 0..255, nested (T, H, W, 3).

    Uses that path where it applies and no other fast path.
    """
    from everyframe.api import generate, plan

    asked: dict[str, Any] = {"device": device, "dtype": dtype, **_ASKED}
    kernel = kernel_of(path) if path is not None else PLAIN
    if kernel is not None:
        asked["attention"] = kernel
    else:
        asked["fast_paths"] = {each.name: (path,) for each in plan(**asked).components}
        asked["force"] = True  # certified or not: this is the trial
    video = generate(**asked)
    assert not isinstance(video, list), "one was asked for"
    frames: list[Any] = video.frames.tolist()
    return frames


def _worst_frame(got: list[Any], want: list[Any]) -> float:
    """The largest mean difference of any frame, for pixels in 0..1; infinite if shapes differ."""
    one, other = np.asarray(got, np.float32), np.asarray(want, np.float32)
    if one.shape != other.shape:
        return float("inf")
    return max(_differences(one, other))


def _differences(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> Iterator[float]:
    for a, b in zip(one, other, strict=True):
        yield float(np.abs(a - b).mean()) / 255
