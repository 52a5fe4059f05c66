"""LoRAs of pipelines in memory: merged for the call, and put back to the same bits and storages."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.hooks import apply_group_offloading

import everyframe
from everyframe.core.errors import CheckpointError, InputError
from everyframe.core.request import Request
from everyframe.diffusers_pipelines.calls.patched_weights import merged_in_place
from everyframe.diffusers_pipelines.inputs.options import PipelineOptions
from everyframe.diffusers_pipelines.loaded_pipeline import given_pipeline
from everyframe.planning.resolve import LoadedModel, prepare
from helpers.loras import files as lora_files
from helpers.loras.files import Factors, as_lora, factors_for
from helpers.tiny_checkpoints import pipelines

CPU = torch.device("cpu")
NAMES = ("wan", "ltx", "hunyuan", "cogvideox")
#: Two denoisers, and one; which weights a LoRA changes is tested in `test_lora_models.py`.
FAST = (("wan", torch.float32), ("ltx", torch.bfloat16))


@pytest.fixture(scope="module")
def pipe_of(tiny_models: Callable[[str], Path]) -> Callable[[str], Any]:
    found: dict[str, Any] = {}

    def load(name: str) -> Any:
        if name not in found:
            found[name] = DiffusionPipeline.from_pretrained(tiny_models(name))
            found[name].set_progress_bar_config(disable=True)
        return found[name]

    return load


def lora_of(pipe: Any, path: Path) -> dict[str, Factors]:
    """Write a LoRA for all matrices of the transformer."""
    state = {k: v.detach().float() for k, v in pipe.transformer.named_parameters()}
    factors = factors_for(state, lora_files.matrices(state), alpha=0.6)
    lora_files.write(path, as_lora(factors, "transformer."))
    return factors


def snapshot(pipe: Any) -> dict[str, tuple[int, int, torch.Tensor]]:
    """Identity, address and bits of each parameter and buffer."""
    return {
        f"{name}.{key}": (id(each), each.data_ptr(), each.detach().clone())
        for name, part in pipe.components.items()
        if isinstance(part, torch.nn.Module)
        for key, each in (*part.named_parameters(), *part.named_buffers())
    }


def is_as_before(pipe: Any, before: dict[str, tuple[int, int, torch.Tensor]]) -> bool:
    now = snapshot(pipe)
    return now.keys() == before.keys() and all(
        now[key][:2] == before[key][:2] and torch.equal(now[key][2], before[key][2])
        for key in before
    )


def asked(name: str, **more: Any) -> dict[str, Any]:
    """What the tiny pipeline is asked for, in the form of `run`."""
    call = dict(pipelines.CALLS[name])
    option = call.pop("option", {})
    prompt = "a red fox runs"
    return {"prompt": prompt, **call, **option, "num_inference_steps": 2, "seed": 3, **more}


def frames(pipe: Any, name: str, **more: Any) -> np.ndarray[Any, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", everyframe.EveryframeWarning)
        return np.asarray(everyframe.run(pipe, **asked(name, **more)).frames)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=() if (name, dtype) in FAST else pytest.mark.slow)
        for name in NAMES
        for dtype in (torch.float32, torch.bfloat16)
    ],
)
def test_merged_for_the_call_and_put_back(
    name: str, dtype: torch.dtype, pipe_of: Callable[[str], Any], tmp_path: Path
) -> None:
    pipe = deepcopy(pipe_of(name)).to(dtype)
    factors = lora_of(pipe, tmp_path / "one.safetensors")
    lora = f"{tmp_path / 'one.safetensors'}:0.5"
    before = snapshot(pipe)
    plain = frames(pipe, name)
    with_lora = frames(pipe, name, loras=[lora + ("@high" if name == "wan" else "")])
    assert is_as_before(pipe, before)
    assert np.array_equal(frames(pipe, name), plain), "taken off again"
    assert not np.array_equal(with_lora, plain)
    by_hand = deepcopy(pipe)
    with torch.no_grad():
        for key, each in factors.items():
            weight = by_hand.transformer.get_parameter(f"{key}.weight")
            delta = (each.up.flatten(1) @ each.down.flatten(1)).reshape(weight.shape)
            weight.copy_(weight.float() + delta * (each.scale * 0.5))
    assert np.array_equal(frames(by_hand, name), with_lora)


def test_an_error_puts_it_back_too(pipe_of: Callable[[str], Any], tmp_path: Path) -> None:
    pipe = deepcopy(pipe_of("ltx"))
    lora_of(pipe, tmp_path / "one.safetensors")
    before = snapshot(pipe)

    def breaks(*_: Any) -> None:
        assert not torch.equal(
            pipe.transformer.proj_in.weight, before["transformer.proj_in.weight"][2]
        )
        raise KeyError("planted")

    handle = pipe.transformer.register_forward_pre_hook(breaks)
    with pytest.raises(everyframe.EveryframeError, match="planted"):
        frames(pipe, "ltx", loras=str(tmp_path / "one.safetensors"))
    handle.remove()
    assert is_as_before(pipe, before)


def test_a_stream_that_is_closed_puts_it_back(
    pipe_of: Callable[[str], Any], tmp_path: Path
) -> None:
    from everyframe.core.events import Step

    pipe = deepcopy(pipe_of("ltx"))
    lora_of(pipe, tmp_path / "one.safetensors")
    before = snapshot(pipe)
    given = {k: v for k, v in asked("ltx").items() if k != "max_sequence_length"}
    request = everyframe.Request(**given, loras=[tmp_path / "one.safetensors"])
    events = everyframe.stream(request, pipe=pipe)
    for event in events:
        if isinstance(event, Step):
            assert not is_as_before(pipe, before)
            break
    events.close()
    assert is_as_before(pipe, before)


def test_what_is_not_in_memory_or_quantized_is_refused(
    pipe_of: Callable[[str], Any], tmp_path: Path
) -> None:
    pipe = deepcopy(pipe_of("ltx"))
    lora_of(pipe, tmp_path / "one.safetensors")
    pipe.transformer.proj_in.to("meta")
    with pytest.raises(InputError, match=r"proj_in.weight of the transformer is not in memory"):
        frames(pipe, "ltx", loras=str(tmp_path / "one.safetensors"))
    pipe = deepcopy(pipe_of("ltx"))
    bits = torch.zeros_like(pipe.transformer.proj_in.weight, dtype=torch.int8)
    pipe.transformer.proj_in.weight = torch.nn.Parameter(bits, requires_grad=False)
    with pytest.raises(InputError, match=r"proj_in.weight of the transformer is quantized"):
        frames(pipe, "ltx", loras=str(tmp_path / "one.safetensors"))

    class Packed(torch.Tensor):
        """As GGUF's: a row of codes has its scales beside them."""

    rows, columns = bits.shape
    packed = torch.zeros(rows, columns + 2, dtype=torch.uint8).as_subclass(Packed)
    pipe.transformer.proj_in.weight = torch.nn.Parameter(packed, requires_grad=False)
    with pytest.raises(InputError, match=r"proj_in.weight .* is quantized \(Packed, torch.uint8\)"):
        frames(pipe, "ltx", loras=str(tmp_path / "one.safetensors"))


