"""The golden check over every folder here, and the faults that it must not let pass."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

HERE = Path(__file__).parent


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("golden_check", HERE / "check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


check = _load()
FOLDERS = sorted(path for path in HERE.iterdir() if (path / "config.json").is_file())


@pytest.fixture
def copy(tmp_path: Path) -> Callable[[str], Path]:
    def make(name: str) -> Path:
        target = tmp_path / name
        shutil.copytree(HERE / name, target)
        return target

    return make


def change(path: Path, edit: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def test_there_are_goldens() -> None:
    assert len(FOLDERS) >= 6


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_golden(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main([str(folder)]) == 0, capsys.readouterr()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == folder.name
    assert all("absolute" in line and "relative" in line for line in lines[1:])
    assert lines[1:]


@pytest.mark.slow
def test_as_a_command() -> None:
    folder = HERE / "opensora_rflow_10"
    done = subprocess.run(
        [sys.executable, str(HERE / "check.py"), f"{folder}/"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("name", "tensor", "by"),
    [
        ("opensora_vae_temporal_v1_2", "moments", 3e-4),
        ("opensora_vae_temporal_v1_2", "reconstruction", 3e-4),
        ("opensora_rflow_10", "sample", 5e-3),
        ("opensora_rflow_30_mask", "sample", 5e-3),
        ("opensora_iddpm_20", "sample", 0.6),
        ("opensora_iddpm_20", "sample", float("nan")),
    ],
)
def test_a_changed_output_is_seen(
    copy: Callable[[str], Path], name: str, tensor: str, by: float
) -> None:
    folder = copy(name)

    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[tensor].view(-1)[-1] += by

    change(folder / "io.safetensors", edit)
    assert check.main([str(folder)]) == 1
    # A bad folder is not made good by a later one.
    assert check.main([str(folder), str(HERE / "opensora_rflow_10")]) == 1


def test_a_changed_weight_is_seen(copy: Callable[[str], Path]) -> None:
    folder = copy("opensora_vae_temporal_v1_2")

    def edit(tensors: dict[str, Tensor]) -> None:
        tensors["decoder.conv_out.conv.bias"][0] += 0.001

    change(folder / "weights.safetensors", edit)
    assert check.main([str(folder)]) == 1


def _without(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__delitem__(name)


def _with(name: str, *shape: int) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__setitem__(name, torch.zeros(shape))


@pytest.mark.parametrize(
    "edit",
    [
        _without("encoder.norm1.weight"),
        _with("encoder.norm1.weight", 3),
        _with("encoder.norm1.extra", 3),
    ],
    ids=["missing", "misshapen", "unknown"],
)
def test_weights_load_strictly(
    copy: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
    edit: Callable[[dict[str, Tensor]], None],
) -> None:
    folder = copy("opensora_vae_temporal_v1_2")
    change(folder / "weights.safetensors", edit)
    assert check.main([str(folder)]) == 2
    assert "encoder.norm1." in capsys.readouterr().err


def test_what_can_not_be_checked(
    copy: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def message(*folders: Path) -> str:
        assert check.main([str(folder) for folder in folders]) == 2
        error = capsys.readouterr().err.strip()
        assert len(error.splitlines()) == 1
        return error

    (tmp_path / "unheard_of").mkdir()
    assert "must begin with one of opensora_stdit_v1_0" in message(tmp_path / "unheard_of")
    assert "is not a folder" in message(tmp_path / "opensora_rflow_nowhere")
    folder = copy("opensora_rflow_10")
    change(folder / "io.safetensors", _without("sample"))
    assert "none of the outputs" in message(folder, HERE / "opensora_rflow_30")
    change(folder / "io.safetensors", _without("z0"))
    assert "no tensor 'z0'" in message(folder)
    (folder / "io.safetensors").write_bytes(b"short")
    assert "can't be read" in message(folder)
    (folder / "io.safetensors").unlink()
    assert "no file io.safetensors" in message(folder)


def test_other_sizes_are_run(copy: Callable[[str], Path]) -> None:
    """Another batch and step count: the run must follow the folder, so it ends off the golden."""
    folder = copy("opensora_iddpm_20")

    def one_prompt(tensors: dict[str, Tensor]) -> None:
        tensors["z0"], tensors["sample"] = tensors["z0"][:1].clone(), tensors["sample"][:1].clone()
        tensors["noise"] = tensors["noise"][:, [0, 2]].contiguous()

    change(folder / "io.safetensors", one_prompt)
    assert check.main([str(folder)]) == 0
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace("20", "10"))
    assert check.main([str(folder)]) == 1


@pytest.mark.parametrize("name", ["opensora_vae_temporal_v1_2", "opensora_stdit3_v1_2"])
def test_tensors_may_be_of_other_numbers(copy: Callable[[str], Path], name: str) -> None:
    folder = copy(name)

    def widen(tensors: dict[str, Tensor]) -> None:
        for key, tensor in tensors.items():
            tensors[key] = tensor.double() if tensor.is_floating_point() else tensor

    change(folder / "io.safetensors", widen)
    change(folder / "weights.safetensors", widen)
    assert check.main([str(folder)]) == 0


@pytest.mark.parametrize("is_nested", [False, True])
def test_sizes_may_stand_among_notes(copy: Callable[[str], Path], is_nested: bool) -> None:
    folder = copy("opensora_vae_temporal_v1_2")
    config = json.loads((folder / "config.json").read_text())
    config = {"constructor": config} if is_nested else config
    notes = {"upstream_class": "VAE_Temporal", "seed": 7}
    (folder / "config.json").write_text(json.dumps({**notes, **config}))
    assert check.main([str(folder)]) == 0


def test_pixels_are_those_of_the_first_sample(copy: Callable[[str], Path]) -> None:
    """Upstream looks at ``height[0]`` and ``width[0]``; what others have changes no number."""
    folder = copy("opensora_stdit3_v1_2")

    def edit(tensors: dict[str, Tensor]) -> None:
        tensors["height"][1:] *= 2
        tensors["width"][1:] *= 3

    change(folder / "io.safetensors", edit)
    assert check.main([str(folder)]) == 0


def test_a_reference_is_read_as_far_as_its_kind_says(copy: Callable[[str], Path]) -> None:
    """Upstream takes 9 latent frames of a clip, none without a condition, and pastes a picture
    over a video of one frame."""
    folder = copy("opensora2_sampler")
    config = folder / "config.json"
    head, image, tail = (config.read_text(), '"name": "t2v_image"', '"cond_type": "t2v"')
    at = head.index(tail, head.index(image))
    config.write_text(head[:at] + '"cond_type": "i2v_head"' + head[at + len(tail) :])

    def edit(tensors: dict[str, Tensor]) -> None:
        clip = tensors["v2v_head.references_0"]
        tensors["v2v_head.references_0"] = torch.cat([clip, clip[:, :, :2] + 1], dim=2)
        tensors["t2v.references_0"] = tensors["t2v.z0"][:, :, :1].clone()
        picture = tensors["t2v_image.z0"] + 1
        tensors["t2v_image.references_0"] = picture
        tensors["t2v_image.sample_pasted"] = picture.clone()

    change(folder / "io.safetensors", edit)
    assert check.main([str(folder)]) == 0


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("opensora_rflow_10", '"use_discrete_timesteps": true'),
        ("opensora_iddpm_20", '"predict_xstart": true'),
        ("opensora_iddpm_20", '"noise_schedule": "cosine"'),
    ],
)
def test_a_setting_that_changes_the_function_is_refused(
    copy: Callable[[str], Path], capsys: pytest.CaptureFixture[str], name: str, setting: str
) -> None:
    folder = copy(name)
    config = folder / "config.json"
    config.write_text(config.read_text().rstrip().removesuffix("}") + f", {setting}}}")
    assert check.main([str(folder)]) == 2
    key = setting.split('"')[1]
    assert f"{key} must be" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "config"),
    [
        # opensora_rflow_10 has upstream's defaults; what only training reads changes nothing.
        ("opensora_rflow_10", {"transform_scale": 2.0, "sample_method": "logit-normal"}),
        ("opensora_iddpm_20", {"timestep_respacing": "20", "cfg_scale": 7.0}),
        (
            "opensora_iddpm_20",
            {"num_sampling_steps": 20, "cfg_scale": 7.0, "rescale_learned_sigmas": True},
        ),
    ],
)
def test_what_a_config_leaves_out_is_upstreams_default(
    copy: Callable[[str], Path], name: str, config: dict[str, object]
) -> None:
    folder = copy(name)
    (folder / "config.json").write_text(json.dumps(config))
    assert check.main([str(folder)]) == 0


@pytest.mark.parametrize("respacing", ["ddim20", "10,10"])
def test_another_respacing_is_refused(
    copy: Callable[[str], Path], capsys: pytest.CaptureFixture[str], respacing: str
) -> None:
    folder = copy("opensora_iddpm_20")
    (folder / "config.json").write_text(json.dumps({"timestep_respacing": respacing}))
    assert check.main([str(folder)]) == 2
    assert f"timestep_respacing must be None, got '{respacing}'" in capsys.readouterr().err


def test_an_error_of_one_folder_leaves_the_others(
    copy: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy("opensora2_sampler")
    (folder / "config.json").write_text('{"cases": [{"name": "t2v"}]}')
    assert check.main([str(folder), str(HERE / "opensora_rflow_10")]) == 2
    printed = capsys.readouterr()
    assert "KeyError: 'patch_size'" in printed.err
    assert "opensora_rflow_10" in printed.out
