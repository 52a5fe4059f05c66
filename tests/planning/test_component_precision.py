"""Weights are kept in eight bits where that is asked for, else only where nothing exact fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from everyframe.core.errors import InputError
from everyframe.core.facts import DeviceFacts, Throughput
from everyframe.core.plan import ComponentPlan
from everyframe.core.request import Request
from everyframe.hardware.profiles import find_profile, profile_names
from everyframe.planning.component_precision import (
    QuantizationChoice,
    check_effect,
    quantization_choice,
)
from everyframe.planning.dry_runs import stage_plan
from everyframe.planning.memory.component_memory import ComponentPlanner
from everyframe.planning.memory.memory_fit import FitResult, MemoryFit
from everyframe.runtime.interface import ModelSpec
from helpers import config_only_models

GB = 10**9
SETTINGS = config_only_models.settings(32, 32, 1, guidance=1.0)


def device(profile: str, memory: int = 10 * GB) -> DeviceFacts:
    found = find_profile(profile).machine().devices[0]
    return replace(found, memory=memory, free_memory=memory)


@pytest.fixture(scope="module")
def model() -> ModelSpec:
    """One whose denoiser is nearly all of it, and in it linear layers."""
    found: ModelSpec = config_only_models.stepvideo(num_attention_heads=24, num_layers=4)
    return found


def fitted(
    model: ModelSpec, where: DeviceFacts, *, host: int = 32 * GB, **fields: Any
) -> FitResult:
    wanted = QuantizationChoice(**{"asked": "auto", **fields})
    return MemoryFit(ComponentPlanner(model, where, "auto", False, host, quantization=wanted)).fit(
        SETTINGS
    )


def denoiser(found: FitResult) -> ComponentPlan:
    return next(each for each in found.components if each.name == "denoiser")


def test_where_there_is_room_weights_are_whole(model: ModelSpec) -> None:
    found = fitted(model, device("cpu-fp32"))
    assert all(not part.precision.weight_dtype for part in found.components)
    assert not any("lossy" in note for note in found.notes)


def test_a_processor_that_holds_them_no_other_way_has_them_in_int8(model: ModelSpec) -> None:
    whole = denoiser(fitted(model, device("cpu-fp32")))
    short = device("cpu-fp32", int(whole.peak_bytes * 0.6))
    found = fitted(model, short)
    assert found.fits
    part = denoiser(found)
    assert part.precision.weight_dtype == "int8"
    # What is no linear layer, or an island, is as it was.
    assert 0.25 < part.weight_bytes / whole.weight_bytes < 0.35
    (note,) = [note for note in found.notes if "stored in int8 (lossy" in note]
    assert note.endswith(
        "differs by about 1%, as nothing else makes it fit; --quantize none prevents it)"
    )
    # The small parts are not concerned, and `none` refuses.
    assert not any(each.precision.weight_dtype for each in found.components if each is not part)
    assert not fitted(model, short, asked="none").fits


def test_what_is_exact_comes_first(model: ModelSpec) -> None:
    """A card's weights wait on the host, or in their files, before any of them is rounded."""
    part = denoiser(fitted(model, device("cuda-sm86")))
    short = device("cuda-sm86", int(part.peak_bytes * 0.85))
    for host in (32 * GB, part.weight_bytes // 2):
        found = denoiser(fitted(model, short, host=host))
        assert (found.block_offload, found.from_disk) == (True, host < part.weight_bytes)
        assert not found.precision.weight_dtype
    # Rounded, they stay on the card, if it is asked for.
    found = denoiser(fitted(model, short, asked="int8"))
    assert (found.block_offload, found.precision.weight_dtype) == (False, "int8")


FAST = (("cpu-fp32", "int8"), ("cuda-sm70", "fp8"), ("mps", "int8"), ("cuda-sm90", "fp8"))
ALL = [(profile, kind) for profile in profile_names() for kind in ("int8", "fp8")]


@pytest.mark.parametrize(
    ("profile", "kind"),
    [pytest.param(*case, marks=[] if case in FAST else [pytest.mark.slow]) for case in ALL],
)
def test_they_run_dry_in_every_profile(profile: str, kind: str) -> None:
    """No arithmetic in eight bits is asked of a device: it is the wide dtype that multiplies."""
    parts = ComponentPlanner(
        config_only_models.stepvideo(),
        device(profile),
        "auto",
        False,
        GB,
        quantization=QuantizationChoice(kind),
    )
    for name in ("denoiser", "step_llm"):
        part = parts.plan_named(name, SETTINGS)
        assert not [line for run in part.runs for line in run.clashes()]
        assert part.plan.precision.weight_dtype == kind
        assert part.plan.precision.islands
    assert not parts.plan_named("vae", SETTINGS).plan.precision.weight_dtype  # made for float32


def test_loading_them_takes_the_time_of_what_is_in_the_files(model: ModelSpec) -> None:
    rates = Throughput((("float32", 1e11),), memory=1e10, load=1e6, source="made up")
    times = {}
    for kind in ("none", "int8"):
        found = fitted(model, device("cpu-fp32"), asked=kind)
        run = next(run for run in found.runs if run.stage_call.component == "denoiser")
        times[kind] = stage_plan(run, denoiser(found), rates).seconds
    assert times["none"] is not None
    assert times["int8"] is not None
    assert times["int8"] >= times["none"] * 0.99


def test_what_a_record_says_is_taken_exactly(model: ModelSpec) -> None:
    found = fitted(model, device("cpu-fp32"), exact={"denoiser": "fp8"})
    kinds = {part.name: part.precision.weight_dtype for part in found.components}
    assert kinds == {"step_llm": "", "clip": "", "denoiser": "fp8", "vae": ""}


def test_what_can_t_be_had_is_reported() -> None:
    kinds = "int8, fp8, int8-dynamic, fp8-scaled, gguf"
    with pytest.raises(InputError, match=f"one of auto, none, {kinds}, got 'int4'"):
        Request(prompt="a", quantize="int4")
    mps = device("mps")
    with pytest.raises(InputError, match="has no fp8; give --quantize int8"):
        quantization_choice(Request(prompt="a", quantize="fp8"), mps)
    assert quantization_choice(Request(prompt="a", quantize="int8"), mps).asked == "int8"
    with pytest.raises(InputError, match=f"{kinds.replace(', ', ' or ')}, not in 'int7'"):
        quantization_choice(Request(prompt="a", quantized={"denoiser": "int7"}), mps)
    parts = ComponentPlanner(config_only_models.stepvideo(), mps, "auto", False, GB)
    whole = [parts.plan_named("clip", SETTINGS).plan]
    with pytest.raises(InputError, match="quantize has no effect on Some Model"):
        check_effect(QuantizationChoice("int8"), "Some Model", whole)
    check_effect(QuantizationChoice("auto"), "Some Model", whole)
