"""Dry runs of one module, or of a stage's call with all of its components in one precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from everyframe.core.facts import DeviceFacts
from everyframe.core.plan import Precision
from everyframe.dry_run import executor
from everyframe.dry_run.call import DryRunCall
from everyframe.dry_run.result import DryRunResult
from everyframe.planning import dry_runs
from everyframe.planning.dry_runs import DryRun


def dry_run_module(
    module: nn.Module,
    precision: Precision | None,
    call: Callable[[Any, str], object],
    device: DeviceFacts,
) -> DryRunResult:
    """``call(module, device)``, run dry."""
    parts = {"": executor.DryRunModule(module, precision)}
    return executor.dry_run_modules(parts, lambda where: call(module, where), device).found[""]


def dry_run_call(stage_call: DryRunCall, precision: Precision, device: DeviceFacts) -> DryRun:
    """That call of a stage, with its components in `precision`."""
    found = dry_runs.dry_run(stage_call, dict.fromkeys(stage_call.components, precision), device)
    assert isinstance(found, DryRun)
    return found