def test_adapters_of_pefts_are_asked_to_be_unloaded(
    pipe_of: Callable[[str], Any], tmp_path: Path
) -> None:
    pipe = deepcopy(pipe_of("ltx"))
    lora_of(pipe, tmp_path / "one.safetensors")
    holder = torch.nn.Module()
    holder.base_layer = pipe.transformer.proj_in
    pipe.transformer.proj_in = holder
    with pytest.raises(InputError, match=r"unload_lora_weights"):
        frames(pipe, "ltx", loras=str(tmp_path / "one.safetensors"))


def test_a_lora_of_another_model_is_reported_before_the_call(
    pipe_of: Callable[[str], Any], tmp_path: Path
) -> None:
    lora_of(pipe_of("hunyuan"), tmp_path / "one.safetensors")
    with pytest.raises(CheckpointError, match="is no LoRA for LTXPipeline given in Python"):
        frames(pipe_of("ltx"), "ltx", loras=str(tmp_path / "one.safetensors"))


def test_a_run_goes_on_with_its_lora_alone(pipe_of: Callable[[str], Any], tmp_path: Path) -> None:
    """The pipeline is the same between runs; the LoRA is the run's, by its hash."""
    from everyframe.core.events import Step

    pipe = deepcopy(pipe_of("ltx"))
    path = tmp_path / "one.safetensors"
    lora_of(pipe, path)
    expected = frames(pipe, "ltx", loras=str(path))
    given = {k: v for k, v in asked("ltx").items() if k != "max_sequence_length"}
    request = everyframe.Request(
        **given, loras=[path], option={"max_sequence_length": 16, "output_type": "np"}
    )
    events = everyframe.stream(request, pipe=pipe)
    next(each for each in events if isinstance(each, Step))
    events.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", everyframe.EveryframeWarning)
        resumed = everyframe.resume(pipe=pipe)
    assert np.array_equal(np.asarray(resumed.frames), expected)


