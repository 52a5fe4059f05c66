"""Pipelines in memory as their owners set them up, and run as diffusers runs them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from accelerate import cpu_offload
from diffusers.models.embeddings import ImageProjection
from PIL import Image
from torch import nn

import everyframe
from everyframe.core.errors import NumericsError
from everyframe.precision.quantization import QuantizedLinear
from helpers.pipeline_calls import ours, theirs
from helpers.tiny_checkpoints import diffusers as tiny_diffusers
from helpers.tiny_checkpoints.diffusers.cases import CASES, Clip
from helpers.tiny_checkpoints.pipelines import loaded
from helpers.tiny_checkpoints.svd import svd


@pytest.fixture
def wan(tiny_models: Callable[[str], Path]) -> Any:
    return loaded(tiny_models("wan"))


def check_same_frames(pipe: Any, **asked: Any) -> None:
    """The run's frames are those of the pipeline's own call."""
    pipe.set_progress_bar_config(disable=True)
    noise = torch.Generator().manual_seed(3)
    wanted = pipe(**asked, generator=noise, output_type="np").frames[0]
    found = everyframe.run(pipe, **asked, seed=3, output="float").frames
    assert np.array_equal(found, wanted)


def test_stable_video_diffusion_makes_as_many_frames_as_its_model_was_trained_on(
    tmp_path: Path,
) -> None:
    """Its call has no number, and a run was refused without one."""
    pipe = diffusers.StableVideoDiffusionPipeline.from_pretrained(svd(tmp_path, num_frames=3))
    picture = Image.fromarray(Clip(1).frames(64, 64)[0])
    check_same_frames(pipe, image=picture, height=64, width=64, num_inference_steps=1)


def test_noise_is_drawn_in_the_dtype_that_its_owner_chose() -> None:
    """It was drawn in float32 and rounded, which differs where the count is no multiple of 16."""
    case = CASES["EchoModularPipeline"]
    asked = {"prompt": "a fox", "height": 32, "width": 32, "num_frames": 9,
             "max_sequence_length": 16}  # fmt: skip
    with case.within():
        pipe = case.build().to(torch.bfloat16)
        generator = torch.Generator().manual_seed(3)
        wanted = pipe(**asked, generator=generator, output_type="np", output="videos")
        found = everyframe.run(pipe, **asked, seed=3, output="float").frames
    assert np.array_equal(found, wanted[0])


def test_several_pictures_make_several_videos(tmp_path: Path) -> None:
    """They were joined to one, as were those of several embeddings."""
    pipe = diffusers.StableVideoDiffusionPipeline.from_pretrained(svd(tmp_path, num_frames=3))
    asked = {"image": [Image.fromarray(each) for each in Clip(2).frames(64, 64)], "height": 64,
             "width": 64, "num_inference_steps": 1}  # fmt: skip
    wanted = pipe(**asked, generator=torch.Generator().manual_seed(3), output_type="np").frames
    found = everyframe.run(pipe, **asked, seed=3, output="float")
    assert np.array_equal([each.frames for each in found], wanted)
    assert [each.record["index"] for each in found] == [0, 1]


def test_a_video_that_leads_gives_the_number_of_frames() -> None:
    case = CASES["Cosmos2_5_TransferPipeline"]
    asked = {"prompt": "a fox", "num_inference_steps": 1, "height": 32, "width": 32,
             "max_sequence_length": 16, "num_frames_per_chunk": 13,
             "controls": [Image.fromarray(each) for each in Clip(5).frames(32, 32)]}  # fmt: skip
    with case.within():
        pipe = tiny_diffusers.cosmos.transfer()
        with pytest.warns(everyframe.EveryframeWarning, match="made 5 frames of 32x32, not 93"):
            check_same_frames(pipe, **asked)
        del asked["width"]
        with pytest.raises(everyframe.InputError, match="height was given without width"):
            everyframe.run(pipe, **asked)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_pipeline_in_bfloat16_that_is_quantized_has_the_rounded_weights(
    wan: Any, kind: str
) -> None:
    """Wan casts its timesteps to the dtype of its time embedding's first parameter."""
    check_rounded(wan.to(torch.bfloat16), kind)


def test_layers_that_are_loaded_in_float32_stay_so(tiny_models: Callable[[str], Path]) -> None:
    """Of T5 in float16, whose code casts what it gives them to the dtype of their weights."""
    pipe = diffusers.LTXPipeline.from_pretrained(tiny_models("ltx"), torch_dtype=torch.float16)
    everyframe.quantize(pipe, components=("text_encoder",))
    layers = dict(pipe.text_encoder.named_modules())
    kept = {name for name, each in layers.items() if type(each) is nn.Linear}
    assert kept
    assert all(name.endswith(".wo") for name in kept)
    assert any(isinstance(each, QuantizedLinear) for each in layers.values())
    assert np.array_equal(ours(pipe, "ltx"), theirs(pipe, "ltx"))


