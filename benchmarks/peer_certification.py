"""The fast paths of ours in `peers.py`: those that their trials certify on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import torch
from block_stacks import SIZES, forget_context, precision_of

from everyframe.core.facts import DeviceFacts
from everyframe.dry_run.call import DryRunCall
from everyframe.fast_paths.certification.certify import certify
from everyframe.fast_paths.registry import for_device, switched_off
from everyframe.planning.dry_runs import DryRun, dry_run
from everyframe.planning.fast_paths.component_certificates import Certificates


@cache
def empty(model: str, kind: str) -> Mapping[str, Any]:
    """The denoiser without weights."""
    return {"denoiser": SIZES[model][kind]("meta").ours(torch.float32, ())}


def answer(model: str, kind: str, modules: Mapping[str, Any], device: str) -> object:
    """One call of it."""
    stack = SIZES[model][kind](device)
    # The module is called in several precisions, and its context has that of the first.
    forget_context(modules["denoiser"])
    return stack.call(modules["denoiser"], stack.inputs(torch.float32))


def outputs(model: str, kind: str, name: str, module: Any) -> tuple[str, ...]:
    """Its last modules."""
    return SIZES[model][kind]("meta").outputs


def certified_paths(
    model: str, dtype: str, device: DeviceFacts, seconds: float
) -> tuple[dict[str, float], dict[str, str]]:
    """Gains of certified paths, and reasons against the others.

    Exact and rounding paths of the modules: precision and compiling are candidates of their own,
    and constants are cached by the call of a pipeline. ``EVERYFRAME_DISABLE`` is respected.
    """
    islands = SIZES[model][device.kind]("meta").islands
    precision = precision_of(getattr(torch, dtype), islands)
    given = (model, device.kind)
    call = DryRunCall("denoise", "denoiser", ("denoiser",), partial(empty, *given),
                      partial(answer, *given), 1, given, partial(outputs, *given))  # fmt: skip
    run = dry_run(call, {"denoiser": precision}, device)
    assert isinstance(run, DryRun), run
    target = Certificates(device, torch.get_num_threads()).subject("denoiser", precision, [run])
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
