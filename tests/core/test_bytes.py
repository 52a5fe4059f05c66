"""Forecasts of memory against bytes: what is counted on tensors without numbers is what is taken.

The same calls are made for real, while the bytes of live storages are counted; both must agree to
the byte but for the host's copies. `planning/test_forecast_measured.py` compares with whole
processes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from everyframe.core.bytes import PROCESS_BYTES, fits, format_bytes, without_processes
from everyframe.core.facts import DeviceFacts
from everyframe.core.plan import Precision
from everyframe.dry_run import executor as dry_run_executor
from everyframe.dry_run import meta_device
from everyframe.hardware.profiles import find_profile
from helpers import config_only_models
from helpers.dry_runs import dry_run_call

CARD = find_profile("cuda-sm90").machine().devices[0]
WIDE = Precision("float32", "float32")


def counted(model: Any, settings: Any, stage: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes alive at the peak of that stage's call with real numbers on the CPU."""
    stage_call = next(each for each in model.dry_run_calls(settings) if each.stage == stage)
    module = stage_call.module().to_empty(device="cpu")
    with torch.no_grad():
        for each in (*module.parameters(), *module.buffers()):
            each.zero_()
    for module_of_ours in (dry_run_executor, meta_device):
        monkeypatch.setattr(module_of_ours, "STAND_IN", "cpu")
    monkeypatch.setattr(meta_device, "stands_in", lambda tensor: tensor.device.type == "cpu")
    # Not what was remembered of sizes: every operation with its numbers.
    monkeypatch.setattr(meta_device, "_makes_new", lambda func: False)
    found = dry_run_executor.dry_run(stage_call, {stage_call.component: WIDE}, CARD)
    monkeypatch.undo()
    module.to("meta")
    return found.found[stage_call.component].working_bytes


@pytest.mark.parametrize(
    ("family", "stage", "size"),
    [
        # Not its denoiser: how long a text is, is asked of real numbers, which differ here.
        ("opensora-1.2", "decode", (64, 64, 34)),
        ("svd", "denoise", (64, 96, 4)),
        ("svd", "decode", (64, 64, 3)),
        ("stepvideo", "decode", (32, 32, 17)),
    ],
)
def test_what_is_counted_without_numbers_is_what_lives_with_them(
    family: str, stage: str, size: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = config_only_models.all_models()[family]
    settings = config_only_models.settings(*size)
    stage_call = next(each for each in model.dry_run_calls(settings) if each.stage == stage)
    forecast = dry_run_call(stage_call, WIDE, CARD).found.working_bytes
    # Kernels on meta and on a CPU take composed operations apart at other places here and there.
    assert counted(model, settings, stage, monkeypatch) == pytest.approx(forecast, rel=0.1)


def test_more_of_everything_needs_more() -> None:
    model = config_only_models.svd()

    def need(**changes: Any) -> int:
        settings = replace(config_only_models.settings(64, 64, 4), **changes)
        denoise = model.dry_run_calls(settings)[2]
        return dry_run_call(denoise, WIDE, CARD).found.working_bytes

    assert need(num_frames=8) == pytest.approx(2 * need(), rel=0.1)
    assert need(width=128) == pytest.approx(2 * need(), rel=0.1)
    assert need(guidance_scale=1.0) == pytest.approx(need() / 2, rel=0.1)
    assert need(savings=(("branches_at_once", 1),)) < 0.7 * need()


def test_what_fits_leaves_a_margin() -> None:
    device = DeviceFacts("x", "cpu", None, 2000, 1000)
    assert fits(900, device)
    assert not fits(950, device)
    assert not fits(900, replace(device, free_memory=800))


@pytest.mark.parametrize(
    ("size", "text"), [(18_400_000_000, "18.4 GB"), (52_000_000, "52 MB"), (1500, "2 kB")]
)
def test_amounts(size: int, text: str) -> None:
    assert format_bytes(size) == text


def test_ranks_on_a_cpu_take_memory_for_themselves() -> None:
    cpu = DeviceFacts("a processor", "cpu", None, 16 * 10**9, 16 * 10**9)
    assert without_processes(cpu, 1) == cpu
    left = without_processes(cpu, 8).free_memory
    assert left == 16 * 10**9 - 8 * PROCESS_BYTES
    assert without_processes(cpu, 256).free_memory == 0
    card = replace(cpu, kind="cuda", index=0)
    assert without_processes(card, 8) == card
