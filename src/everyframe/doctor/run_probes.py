"""Run the probes, each in its own process, and turn the results into findings.

A probe that crashes, hangs or finds a wrong value is an error, named by its signal or number. A
probe that can't be started is reported as such. Neither stops the doctor.
"""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Iterator, Sequence
from typing import Any

from everyframe.core.facts import DeviceFacts, MachineFacts
from everyframe.doctor.probes import Probe, call
from everyframe.doctor.report import Check, Finding, Mark
from everyframe.hardware.isolation import ProcessResult, run_isolated
from everyframe.hardware.known_issues import Fix, Issue, explaining


def devices_to_probe(machine: MachineFacts) -> tuple[DeviceFacts, ...]:
    """One accelerator of each kind, or the CPU if there is none."""
    different = {(device.name, device.capability): device for device in reversed(machine.devices)}
    accelerators = [device for device in different.values() if device.kind != "cpu"]
    return tuple(reversed(accelerators)) or (machine.cpu,)


def probe(item: Probe, devices: Sequence[DeviceFacts]) -> Check:
    """Run a probe on each of these devices."""
    targets = list(devices[:1] if item.needs_several else devices)
    found: list[Finding] = []
    seconds, skipped, details, places = 0.0, [], [], []
    for device in targets:
        ended = run_isolated(call, item.place, device.torch_name, seconds=item.seconds)
        seconds += ended.seconds
        if ended.is_well and ended.value["skipped"]:
            skipped.append(str(ended.value["skipped"]))
            continue
        places.append(device.torch_name)
        if ended.is_well:
            details.append(f"{device.torch_name}: {json.dumps(ended.value['measured'])}")
        found += _findings(item, device, ended)
    message = f"{item.title}, on {', '.join(places)}" if places else f"not run: {skipped[0]}"
    return Check.of(item.name, message, found, details, seconds)


def _findings(item: Probe, device: DeviceFacts, ended: ProcessResult) -> Iterator[Finding]:
    where = device.torch_name
    if not ended.is_well:
        yield _ended_badly(item, device, ended, _find_fixes(item, where))
        return
    for text in ended.value["wrong"]:
        yield Finding(
            mark="note" if item.is_optional else "error",
            message=f"{where}: {text}",
            fix=(Fix(do=item.advice),),
            evidence=_finite(ended.value["measured"]),
        )
    for text in (*ended.value["notes"], *_slow_bf16(item, device, ended)):
        yield Finding(
            mark="note",
            message=f"{where}: {text}",
            fix=(Fix(do=item.advice),),
            evidence=_finite(ended.value["measured"]),
        )


def _finite(measured: Any) -> Any:
    """Replace infinity and NaN, which JSON lacks, by words."""
    if isinstance(measured, dict):
        return {str(name): _finite(value) for name, value in measured.items()}
    if isinstance(measured, list):
        return [_finite(value) for value in measured]
    if isinstance(measured, float) and not math.isfinite(measured):
        return str(measured)
    return measured


def _slow_bf16(item: Probe, device: DeviceFacts, ended: ProcessResult) -> Iterator[str]:
    """Report a device whose facts say that bf16 is fast but whose measurement disagrees."""
    ratio = ended.value["measured"].get("bf16_over_float32")
    if item.name == "bf16" and device.has_fast_bf16 and ratio is not None and ratio > 1.2:
        yield f"bf16 takes {ratio:.1f} times as long as float32, although it should be quicker"


def _find_fixes(item: Probe, where: str) -> tuple[Fix, ...]:
    """Environment variables with which a failed probe passes, if any."""
    if not item.again_with:
        return ()
    again = run_isolated(call, item.place, where, dict(item.again_with), seconds=item.seconds)
    if not again.is_well or again.value["wrong"]:
        return ()
    written = " ".join(f"{name}={value}" for name, value in item.again_with.items())
    return (Fix(do="tried here, and with it the probe passes", command=f"export {written}"),)


def _ended_badly(
    item: Probe, device: DeviceFacts, ended: ProcessResult, fixes: tuple[Fix, ...]
) -> Finding:
    """Finding for a crash, a hang or an error, with matching known issues, cause and fix."""
    issues = tuple(_match_issues(item, device, ended))
    loss = ended.loss
    # A broken card needs no other fix.
    advice = Fix(do=item.advice if loss is None else loss.fix)
    likely = None if loss is None else loss.likely
    mark: Mark = "note" if item.is_optional else "error"
    return Finding(
        mark=mark,
        message=f"{device.torch_name}: {item.title}: the probe {_describe_end(ended)}",
        cause=" ".join(issue.cause for issue in issues)
        or likely
        or _last_line(ended.printed)
        or None,
        fix=(*fixes, *(fix for issue in issues for fix in issue.fix), advice),
        issue=issues[0].id if issues else None,
        sources=tuple(source for issue in issues for source in issue.sources),
        evidence={"printed": ended.printed[-800:], "seconds": round(ended.seconds, 2)},
    )


def _match_issues(item: Probe, device: DeviceFacts, ended: ProcessResult) -> Iterator[Issue]:
    """Known issues that match the probe's output, or its crash in the same probe."""
    yield from explaining(f"{ended.printed} {ended.error or ''}")
    number = signal.Signals.__members__.get(ended.signal or "")
    if number is None:
        return
    # What a shell prints for such a death: "Floating point exception".
    for issue in explaining(signal.strsignal(number) or "nothing"):
        if issue.probe == item.name and (issue.where.vendor != "nvidia" or device.kind == "cuda"):
            yield issue


def _describe_end(ended: ProcessResult) -> str:
    if ended.error is not None:
        return f"failed: {ended.error}"
    return str(ended)


def _last_line(printed: str) -> str:
    lines = printed.splitlines()
    return lines[-1].strip()[:200] if lines else ""
