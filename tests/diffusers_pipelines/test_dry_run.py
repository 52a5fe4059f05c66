"""A pipeline's own call without numbers: what it finds, what it forecasts, what follows from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import everyframe
from everyframe.core.errors import CheckpointError, InputError
from everyframe.core.plan import Plan, Precision
from everyframe.diffusers_pipelines import dry_run
from everyframe.diffusers_pipelines.library_patches import stand_in_accepted
from everyframe.dry_run import executor as dry_run_executor
from everyframe.dry_run.call import DryRunCall
from everyframe.dry_run.counters import MemoryTracker
from everyframe.hardware.profiles import find_profile
from everyframe.planning import dry_runs
from everyframe.planning.fast_paths.component_certificates import Certificates
from everyframe.planning.resolve import PreparedPlan, prepare
from everyframe.precision import cast_hooks
from helpers.dry_runs import dry_run_module
from helpers.plans import frames_of, unchanged, with_components
from helpers.tiny_checkpoints import pipelines as tiny_pipelines
from helpers.tiny_checkpoints.diffusers.cases import CASES, written

SMALL: dict[str, Any] = {
    "prompt": "a fox", "num_inference_steps": 2, "seed": 1, "device": "cpu",
    **tiny_pipelines.CALLS["cogvideox"],
}  # fmt: skip
CARD = find_profile("cuda-sm80").machine().devices[0]
WIDE, NARROW = Precision("float32", "float32"), Precision("bfloat16", "bfloat16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny-cog"
    tiny_pipelines.cogvideox(path)
    return path


@pytest.fixture(scope="module")
def prepared(folder: Path) -> PreparedPlan:
    return prepare(everyframe.Request(model=str(folder), **SMALL))


def joint(prepared: PreparedPlan) -> DryRunCall:
    model: Any = prepared.model
    made: DryRunCall = model.dry_run_calls(prepared.plan.settings)[0]
    return made


def decodes_wide(plan: Plan) -> Plan:
    """As on a card with bfloat16: its autoencoder alone in float32."""
    narrow = tuple(
        part if part.name == "vae" else replace(part, precision=NARROW) for part in plan.components
    )
    return replace(plan, components=narrow)


class Counted(TorchDispatchMode):
    """Every tensor that is made while it lives."""

    def __init__(self) -> None:
        super().__init__()
        self.live = MemoryTracker()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.live.add_old(each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor))
        answer = func(*args, **(kwargs or {}))
        self.live.add_new([e for e in tree_leaves(answer) if isinstance(e, Tensor)], "")
        return answer


def test_what_is_counted_without_numbers_is_what_lives_with_them(
    folder: Path,
) -> None:
    asked = {**SMALL, "size": "64x64", "device": "auto", "dtype": "fp32"}
    # A card's: the workspaces of a CPU's kernels are in its forecast and in no tensor.
    plan = everyframe.plan(model=str(folder), profile="cuda-sm80", **asked)
    pipe = diffusers.CogVideoXPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    with torch.no_grad(), Counted() as counted:
        pipe(
            "a fox", height=64, width=64, num_frames=9, num_inference_steps=2, output_type="pt",
            max_sequence_length=16, generator=torch.Generator().manual_seed(1),
        )  # fmt: skip
    forecast = max(part.working_bytes for part in plan.components)
    assert counted.live.peak > 2e6
    assert forecast == pytest.approx(counted.live.peak, rel=0.2)


def test_the_plan_has_time_and_memory_of_each_part(folder: Path) -> None:
    plan = everyframe.plan(model=str(folder), profile="cuda-sm80", **{**SMALL, "device": "auto"})
    assert [stage.component for stage in plan.stages] == ["text_encoder", "transformer", "vae"]
    assert all(stage.working_bytes > 0 and stage.operations > 0 for stage in plan.stages)
    assert plan.seconds is not None
    assert not plan.dtype_errors
    more = {**SMALL, "device": "auto", "num_inference_steps": 20}
    longer = everyframe.plan(model=str(folder), profile="cuda-sm80", **more)
    by_name = [{each.component: each for each in p.stages} for p in (plan, longer)]
    ratio = by_name[1]["transformer"].operations / by_name[0]["transformer"].operations
    assert ratio == 10
    assert by_name[0]["vae"].operations == by_name[1]["vae"].operations


def test_the_precisions_of_its_parts_are_tried_or_avoided(folder: Path) -> None:
    asked = everyframe.Request(model=str(folder), **{**SMALL, "device": "auto"})
    verdicts = {}
    for profile in ("h20-cublas12.5.2.13", "h20-cublas12.1"):
        found = prepare(asked, profile=profile)
        part = found.plan.component("transformer")
        choice = next(each for each in part.choices if each.path == "bf16")
        verdicts[choice.verdict] = (part.precision.compute, "bf16" in part.fast_paths)
    assert verdicts == {"expected": ("bfloat16", True), "avoided": ("float32", False)}
    assert any("transformer: float32, as bf16 is avoided" in note for note in found.plan.notes)
    runs = [run for run in found.fitted.runs if run.stage_call.component == "transformer"]
    subject = Certificates(CARD, 1).subject("transformer", WIDE, runs)
    assert {product.kind for product, _ in subject.products} >= {"product", "attention"}
    # None of its parts can be called alone, so the pipeline's own call is what is tried as well.
    (call,) = subject.calls
    assert call.call.is_foreign
    assert set(call.call.components) == set(call.precisions)


def test_parts_of_two_precisions_meet_and_are_cast(prepared: PreparedPlan) -> None:
    usual = frames_of(prepared, unchanged)
    mixed = frames_of(prepared, decodes_wide)
    assert usual.std() > 0.05
    # Eight bits of a number, through a random network and its decoder.
    assert 0 < np.abs(mixed - usual).mean() < 0.1


def test_without_the_casts_between_parts_the_dry_run_finds_the_clash(
    prepared: PreparedPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cast_hooks, "add_input_casts", lambda module: cast_hooks.CastHooks([]))
    stage_call = joint(prepared)
    precisions = {name: WIDE if name == "vae" else NARROW for name in stage_call.components}
    found = dry_run_executor.dry_run(stage_call, precisions, CARD)
    assert found.at == "vae"
    (clash,) = [each for each in found.found["vae"].findings if each.is_fatal]
    assert (clash.kind, clash.module) == ("clash", "decoder.conv_in.conv")


@pytest.mark.parametrize("how", ["model_offload", "block_offload"])
def test_with_less_memory_it_gives_the_same_frames(prepared: PreparedPlan, how: str) -> None:
    usual = frames_of(prepared, unchanged)
    assert np.array_equal(frames_of(prepared, with_components(**{how: True})), usual)


def test_parts_come_by_turns_where_they_do_not_fit_together(folder: Path) -> None:
    asked = {**SMALL, "device": "auto", "profile": "cuda-sm80"}
    plan = everyframe.plan(model=str(folder), **asked)
    largest = max(part.peak_bytes for part in plan.components)
    assert largest < plan.peak_bytes
    limit = f"{int(largest * 1.05 / 0.92)}B"
    small = everyframe.plan(model=str(folder), max_memory=limit, **asked)
    assert small.infeasible is None
    assert all(part.model_offload for part in small.components)
    assert small.peak_bytes == largest
    assert small.host_bytes >= sum(part.weight_bytes for part in small.components)
    assert [note for note in small.notes if note.startswith("stage by stage: ")]
    none = everyframe.plan(model=str(folder), max_memory=limit, max_host_memory="1kB", **asked)
    assert none.infeasible is not None
    assert "the host would hold" in none.infeasible


def test_tiles_and_then_blocks_where_one_part_alone_is_too_large(folder: Path) -> None:
    asked = {**SMALL, "device": "auto", "profile": "cuda-sm80", "size": "512x512"}
    plan = everyframe.plan(model=str(folder), **asked)
    vae = plan.component("vae")
    limit = f"{int(vae.peak_bytes * 0.9 / 0.92)}B"
    tiled = everyframe.plan(model=str(folder), max_memory=limit, **asked)
    assert tiled.settings.option("vae_tiling") is True
    assert any("decoded in tiles" in note for note in tiled.notes)
    assert tiled.component("vae").working_bytes < 0.9 * vae.working_bytes


def test_what_no_dry_run_can_follow_is_reported(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = dry_run.PipelineDryRun._call

    def asks_for_numbers(self: dry_run.PipelineDryRun, settings: Any) -> object:
        def step(*args: Any, **kwargs: Any) -> None:
            raise ValueError("sigma 0.0 is not in the table")

        with monkeypatch.context() as patched:
            patched.setattr(diffusers.CogVideoXDDIMScheduler, "step", step)
            return call(self, settings)

    monkeypatch.setattr(dry_run.PipelineDryRun, "_call", asks_for_numbers)
    monkeypatch.setattr(dry_runs, "_DONE", {})
    monkeypatch.setenv("EVERYFRAME_CACHE", str(tmp_path))
    plan = everyframe.plan(model=str(folder), **SMALL)
    assert [stage.component for stage in plan.stages] == ["text_encoder"]
    (note,) = [note for note in plan.notes if note.startswith("transformer: ")]
    assert "no dry run can follow the pipeline there (ValueError: sigma 0.0" in note
    # A run may well go further.
    assert plan.infeasible is None
    assert plan.component("vae").working_bytes > 0


def test_the_variant_that_was_asked_for_is_read(folder: Path, tmp_path: Path) -> None:
    pipe = diffusers.CogVideoXPipeline.from_pretrained(folder)
    both = tmp_path / "both"
    pipe.save_pretrained(both)
    pipe.to(torch.float16).save_pretrained(both, variant="fp16")
    plain = everyframe.plan(model=str(both), **SMALL)
    half = everyframe.plan(model=str(both), variant="fp16", **SMALL)
    assert [p.num_parameters for p in plain.components] == [
        p.num_parameters for p in half.components
    ]

    def files(**more: Any) -> set[str]:
        model = prepare(everyframe.Request(model=str(both), **more, **SMALL)).model
        return {Path(file).name for file in model.weight_files()}

    assert not [name for name in files() if "fp16" in name]
    assert all("fp16" in name for name in files(variant="fp16"))
    video = everyframe.generate(model=str(both), variant="fp16", dtype="fp32", **SMALL)
    wide = everyframe.generate(model=str(both), dtype="fp32", **SMALL)
    assert isinstance(video, everyframe.Video)
    assert isinstance(wide, everyframe.Video)
    assert not np.array_equal(video.frames, wide.frames)
    with pytest.raises(CheckpointError, match="no weights in the variant 'bf16'"):
        everyframe.plan(model=str(both), variant="bf16", **SMALL)


def test_any_word_names_a_variant(folder: Path, tmp_path: Path) -> None:
    """As for diffusers; whole or in shards, beside the plain weights or alone."""
    pipe = diffusers.CogVideoXPipeline.from_pretrained(folder)
    both, alone = tmp_path / "both", tmp_path / "alone"
    pipe.save_pretrained(both)
    pipe.save_pretrained(both, variant="ema", max_shard_size="50KB")
    pipe.save_pretrained(alone, variant="ema", max_shard_size="50KB")

    def files(model: Path, **more: Any) -> set[str]:
        request = everyframe.Request(model=str(model), **more, **SMALL)
        return {Path(file).name for file in prepare(request).model.weight_files()}

    shard = "diffusion_pytorch_model.ema-00001-of-00002.safetensors"
    assert files(both) == {"diffusion_pytorch_model.safetensors", "model.safetensors"}
    assert shard in files(both, variant="ema") == files(alone)
    assert all(".ema" in name for name in files(alone))
    video = everyframe.generate(model=str(alone), dtype="fp32", **SMALL)
    plain = everyframe.generate(model=str(both), dtype="fp32", **SMALL)
    assert isinstance(video, everyframe.Video)
    assert isinstance(plain, everyframe.Video)
    np.testing.assert_array_equal(video.frames, plain.frames)


def test_flexible_attention_that_nobody_compiled_holds_its_scores() -> None:
    """Measured with torch 2.13 on a CPU: 3.3 times the scores in float32; two are sure."""

    class Core(torch.nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            out: Tensor = dispatch_attention_fn(q, q, q, backend="flex")
            return out

    def call(core: Any, where: str) -> Tensor:
        with stand_in_accepted([core]):
            out: Tensor = core(torch.zeros(1, 64, 2, 8, device=where))
            return out

    found = dry_run_module(Core(), NARROW, call, CARD)
    assert not found.findings
    assert 2 <= found.working_bytes / (2 * 64 * 64 * 4) < 3.3


def test_a_length_that_gives_no_frames_is_refused_before_the_run(tmp_path: Path) -> None:
    """The plan said that the pipeline makes 0 frames, and the run was made and failed."""
    case = CASES["HunyuanVideoImageToVideoPipeline"]
    case.build().save_pretrained(tmp_path / "model")
    asked = written({**case.asked, "num_frames": 1, "prompt": "a fox"}, tmp_path, 16, 16)
    with pytest.raises(InputError, match="makes no frames of num_frames=1; ask for more"):
        everyframe.plan(model=str(tmp_path / "model"), num_inference_steps=1, **asked)