def test_components_that_are_one_module() -> None:
    """Its weights are patched once and put back; patches that differ are refused."""
    module = torch.nn.Linear(2, 2, bias=False)
    before = module.weight.detach().clone()
    pipe = {"transformer": module, "transformer_2": module, "scheduler": None}

    def one_more(weight: torch.Tensor) -> torch.Tensor:
        return weight + 1

    one = {"weight": one_more}
    with merged_in_place(pipe, {"transformer": one, "transformer_2": one}):
        assert torch.equal(module.weight, before + 1)
    assert torch.equal(module.weight, before)
    message = r"transformer and the transformer_2 .* are one module"
    with pytest.raises(InputError, match=message), merged_in_place(pipe, {"transformer": one}):
        pytest.fail("the patch of one is not that of the other")
    assert torch.equal(module.weight, before)


def test_a_plan_counts_what_is_saved(pipe_of: Callable[[str], Any], tmp_path: Path) -> None:
    """The bytes of the weights that change, beside what the device needs."""
    pipe, path = pipe_of("ltx"), tmp_path / "lora.safetensors"
    factors = lora_of(pipe, path)
    parameters = dict(pipe.transformer.named_parameters())
    size = sum(parameters[f"{name}.weight"].nbytes for name in factors)
    request = asked("ltx", loras=str(path))
    option = {k: request.pop(k) for k in list(request) if k not in Request.model_fields}
    given = LoadedModel("pipeline", given_pipeline(pipe, PipelineOptions(option=option)))
    plan = prepare(Request(**request, option=option), given=given).plan
    bare = prepare(Request(**{**request, "loras": []}, option=option), given=given).plan
    assert plan.host_bytes - bare.host_bytes == size
    assert any("saved in host memory for the call" in note for note in plan.notes)
    assert not any("saved in host memory" in note for note in bare.notes)


@pytest.mark.parametrize("name", ["wan", "cogvideox"])
def test_joined_projections_are_refused_until_they_are_parted(
    name: str, pipe_of: Callable[[str], Any], tmp_path: Path
) -> None:
    """They are copies: what is merged into the weights that they were made of has no effect."""
    pipe = deepcopy(pipe_of(name))
    lora_of(pipe, tmp_path / "one.safetensors")
    lora = f"{tmp_path / 'one.safetensors'}" + ("@high" if name == "wan" else "")
    wanted = frames(deepcopy(pipe), name, loras=[lora])
    pipe.transformer.fuse_qkv_projections()
    with pytest.raises(InputError, match=r"pipe\.transformer\.unfuse_qkv_projections\(\)"):
        frames(pipe, name, loras=[lora])
    pipe.transformer.unfuse_qkv_projections()
    assert np.array_equal(frames(pipe, name, loras=[lora]), wanted)


def test_weights_on_a_disk_are_refused(pipe_of: Callable[[str], Any], tmp_path: Path) -> None:
    """Each call reads them from their files again."""
    pipe = deepcopy(pipe_of("ltx"))
    lora_of(pipe, tmp_path / "one.safetensors")
    pipe.transformer.enable_group_offload(
        CPU, offload_type="leaf_level", offload_to_disk_path=str(tmp_path / "offloaded")
    )
    with pytest.raises(InputError, match="of the transformer is not in memory"):
        frames(pipe, "ltx", loras=str(tmp_path / "one.safetensors"))


def test_a_copy_of_group_offloading_is_patched_and_put_back() -> None:
    """With streams, a group gives its copy to a weight at each offload, also after an error."""
    module = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False))
    apply_group_offloading(module, CPU, offload_type="leaf_level")
    weight = module[0].weight
    group = module[0]._diffusers_hook.get_hook("group_offloading").group
    before = weight.detach().clone()
    group.cpu_param_dict = {weight: weight.data}  # as its streams, which a CPU has not, would do

    def one_more(given: torch.Tensor) -> torch.Tensor:
        return given + 1

    def breaks() -> None:
        with merged_in_place({"transformer": module}, {"transformer": {"0.weight": one_more}}):
            assert torch.equal(group.cpu_param_dict[weight], before + 1)
            weight.data = weight.data.clone()  # on the device meanwhile
            raise KeyError("planted")

    with pytest.raises(KeyError, match="planted"):
        breaks()
    assert torch.equal(weight, before)
    weight.data = group.cpu_param_dict[weight]
    assert torch.equal(weight, before)
