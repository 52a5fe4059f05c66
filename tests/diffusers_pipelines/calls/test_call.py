"""A pipeline's noise is that of its seed, whatever precision it is drawn for."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoGuidance, SkipLayerGuidance
from diffusers.hooks import LayerSkipConfig
from diffusers.pipelines.cogvideo import pipeline_cogvideox
from diffusers.utils import torch_utils
from torch import Tensor

import everyframe
from everyframe.core.events import Event, Step
from everyframe.diffusers_pipelines import stage
from everyframe.diffusers_pipelines.calls.step_caches import hook_registries
from everyframe.diffusers_pipelines.library_patches import float32_noise
from helpers.tiny_checkpoints import families as tiny_families
from helpers.tiny_checkpoints.diffusers import CASES

HALVES = [torch.bfloat16, torch.float16]
#: The last of 17 are drawn again by torch, in the dtype that is asked for.
SHAPE = (1, 17)


def drawn(dtype: torch.dtype, **more: Any) -> Tensor:
    source = torch.Generator().manual_seed(3)
    noise: Tensor = pipeline_cogvideox.randn_tensor(SHAPE, generator=source, dtype=dtype, **more)
    return noise


@pytest.mark.parametrize("dtype", HALVES)
def test_noise_of_half_precision_is_float32s_rounded(dtype: torch.dtype) -> None:
    wanted = drawn(torch.float32).to(dtype)
    assert not torch.equal(drawn(dtype), wanted), "torch does so itself: this module may go"
    with float32_noise():
        assert torch.equal(drawn(dtype), wanted)
        assert torch.equal(drawn(dtype, device=torch.device("cpu")), wanted)
        assert drawn(torch.float64).dtype == torch.float64


def test_others_draw_as_ever() -> None:
    """What runs beside a call of ours, and whatever comes after it."""
    before, usual = torch_utils.randn_tensor, drawn(torch.bfloat16)
    beside: list[Tensor] = []
    with float32_noise():
        with float32_noise():
            pass
        thread = threading.Thread(target=lambda: beside.append(drawn(torch.bfloat16)))
        thread.start()
        thread.join()
        assert torch.equal(drawn(torch.bfloat16), drawn(torch.float32).bfloat16())
    assert torch.equal(beside[0], usual)
    assert pipeline_cogvideox.randn_tensor is torch_utils.randn_tensor is before


def test_a_run_in_half_precision_begins_with_float32s_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever torch would draw in bfloat16 is of no account; a plan is run dry with it."""
    folder = tiny_families.made("cogvideox", tmp_path)
    asked = tiny_families.asked("cogvideox", device="cpu", dtype="bf16", num_inference_steps=1)

    def frames() -> Any:
        video = everyframe.generate(model=str(folder), output="float", run_dir="off", **asked)
        assert isinstance(video, everyframe.Video)
        return video.frames

    usual, draw = frames(), torch.randn

    def other(*shape: Any, **kwargs: Any) -> Tensor:
        noise = draw(*shape, **kwargs)
        return noise * 0 if kwargs.get("dtype") in HALVES else noise

    monkeypatch.setattr(torch, "randn", other)
    assert (frames() == usual).all()
    monkeypatch.setattr(stage, "float32_noise", nullcontext)
    assert not (frames() == usual).all(), "the fault was not planted"


def test_an_interrupted_call_leaves_no_attention_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Diffusers puts those of perturbed-attention guidance in, and back at the end of its call."""
    monkeypatch.setenv("EVERYFRAME_RUNS", str(tmp_path))
    pipe: Any = CASES["AnimateDiffPAGPipeline"].build()
    asked: dict[str, Any] = {
        "prompt": "a fox", "num_frames": 2, "height": 16, "width": 16, "num_inference_steps": 2,
        "seed": 1, "output": "float",
    }  # fmt: skip
    before, whole = pipe.unet.attn_processors, everyframe.run(pipe, **asked)

    def stop(event: Event) -> None:
        if isinstance(event, Step):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        everyframe.run(pipe, **asked, on_event=stop)
    assert pipe.unet.attn_processors == before
    resumed = everyframe.resume(pipe=pipe, output="float")
    assert isinstance(resumed, everyframe.Video)
    assert isinstance(whole, everyframe.Video)
    assert (resumed.frames == whole.frames).all()


@pytest.mark.parametrize(
    "guider",
    [
        AutoGuidance(auto_guidance_config=LayerSkipConfig(indices=[0], fqn="blocks", dropout=0.5)),
        SkipLayerGuidance(
            skip_layer_config=LayerSkipConfig(indices=[0], fqn="blocks"),
            skip_layer_guidance_start=0.0,
            skip_layer_guidance_stop=1.0,
        ),
    ],
)
def test_an_interrupted_call_leaves_no_hooks_of_a_guider(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guider: Any
) -> None:
    """They are on the denoiser for its last branch, and two of a name are an error."""
    monkeypatch.setenv("EVERYFRAME_RUNS", str(tmp_path))
    pipe: Any = CASES["WanModularPipeline"].build()
    pipe.update_components(guider=guider)
    asked: dict[str, Any] = {
        "prompt": "a fox", "num_frames": 5, "height": 16, "width": 16, "num_inference_steps": 3,
        "seed": 1, "output": "float", "max_sequence_length": 16,
    }  # fmt: skip
    whole = everyframe.run(pipe, **asked)

    def stop(*_: Any) -> None:
        if any(registry.hooks for registry in hook_registries(pipe.transformer)):
            raise KeyboardInterrupt

    handle = pipe.transformer.blocks[-1].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        everyframe.run(pipe, **asked)
    handle.remove()
    assert not any(registry.hooks for registry in hook_registries(pipe.transformer))
    again = everyframe.run(pipe, **asked)
    assert isinstance(again, everyframe.Video)
    assert isinstance(whole, everyframe.Video)
    assert (again.frames == whole.frames).all()
