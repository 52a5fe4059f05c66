"""Whole runs over checkpoints with planted faults: found, rightly named, repaired, recorded.

Weights of tiny checkpoints are made so large that float16 overflows for real, on the CPU.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import everyframe
from everyframe.cli.main import main
from everyframe.core.errors import NumericsError
from everyframe.core.events import Event, FramesDecoded, Repaired, VideoDone
from everyframe.core.request import Request
from everyframe.engine import run
from everyframe.runs.run_state import RunState, RunStateWriter, SaveOptions
from everyframe.runtime.interface import VideoState
from helpers.events import alarms
from helpers.tiny_checkpoints import inpaint as tiny_inpaint
from helpers.tiny_checkpoints import opensora as tiny_opensora
from helpers.tiny_checkpoints import opensora2 as tiny_opensora2
from helpers.tiny_checkpoints import stepvideo as tiny_stepvideo
from helpers.tiny_checkpoints import svd as tiny_svd

HALF: dict[str, Any] = {"dtype": "float16", "force": True, "device": "cpu"}


def picture(height: int, width: int) -> np.ndarray[Any, Any]:
    """Noise, so that nothing about it is of one colour."""
    return np.random.default_rng(0).integers(0, 255, (height, width, 3), np.uint8)


MASK = np.zeros((32, 32), np.uint8)
MASK[8:24, 8:24] = 255

FAMILIES: dict[str, tuple[Callable[[Path], Path], dict[str, Any]]] = {
    "svd": (
        tiny_svd.svd,
        {"image": picture(32, 32), "height": 32, "width": 32, "num_frames": 2},
    ),
    "inpaint": (
        tiny_inpaint.inpaint,
        {"prompt": "a red ball", "image": picture(32, 32), "mask": MASK, "control": "canny"},
    ),
    "opensora": (
        tiny_opensora.opensora_1_2,
        {"prompt": "a red circle", "size": "32x32", "num_frames": 5},
    ),
    "opensora-1.0": (
        lambda folder: tiny_opensora.opensora_1_0(folder).parent,
        {"prompt": "a red circle", "size": "32x32", "num_frames": 3},
    ),
    "opensora2": (
        tiny_opensora2.opensora2,
        {"prompt": "a red circle", "size": "16x16", "num_frames": 5},
    ),
    "stepvideo": (
        tiny_stepvideo.stepvideo,
        {"prompt": "a red circle", "size": "16x16", "num_frames": 1},
    ),
}

#: Weights that are planted, by file; each is the module that must be named. Component by folder.
#: One of each file's a run: the first always, the others with ``--slow``.
PLANTED: dict[str, dict[str, list[str]]] = {
    "svd": {
        "image_encoder/model": [
            "vision_model.encoder.layers.0.mlp.fc1",
            "vision_model.encoder.layers.1.mlp.fc2",
            "vision_model.encoder.layers.0.self_attn.out_proj",
            "vision_model.encoder.layers.0.self_attn.v_proj",
        ],
        "unet/diffusion_pytorch_model": [
            "down_blocks.0.resnets.0.spatial_res_block.conv1",
            "mid_block.attentions.0.transformer_blocks.0.ff.net.0.proj",
            "mid_block.attentions.0.temporal_transformer_blocks.0.ff_in.net.0.proj",
            "mid_block.resnets.0.temporal_res_block.conv1",
        ],
        "vae/diffusion_pytorch_model": [
            "decoder.mid_block.resnets.0.spatial_res_block.conv1",
            "decoder.mid_block.resnets.0.temporal_res_block.conv2",
            "decoder.up_blocks.0.resnets.0.spatial_res_block.conv2",
            "decoder.conv_in",
        ],
    },
    "inpaint": {
        "text_encoder/model": [
            "encoder.layers.0.mlp.fc1",
            "encoder.layers.1.self_attn.out_proj",
            "encoder.layers.1.mlp.fc2",
            "encoder.layers.0.self_attn.v_proj",
        ],
        "controlnet/diffusion_pytorch_model": [
            "mid_block.resnets.0.conv1",
            "down_blocks.0.resnets.0.conv1",
            "mid_block.attentions.0.proj_in",
            "mid_block.resnets.1.conv2",
        ],
        "unet/diffusion_pytorch_model": [
            "down_blocks.0.resnets.0.conv1",
            "mid_block.attentions.0.proj_in",
            "mid_block.resnets.0.conv1",
            "mid_block.attentions.0.transformer_blocks.0.ff.net.0.proj",
        ],
        "vae/diffusion_pytorch_model": [
            "decoder.up_blocks.1.resnets.0.conv1",
            "decoder.mid_block.resnets.0.conv1",
            "decoder.up_blocks.0.resnets.0.conv2",
            "decoder.conv_in",
        ],
    },
    "opensora": {
        "model": [
            "spatial_blocks.0.mlp.fc1",
            "temporal_blocks.1.mlp.fc1",
            "spatial_blocks.1.cross_attn.q_linear",
            "temporal_blocks.0.attn.proj",
        ],
        "vae/model": [
            "spatial_vae.module.decoder.up_blocks.1.resnets.0.conv1",
            "spatial_vae.module.decoder.mid_block.resnets.0.conv1",
            "spatial_vae.module.decoder.conv_in",
            "spatial_vae.module.decoder.up_blocks.3.resnets.0.conv1",
        ],
    },
    "opensora-1.0": {
        "OpenSora-v1-HQ-16x256x256": [
            "blocks.0.mlp.fc1",
            "blocks.1.attn_temp.proj",
            "blocks.1.cross_attn.q_linear",
            "blocks.0.cross_attn.proj",
        ],
    },
    "opensora2": {
        "Open_Sora_v2": ["double_blocks.1.img_mlp.0", "single_blocks.0.v_mlp"],
        "hunyuan_vae": [
            "decoder.mid_block.resnets.0.conv1.conv",
            "decoder.up_blocks.1.resnets.0.conv2.conv",
        ],
    },
    "stepvideo": {
        "step_llm/model-00001-of-00002": ["transformer.layers.0.feed_forward.w1"],
        "transformer/diffusion_pytorch_model-00002-of-00002": [
            "transformer_blocks.1.ff.net.0.proj"
        ],
        "vae/vae_v2": ["decoder.up.1.block.0.conv1.conv"],
    },
}
#: What holds a denoiser is called otherwise.
COMPONENTS = {
    **dict.fromkeys(
        ("model", "transformer", "OpenSora-v1-HQ-16x256x256", "Open_Sora_v2"), "denoiser"
    ),
    "hunyuan_vae": "vae",
}
RUNS = [
    pytest.param(family, number, marks=() if number == 0 else pytest.mark.slow)
    for family, files in PLANTED.items()
    for number in range(len(next(iter(files.values()))))
]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A checkpoint of that family without a fault, written once."""
    root, made = tmp_path_factory.mktemp("models"), {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = FAMILIES[family][0](root / family)
            config = made[family] / "vae" / "config.json"
            says = json.loads(config.read_text()) if config.is_file() else {}
            if "_class_name" in says:
                # By default diffusers' say that fp16 overflows in them; these are to be let in.
                config.write_text(json.dumps({**says, "force_upcast": False}))
        return made[family]

    return folder


def plant(folder: Path, file: str, module: str, change: Callable[[torch.Tensor], None]) -> None:
    """Change one weight of a checkpoint; Open-Sora 1.0's denoiser is a pickle."""
    pickle = folder / f"{file}.pth"
    if pickle.exists():
        tensors = torch.load(pickle, weights_only=True)
        change(tensors[f"{module}.weight"])
        torch.save(tensors, pickle)
        return
    path = folder / f"{file}.safetensors"
    tensors = load_file(path)
    change(tensors[f"{module}.weight"])
    save_file(tensors, path, metadata={"format": "pt"})


def enlarge(weight: torch.Tensor) -> None:
    """As large as float16 just holds."""
    weight.mul_(6e4 / weight.abs().max())


def events_of(folder: Path, family: str, **options: Any) -> list[Event]:
    given = {**FAMILIES[family][1], "num_inference_steps": 2, "seed": 3, **HALF, **options}
    return list(everyframe.stream(Request(model=str(folder), **given)))


@pytest.mark.parametrize(("family", "number"), RUNS)
def test_overflow_anywhere_is_repaired(
    family: str, number: int, sound: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(sound(family), tmp_path / "model"))
    planted = {file: modules[number] for file, modules in PLANTED[family].items()}
    for file, module in planted.items():
        plant(folder, file, module, enlarge)
    events = events_of(folder, family)
    repairs = [event for event in events if isinstance(event, Repaired)]
    # The first of each component is the culprit; those after it are given what it made.
    first = {event.component: event for event in reversed(repairs)}
    for file, module in planted.items():
        part = file.split("/")[0]
        component = COMPONENTS.get(part, part)
        names = [event.module for name, event in first.items() if name.startswith(component)]
        assert [name.removeprefix("text_model.") for name in names] == [module]
    assert {event.cause for event in repairs} == {"range"}
    for event in events:
        if isinstance(event, FramesDecoded):
            assert np.isfinite(event.frames).all()
    done = events[-1]
    assert isinstance(done, VideoDone)
    assert [each["module"] for each in done.record["repairs"]] == [e.module for e in repairs]
    assert json.loads(json.dumps(done.record))["repairs"]


def test_faults_are_planted_in_forty_places() -> None:
    """With those of `tests/diffusers_pipelines/test_guard.py`, over all families."""
    here = sum(len(modules) for files in PLANTED.values() for modules in files.values())
    assert here >= 43


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_hundred_clean_runs_raise_no_alarm(dtype: str, sound: Callable[[str], Path]) -> None:
    """Fifty in each precision: other seeds, other noise, and none of them is a fault."""
    num_videos = {"svd": 10, "inpaint": 10, "opensora": 30}
    assert sum(num_videos.values()) == 50
    for family, count in num_videos.items():
        events = events_of(
            sound(family), family, dtype=dtype, num_videos=count, num_inference_steps=1
        )
        assert not alarms(events)
        assert len([event for event in events if isinstance(event, VideoDone)]) == count


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_clean_run_raises_no_alarm(family: str, sound: Callable[[str], Path]) -> None:
    events = events_of(sound(family), family)
    assert not alarms(events)
    done = events[-1]
    assert isinstance(done, VideoDone)
    assert "repairs" not in done.record


def test_bad_weights_are_refused_and_nothing_is_written(
    sound: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = Path(shutil.copytree(sound("opensora"), tmp_path / "model"))
    plant(folder, "model", "spatial_blocks.1.mlp.fc2", lambda w: w.view(-1)[5].fill_(torch.nan))
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    words = "--size 32x32 --num-frames 5 --steps 2 --device cpu -o clip.mp4"
    assert main(["generate", "a red circle", *words.split(), "--model", str(folder)]) == 4
    printed = capsys.readouterr().err
    assert "step 1 of denoise" in printed
    assert "denoiser.spatial_blocks.1.mlp.fc2.weight in 1 of" in printed
    assert not list(Path().iterdir())


def test_frames_that_are_not_finite_pass_no_gate() -> None:
    """Whatever was watched before: the engine looks at every frame that it hands on."""
    bad = np.zeros((1, 2, 2, 3), np.float32)
    bad[0, 1, 1, 1] = np.nan

    class Careless:
        name, component, is_resumable = "decode", "vae", False

        def num_steps(self, num_videos: int) -> int:
            return 0

        def run(self, videos: Sequence[VideoState]) -> Iterator[Event]:
            yield FramesDecoded(videos[0].seed, 1, bad)

    class Model:
        def stages(self, plan: Any, clip: int) -> list[Any]:
            return [Careless()]

    plan = SimpleNamespace(settings=SimpleNamespace(chain=1))
    here = SimpleNamespace(
        plan=plan,
        parallel=SimpleNamespace(video_group=SimpleNamespace(is_lead=False)),
        stages=lambda model, clip: model.stages(plan, clip),
    )
    keeper, progress = RunStateWriter(None, SaveOptions(None)), RunState(videos=[VideoState(0)])
    events = run._run(here, Model(), {}, keeper, progress)  # type: ignore[arg-type]
    with pytest.raises(NumericsError, match="nothing was written"):
        list(events)
