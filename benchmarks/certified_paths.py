"""The fast paths of ours in `peers.py` and `decode.py`: those that their trials certify here."""

from __future__ import annotations

import torch

from everyframe.core.facts import DeviceFacts
from everyframe.core.plan import Precision
from everyframe.dry_run.call import DryRunCall
from everyframe.fast_paths.certification.certify import certify
from everyframe.fast_paths.registry import for_device, switched_off
from everyframe.planning.dry_runs import DryRun, dry_run
from everyframe.planning.fast_paths.component_certificates import Certificates


def certified_paths(
    call: DryRunCall, precision: Precision, device: DeviceFacts, seconds: float
) -> tuple[dict[str, float], dict[str, str]]:
    """Gains of the certified paths of the call's component, and reasons against the others.

    Exact and rounding paths of modules: precision and compiling are candidates of their own, and
    constants are cached by the call of a pipeline. ``EVERYFRAME_DISABLE`` is respected.
    """
    run = dry_run(call, {call.component: precision}, device)
    assert isinstance(run, DryRun), run
    certificates = Certificates(device, torch.get_num_threads())
    target = certificates.subject(call.component, precision, [run])
    off = switched_off(())
    paths = [
        path
        for path in for_device(device)
        if path.group not in ("precision", "compile", "constants") and path.closeness != "lossy"
        and path.name not in off and run.has_place(path.name, is_quantized=False)
    ]  # fmt: skip
    result = certify(target, paths, seconds)
    gains = {each.what: each.gain or 0.0 for each in result.certificates
             if each.verdict == "certified"}  # fmt: skip
    reasons = {each.what: each.reason for each in result.certificates if each.what not in gains}
    return gains, {**reasons, **result.untried}


def list_paths(dtype: str, gains: dict[str, float], reasons: dict[str, str]) -> str:
    """Lines about the result of `certified_paths`, for a page."""
    used = ", ".join(f"`{name}` {gain:.2f}" for name, gain in gains.items()) or "none"
    lines = f"\nCertified in {dtype}, with the gains of their trials: {used}.\n"
    if reasons:
        others = "; ".join(f"`{name}` {why}" for name, why in reasons.items())
        lines += f"Not used: {others}.\n"
    return lines
