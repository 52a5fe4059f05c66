"""Folders of diffusers pipelines: planned, refused, made again from a record, and from Python."""

from __future__ import annotations

import importlib.util
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import everyframe
from everyframe.checkpoints import tensor_file
from everyframe.checkpoints.safetensors_header import SafetensorsHeader, read_header
from everyframe.cli.main import main
from everyframe.core.errors import CheckpointError, EveryframeError, InputError
from everyframe.core.events import Step
from everyframe.diffusers_pipelines.inputs.options import PipelineOptions
from everyframe.diffusers_pipelines.loaded_pipeline import given_pipeline
from everyframe.families.registry import family_names
from everyframe.ops.attention import PLAIN, by_kernel
from everyframe.planning.resolve import LoadedModel, prepare
from helpers.pickled_weights import pickle_weights
from helpers.tiny_checkpoints import pipelines as tiny_pipelines

SMALL: dict[str, Any] = {
    "prompt": "a fox", "num_inference_steps": 2, "seed": 1,
    **tiny_pipelines.CALLS["cogvideox"],
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny-cog"
    tiny_pipelines.cogvideox(path)
    return path


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


@pytest.fixture(scope="module")
def pipe(folder: Path) -> Any:
    return diffusers.CogVideoXPipeline.from_pretrained(folder)


def test_the_plan_says_what_runs(folder: Path) -> None:
    plan = everyframe.plan(model=str(folder), **SMALL)
    assert (plan.family, plan.infeasible) == ("pipeline", None)
    assert [part.name for part in plan.components] == ["text_encoder", "transformer", "vae"]
    transformer = diffusers.CogVideoXTransformer3DModel.from_pretrained(folder / "transformer")
    counted = {part.name: part.num_parameters for part in plan.components}
    assert counted["transformer"] == sum(each.numel() for each in transformer.parameters())
    # All of it is in memory at once, and the parts work one after the other.
    weights = sum(part.weight_bytes for part in plan.components)
    assert plan.peak_bytes >= weights
    assert plan.peak_bytes == weights + max(part.working_bytes for part in plan.components)


def test_each_file_is_looked_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan asks for the components dozens of times; released ones have thousands of tensors."""
    looked: list[Path] = []

    def counted(path: Path) -> SafetensorsHeader:
        looked.append(path)
        return read_header(path)

    monkeypatch.setattr(tensor_file, "read_header", counted)
    everyframe.plan(model=str(folder), **SMALL)
    assert sorted(looked) == sorted(folder.glob("*/*.safetensors"))


def test_decoders_stay_wide_and_what_steers_is_an_island(folder: Path) -> None:
    plan = everyframe.plan(model=str(folder), **SMALL)
    assert plan.component("vae").precision.parameters == "float32"
    plan = everyframe.plan(model=str(folder), dtype="bf16", **SMALL)
    assert "time_embedding" in plan.component("transformer").precision.islands


def test_what_does_not_fit_together_is_reported(folder: Path) -> None:
    """Each part alone would fit: all of them are in memory at once."""
    plan = everyframe.plan(model=str(folder), **SMALL)
    largest = max(part.peak_bytes for part in plan.components)
    assert largest < plan.peak_bytes
    # More than the largest part needs, after what a plan leaves free of any memory.
    limit = f"{int((largest + plan.peak_bytes) / 2 / 0.92)}B"
    small = everyframe.plan(model=str(folder), max_memory=limit, **SMALL)
    assert small.infeasible is not None
    assert "all of it in memory at once" in small.infeasible


def test_plans_are_made_for_machines_that_are_not_here(folder: Path) -> None:
    def dtypes(profile: str) -> dict[str, str]:
        plan = everyframe.plan(model=str(folder), profile=profile, **SMALL)
        return {part.name: part.precision.parameters for part in plan.components}

    ampere = {"text_encoder": "bfloat16", "transformer": "bfloat16", "vae": "float32"}
    assert dtypes("cuda-sm80") == ampere
    assert dtypes("cuda-sm75") == {
        name: word.replace("bfloat", "float") for name, word in ampere.items()
    }
    assert set(dtypes("cpu-fp32").values()) == {"float32"}


@pytest.mark.slow
def test_tiles_take_less_memory_and_are_refused_where_there_are_none(folder: Path) -> None:
    large = {**SMALL, "size": "512x512"}
    whole = everyframe.plan(model=str(folder), **large).component("vae").working_bytes
    tiled = everyframe.plan(model=str(folder), vae_tiling=True, **large)
    assert tiled.component("vae").working_bytes < whole
    assert ("vae_tiling", True) in tiled.settings.options
    video = everyframe.generate(model=str(folder), vae_tiling=True, **SMALL)
    # One tile holds all of so small a video.
    assert isinstance(video, everyframe.Video)
    plain = everyframe.generate(model=str(folder), **SMALL)
    assert isinstance(plain, everyframe.Video)
    assert np.array_equal(video.frames, plain.frames)


def test_pipelines_come_last_so_that_others_keep_theirs() -> None:
    assert family_names()[-1] == "pipeline"


def test_it_is_made_again_from_its_record(folder: Path, tmp_path: Path) -> None:
    video = everyframe.generate(model=str(folder), **SMALL)
    assert isinstance(video, everyframe.Video)
    path = video.save(tmp_path / "clip.mp4")
    again = everyframe.generate(from_record=path, model=str(folder))
    assert isinstance(again, everyframe.Video)
    assert np.array_equal(again.frames, video.frames)
    assert again.record["request"]["option"] == SMALL["option"]


def test_each_of_several_videos_is_that_of_its_seed(folder: Path) -> None:
    both = everyframe.generate(model=str(folder), num_videos=2, **SMALL)
    one = everyframe.generate(model=str(folder), **{**SMALL, "seed": 2})
    assert isinstance(both, list)
    assert isinstance(one, everyframe.Video)
    assert np.array_equal(both[1].frames, one.frames)
    assert not np.array_equal(both[0].frames, both[1].frames)


def test_latents_are_those_that_were_given(folder: Path, pipe: Any) -> None:
    latents = torch.randn((1, 3, 4, 2, 2), generator=torch.Generator().manual_seed(9))
    made = everyframe.generate(model=str(folder), latents=latents, output="float", **SMALL)
    with by_kernel(PLAIN):  # as long as no other one is certified
        wanted = pipe(
            "a fox", height=16, width=16, num_frames=9, num_inference_steps=2, latents=latents,
            max_sequence_length=16, output_type="np",
        ).frames[0]  # fmt: skip
    assert isinstance(made, everyframe.Video)
    assert np.array_equal(made.frames, wanted)


def test_the_command_line_takes_own_parameters(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "clip.mp4"
    words = [
        "a fox",
        "--model",
        str(folder),
        "--size",
        "16x16",
        "--num-frames",
        "9",
        "--steps",
        "2",
    ]
    own = ["--option", "max-sequence-length=16", "--option", "eta=0"]
    assert main(["generate", *words, *own, "--seed", "1", "-o", str(out)]) == 0
    assert everyframe.Video.load(out).num_frames == 9
    assert main(["plan", *words, "--option", "etta=0"]) == 2
    assert "no parameter 'etta'; did you mean 'eta'?" in capsys.readouterr().err
    assert main(["inspect", str(out)]) == 0
    assert "max_sequence_length" in capsys.readouterr().out


# Refusals: what is done to a whole folder, and the one line that comes of it.
def class_is(name: Any) -> Callable[[Path], None]:
    return lambda root: edit(root / "model_index.json", _class_name=name)


def edit(file: Path, **values: Any) -> None:
    content = json.loads(file.read_text())
    for name, value in values.items():
        content[name] = value
    file.write_text(json.dumps(content))


def pickled(root: Path) -> None:
    pickle_weights(root / "vae")


def without_weights(root: Path) -> None:
    next((root / "transformer").glob("*.safetensors")).unlink()


def without_a_tensor(root: Path) -> None:
    file = next((root / "transformer").glob("*.safetensors"))
    tensors = load_file(file)
    tensors.pop("proj_out.bias")
    save_file(tensors, file, metadata={"format": "pt"})


def with_a_tensor_more(root: Path) -> None:
    file = next((root / "transformer").glob("*.safetensors"))
    save_file({**load_file(file), "other.bias": torch.ones(3)}, file, metadata={"format": "pt"})


def misshapen(root: Path) -> None:
    file = next((root / "transformer").glob("*.safetensors"))
    tensors = load_file(file)
    tensors["proj_out.bias"] = tensors["proj_out.bias"][:3].clone()
    save_file(tensors, file, metadata={"format": "pt"})


REFUSED = {
    "a picture's": (
        class_is("FluxPipeline"),
        "FluxPipeline is not a video pipeline; supported are",
    ),
    "unknown": (class_is("FutureVideoPipeline"), r"FutureVideoPipeline, which diffusers \d"),
    "a package": (class_is("ConsisIDPipeline"), "ConsisIDPipeline needs packages .*opencv"),
    "code": (class_is(["my_code", "Mine"]), r"code of its own \(my_code.py\).*trust-remote-code"),
    "code in a part": (
        lambda root: (root / "vae" / "diffusers.py").write_text("1/0"),
        r"vae is diffusers.py\. Read that code",
    ),
    "pickled": (pickled, r"weights of its vae are pickled \(.*\.bin\).*save_pretrained"),
    "no folder": (lambda root: shutil.rmtree(root / "vae"), "lacks its component 'vae'"),
    "no weights": (without_weights, "lacks the weights of its transformer"),
    "no entry": (
        lambda root: edit(root / "model_index.json", vae=[None, None]),
        "lacks what a CogVideoXPipeline can't do without: vae",
    ),
    "quantized": (
        lambda root: edit(root / "vae" / "config.json", quantization_config={"a": 1}),
        "its vae is quantized",
    ),
    "a tensor less": (without_a_tensor, "its transformer lacks 1 tensors?: proj_out.bias"),
    "a tensor more": (
        with_a_tensor_more,
        "its transformer hold 1 tensors more than it has: other.bias",
    ),
    "another shape": (misshapen, "its transformer.*proj_out.bias"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_can_not_be_loaded_is_refused_in_one_line(copy: Path, what: str) -> None:
    if what == "a package" and importlib.util.find_spec("cv2"):
        pytest.skip("opencv is installed here, so the package that is missing elsewhere is not")
    change, text = REFUSED[what]
    change(copy)
    with pytest.raises(EveryframeError, match=text) as caught:
        everyframe.generate(model=str(copy), **SMALL)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_blocks_error_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each block that an error passes through logs its traceback."""
    root = tmp_path / "ltx25"
    tiny_pipelines.ltx25(root)
    asked = {"prompt": "a fox", "size": "32x32", "num_inference_steps": 1, "seed": 1}
    logger = logging.getLogger("diffusers")
    logger.addHandler(caplog.handler)
    try:
        with pytest.raises(InputError, match="num_frames"):  # no component says how many
            everyframe.generate(model=str(root), isolate=False, **asked)
    finally:
        logger.removeHandler(caplog.handler)
    assert "Traceback" not in caplog.text


@pytest.mark.slow
def test_modular_folders(tmp_path: Path) -> None:
    root = tmp_path / "ltx25"
    tiny_pipelines.ltx25(root)
    asked = {"prompt": "a fox", "seed": 1, **tiny_pipelines.CALLS["ltx25"]}
    plan = everyframe.plan(model=str(root), **asked)
    assert plan.settings.fps == 24
    assert "diffusion_decoder" in [part.name for part in plan.components]
    (root / "modular_config.json").write_text('{"auto_map": {"ModularPipelineBlocks": "a.B"}}')
    with pytest.raises(CheckpointError, match="code of its own"):
        everyframe.plan(model=str(root), **asked)
    (root / "modular_config.json").unlink()
    index = root / "modular_model_index.json"
    content = json.loads(index.read_text())
    content["vocoder"][2]["pretrained_model_name_or_path"] = "somebody/else"
    index.write_text(json.dumps(content))
    shutil.rmtree(root / "vocoder")
    with pytest.raises(CheckpointError, match=r"lacks its component 'vocoder'.*in somebody/else"):
        everyframe.plan(model=str(root), **asked)


def test_pickles_beside_safetensors_are_left_alone(copy: Path) -> None:
    (copy / "vae" / "diffusion_pytorch_model.bin").write_bytes(b"not even a pickle")
    everyframe.plan(model=str(copy), **SMALL)


def test_code_that_comes_along_runs_when_it_is_allowed(copy: Path) -> None:
    code = "from diffusers import CogVideoXPipeline\n\nclass Mine(CogVideoXPipeline):\n    pass\n"
    (copy / "my_code.py").write_text(code)
    class_is(["my_code", "Mine"])(copy)
    video = everyframe.generate(model=str(copy), trust_remote_code=True, **SMALL)
    assert isinstance(video, everyframe.Video)
    assert video.num_frames == 9


def test_what_the_pipeline_itself_refuses_is_an_input_error(folder: Path) -> None:
    asked = {**SMALL, "option": {**SMALL["option"], "timesteps": [5, 1], "prompt_embeds": None}}
    with pytest.raises(InputError, match=r"CogVideoXPipeline refuses: .*timestep"):
        everyframe.generate(model=str(folder), **asked)


@pytest.mark.parametrize("error", [OverflowError, ZeroDivisionError, RuntimeError])
def test_own_parameters_that_something_breaks_on_are_input(
    pipe: Any, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """Nobody but a pipeline knows what its own may be: they are named, but may not be the cause."""

    def breaks(*_: Any, **__: Any) -> None:
        raise error("too odd")

    monkeypatch.setattr(type(pipe), "encode_prompt", breaks)
    asked = {key: value for key, value in SMALL.items() if key != "option"}
    with pytest.raises(
        InputError,
        match=r"^CogVideoXPipeline (refuses|failed before .* was given eta=0.5): .*too odd",
    ):
        everyframe.run(pipe, eta=0.5, **asked)


def test_given_pipelines_take_their_own_parameters_as_keywords(pipe: Any) -> None:
    asked = {key: value for key, value in SMALL.items() if key != "option"}
    video = everyframe.run(pipe, max_sequence_length=16, eta=0.0, **asked)
    assert isinstance(video, everyframe.Video)
    request = video.record["request"]
    assert request["option"] == {"max_sequence_length": 16, "eta": 0.0}
    again = everyframe.run(pipe, from_record=video.record)
    assert isinstance(again, everyframe.Video)
    assert np.array_equal(again.frames, video.frames)
    with pytest.raises(InputError, match="no parameter 'eeta'; did you mean 'eta'"):
        everyframe.run(pipe, eeta=1, **asked)
    with pytest.raises(InputError, match=r"call pipe\.vae\.enable_tiling"):
        everyframe.run(pipe, vae_tiling=True, **asked)
    with pytest.raises(InputError, match="dtype can't be chosen for a pipeline that is loaded"):
        everyframe.run(pipe, dtype="bf16", **asked)


def test_a_record_of_a_given_pipeline_asks_for_it_again(pipe: Any, tmp_path: Path) -> None:
    video = everyframe.run(pipe, **SMALL)
    assert isinstance(video, everyframe.Video)
    path = video.save(tmp_path / "clip.mp4")
    with pytest.raises(InputError, match=r"CogVideoXPipeline that was given in Python.*run\(pipe"):
        everyframe.generate(from_record=path)


def test_events_of_a_given_pipeline_can_be_streamed(pipe: Any) -> None:
    request = everyframe.Request(**SMALL)
    steps = [each.step for each in everyframe.stream(request, pipe=pipe) if isinstance(each, Step)]
    assert steps == [1, 2]


def test_a_reader_who_leaves_leaves_a_given_pipeline_as_it_was(pipe: Any) -> None:
    before = dict(vars(pipe.scheduler))
    events = everyframe.stream(everyframe.Request(**SMALL), pipe=pipe)
    for event in events:
        if isinstance(event, Step):
            break
    events.close()  # type: ignore[attr-defined]
    assert not any(module._forward_pre_hooks for module in pipe.transformer.modules())
    assert vars(pipe.scheduler).keys() == before.keys()
    assert all(vars(pipe.scheduler)[name] is value for name, value in before.items())


def test_a_loaded_pipeline_is_not_refused_for_memory_that_it_has(folder: Path, pipe: Any) -> None:
    asked = {**SMALL, "size": "16384x16384", "num_frames": 49}
    assert everyframe.plan(model=str(folder), **asked).infeasible is not None
    given = LoadedModel("pipeline", given_pipeline(pipe, PipelineOptions(option=SMALL["option"])))
    assert prepare(everyframe.Request(**asked), given=given).plan.infeasible is None
    with pytest.raises(InputError, match="max_memory can't be chosen"):
        everyframe.run(pipe, max_memory="8GB", **SMALL)


@pytest.mark.parametrize("given", [7, torch.nn.Linear(1, 1)])
def test_what_is_no_pipeline(given: Any) -> None:
    with pytest.raises(InputError, match="must be a loaded diffusers pipeline, got"):
        everyframe.run(given, "a fox")
