"""Step-distilled files bring their settings, a plan says so, and settings of one's own win."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler

import everyframe
from everyframe.adapters.distilled_models import PRESETS, find_preset, titles_in
from everyframe.checkpoints.tensor_file import open_checkpoint
from everyframe.core.request import Request
from everyframe.diffusers_pipelines.family import PipelineSpec
from everyframe.diffusers_pipelines.files.preset_scheduler import preset_scheduler
from everyframe.planning.find_model import find_model
from helpers.loras import files as lora_files
from helpers.loras.files import as_lora, factors_for
from helpers.tiny_checkpoints import families as tiny_families

WAN, HUNYUAN, LTX = (f"{name}Transformer3DModel" for name in ("Wan", "HunyuanVideo", "LTXVideo"))


@pytest.mark.parametrize(
    ("file", "class_name", "wanted"),
    [
        ("Wan21_T2V_14B_lightx2v_cfg_step_distill_lora_rank32.safetensors", WAN, (4, 1.0, 5.0)),
        ("Wan2.2-Lightning_T2V-A14B-4steps-lora_HIGH_fp16.safetensors", WAN, (4, 1.0, 5.0)),
        ("wan2.1_i2v_480p_scaled_fp8_e4m3_lightx2v_4step.safetensors", WAN, (4, 1.0, 5.0)),
        ("Wan21_CausVid_14B_T2V_lora_rank32.safetensors", WAN, (9, 1.0, None)),
        ("Wan21_AccVid_T2V_14B_lora_rank32_fp16.safetensors", WAN, (10, 1.0, None)),
        ("hunyuan_video_accvid_5_steps_lora_rank8_fp16.safetensors", HUNYUAN, (5, None, None)),
        ("hunyuan_video_FastVideo_720_fp8_e4m3fn.safetensors", HUNYUAN, (6, 6.0, 17.0)),
        ("ltxv-13b-0.9.8-distilled-fp8.safetensors", LTX, (8, 1.0, None)),
        ("LTX-Video-0.9.7-distilled", LTX, (8, 1.0, None)),
        ("ltxv-13b-0.9.8-distilled-fp8.safetensors", WAN, None),
        ("my-style.safetensors", WAN, None),
        ("wan2.1_t2v_14B_fp8_scaled.safetensors", WAN, None),
    ],
)
def test_files_by_name(file: str, class_name: str, wanted: Any) -> None:
    preset, known_by = find_preset(["other.safetensors", file], [class_name])
    found = preset and (preset.num_inference_steps, preset.guidance_scale, preset.shift)
    assert found == wanted
    assert known_by == (file if wanted else "")


@pytest.mark.parametrize(
    "preset", PRESETS, ids=lambda preset: f"{preset.title} {preset.classes[0]}"
)
def test_each_has_its_source_and_a_schedule_that_falls(preset: Any) -> None:
    assert preset.source.startswith("https://")
    assert preset.sigmas in ((), tuple(sorted(preset.sigmas, reverse=True)))
    assert not preset.sigmas or len(preset.sigmas) == preset.num_inference_steps


def test_files_by_what_they_call_themselves(tmp_path: Path) -> None:
    """Under any file name: safetensors by its trainer's words, GGUF by its converter's."""
    from safetensors.torch import save_file

    gguf = pytest.importorskip("gguf", reason="the package that writes GGUF is not installed")
    save_file({"x": torch.zeros(1)}, tmp_path / "a.safetensors",
              metadata={"ss_output_name": "Wan21_CausVid_14B"})  # fmt: skip
    writer = gguf.GGUFWriter(str(tmp_path / "b.gguf"), "ltxv")
    writer.add_name("LTX-Video 0.9.8 distilled")
    writer.add_tensor("x", torch.zeros(1).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (tmp_path / "c.gguf").write_bytes(b"GGUF")
    (tmp_path / "d.pt").write_bytes(b"")
    found = {path.name: titles_in(path) for path in tmp_path.iterdir()}
    assert found == {
        "a.safetensors": ("Wan21_CausVid_14B",), "b.gguf": ("LTX-Video 0.9.8 distilled",),
        "c.gguf": (), "d.pt": (),
    }  # fmt: skip
    names = [find_preset({name: titles}, [cls])[0] for name, titles, cls in (
        ("a.safetensors", found["a.safetensors"], "WanTransformer3DModel"),
        ("b.gguf", found["b.gguf"], "LTXVideoTransformer3DModel"),
        ("b.gguf", (), "LTXVideoTransformer3DModel"),
    )]  # fmt: skip
    assert [preset and preset.title for preset in names] == [
        "CausVid", "LTX-Video's distillation", None
    ]  # fmt: skip


def test_sigmas_of_lightx2v() -> None:
    """Those of its own sampler: 5 s / (1 + 4 s) at 1, 3/4, 1/2 and 1/4."""
    preset, _ = find_preset(["lightx2v.safetensors"], [WAN])
    assert preset is not None
    found = preset_scheduler(preset, FlowMatchEulerDiscreteScheduler())
    found.set_timesteps(4)
    expected = torch.tensor([1, 0.9375, 5 / 6, 0.625, 0])
    assert torch.allclose(found.sigmas, expected, rtol=0, atol=1e-7)
    assert torch.allclose(found.timesteps, 1000 * expected[:4], rtol=0, atol=1e-4)
    # A number of one's own wins, on the same curve.
    found.set_timesteps(sigmas=np.linspace(1, 0.5, 2), mu=0.9)
    assert torch.allclose(found.sigmas, torch.tensor([1, 5 / 6, 0]), rtol=0, atol=1e-7)


def lora_for(model: Path, path: Path) -> Path:
    opened = open_checkpoint(model / "transformer")
    state = {name: opened.load(name) for name in opened}
    factors = factors_for(state, lora_files.matrices(state), alpha=0.3)
    return lora_files.write(path, as_lora(factors, "transformer."))


def plan(name: str, **more: Any) -> everyframe.Plan:
    asked = tiny_families.asked(name, **more)
    asked.pop("num_inference_steps")
    return everyframe.plan(**{**asked, **more})


def test_a_plan_says_what_was_set(tiny_root: Path, tmp_path: Path) -> None:
    model = tiny_families.made("wan", tiny_root)
    lora = lora_for(model, tmp_path / "Wan21_lightx2v_step_distill.safetensors")
    given = f"{lora}@both"
    bare = plan("wan", model=str(model))
    found = plan("wan", model=str(model), loras=given)
    assert (bare.settings.num_inference_steps, bare.settings.guidance_scale) == (50, 5.0)
    assert (found.settings.num_inference_steps, found.settings.guidance_scale) == (4, 1.0)
    (note,) = [note for note in found.notes if "is known as" in note]
    assert "sampled with 4 steps, guidance 1, shift 5 (https://" in note
    own = plan("wan", model=str(model), loras=given, num_inference_steps=6, guidance_scale=2.0)
    assert (own.settings.num_inference_steps, own.settings.guidance_scale) == (6, 2.0)
    (note,) = [note for note in own.notes if "is known as" in note]
    assert "num_inference_steps and guidance_scale given here win" in note
    off = plan("wan", model=str(model), loras=f"{lora}:0@both")
    assert off.settings.num_inference_steps == 50


def test_frames_are_those_of_its_sampler(tiny_root: Path, tmp_path: Path) -> None:
    """Of the folder in diffusers with flow-matching Euler, shift 5, by its own hand."""
    model = Path(shutil.copytree(tiny_families.made("wan", tiny_root), tmp_path / "lightx2v-4step"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", everyframe.EveryframeWarning)
        asked = tiny_families.asked("wan", model=str(model), run_dir="off", dtype="fp32")
        asked.pop("num_inference_steps")
        found = everyframe.generate(**asked)
        pipe = DiffusionPipeline.from_pretrained(model)
        pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=5.0)
        set_timesteps = pipe.scheduler.set_timesteps
        pipe.scheduler.set_timesteps = lambda count, device=None: set_timesteps(
            sigmas=[1, 0.75, 0.5, 0.25], device=device
        )
        request = Request(**{key: value for key, value in asked.items() if key != "model"})
        wanted = everyframe.run(
            pipe, request.prompt, num_inference_steps=4, guidance_scale=1.0, seed=3,
            **{k: v for k, v in asked.items() if k in ("height", "width", "size", "num_frames",
                                                       "option")},
        )  # fmt: skip
    assert isinstance(found, everyframe.Video)
    assert np.array_equal(np.asarray(found.frames), np.asarray(wanted.frames))


def test_a_schedule_of_ones_own_wins(tiny_root: Path, tmp_path: Path) -> None:
    model = Path(
        shutil.copytree(tiny_families.made("ltx2", tiny_root), tmp_path / "ltx-2-distilled")
    )
    asked = {"prompt": "x", "model": str(model)}
    found, _ = find_model(Request(**asked), may_fetch=False)
    assert isinstance(found, PipelineSpec)
    assert found.files.preset is not None
    assert len(found.files.preset.sigmas) == 8
    own, _ = find_model(Request(**asked, option={"sigmas": [1.0, 0.5]}), may_fetch=False)
    assert isinstance(own, PipelineSpec)
    assert own.files.preset is None