def test_a_lora_stays_wide_where_its_layers_are_quantized(wan: Any) -> None:
    """peft casts what it is given to the dtype of a LoRA's weights, which was int8."""
    peft = pytest.importorskip("peft", reason="diffusers loads LoRAs with it")
    for name in ("transformer", "transformer_2"):
        lora = peft.LoraConfig(r=1, target_modules=["to_q"], init_lora_weights=False)
        getattr(wan, name).add_adapter(lora)
    check_rounded(wan, "int8")
    for is_safe in (False, True):  # the safe way lost it without a word
        with pytest.raises(everyframe.InputError, match=r"before everyframe\.quantize"):
            wan.fuse_lora(components=["transformer"], safe_fusing=is_safe)


def test_the_projection_of_an_ip_adapter_stays_wide() -> None:
    """It casts pictures to the dtype of its own weights."""
    unet = nn.Module()
    unet.encoder_hid_proj = ImageProjection(8, 8, 1)
    unet.to_q = nn.Linear(8, 8)
    everyframe.quantize(unet)
    assert isinstance(unet.to_q, QuantizedLinear)
    assert unet.encoder_hid_proj(torch.randn(1, 8)).isfinite().all()


def check_rounded(pipe: Any, kind: str) -> None:
    """Quantized, it makes the frames of its rounded weights."""
    rounded = copy.deepcopy(pipe)
    everyframe.quantize(pipe, kind)
    for name in ("transformer", "transformer_2"):
        for place, layer in getattr(pipe, name).named_modules():
            if isinstance(layer, QuantizedLinear):
                getattr(rounded, name).get_submodule(place).weight.data = layer.wide()
    assert np.array_equal(theirs(pipe, "wan"), theirs(rounded, "wan"))
    assert np.array_equal(ours(pipe, "wan"), theirs(rounded, "wan"))


@pytest.mark.parametrize("how", ["enable_layerwise_casting", "group offloading", "sequential"])
def test_layers_that_hooks_know_are_not_replaced(how: str, wan: Any, tmp_path: Path) -> None:
    """Weights that were on a disk were quantized as whatever was in their memory."""
    if how == "sequential":
        cpu_offload(wan.transformer, "cpu")
    elif how == "enable_layerwise_casting":
        wan.transformer.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32)
    else:
        wan.transformer.enable_group_offload(
            torch.device("cpu"), offload_type="leaf_level", offload_to_disk_path=str(tmp_path)
        )
    with pytest.raises(everyframe.InputError, match=f"{how}.* of transformer in each call; quanti"):
        everyframe.quantize(wan)


class Packed(torch.Tensor):
    """A weight of a quantizer, as torchao's: it can be multiplied, and little else."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.aminmax:
            raise NotImplementedError(f"Packed dispatch: {func}")
        made = super().__torch_function__(func, types, args, kwargs or {})
        return made.as_subclass(torch.Tensor) if func is nn.functional.linear else made


def test_values_beyond_float16_are_reported_of_weights_that_cannot_be_wider(wan: Any) -> None:
    """A repair of them ended in an error of the quantizer's own."""
    wan.to(torch.float16)
    layer = wan.transformer.blocks[0].ffn.net[0].proj
    with torch.no_grad():
        weight = layer.weight * (6e4 / layer.weight.abs().max())
    layer.weight = nn.Parameter(weight.as_subclass(Packed), requires_grad=False)
    with pytest.raises(NumericsError, match=r"step 1 .* are quantized \(Packed\); load it without"):
        ours(wan, "wan")


def test_what_quantized_weights_are_given_is_not_blamed_on_them(wan: Any) -> None:
    """They were reported to have made the NaN that they got."""
    layer = wan.transformer.blocks[0].ffn.net[0].proj
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Packed), requires_grad=False)
    asked = {"height": 16, "width": 16, "num_frames": 5, "num_inference_steps": 1}
    text = torch.full((1, 16, 32), torch.nan)
    with pytest.raises(NumericsError, match="transformer was given encoder_hidden_states that is"):
        everyframe.run(wan, **asked, prompt_embeds=text, negative_prompt_embeds=text)


@pytest.mark.parametrize(
    "given",
    [{"prompt_embeds": np.zeros((1, 16, 32), np.float32)},
     {"prompt": "a fox", "max_sequence_length": np.zeros((2, 2))},
     {"prompt": "a fox", "num_videos_per_prompt": np.zeros((2, 2))}],
)  # fmt: skip
def test_an_error_about_an_array_is_one_line(wan: Any, given: dict[str, Any]) -> None:
    """Python writes an array in as many lines as it has rows."""
    with pytest.raises(everyframe.InputError) as refused:
        everyframe.run(wan, height=16, width=16, num_frames=5, num_inference_steps=1, **given)
    assert "\n" not in str(refused.value)
