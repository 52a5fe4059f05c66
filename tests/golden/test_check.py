"""The golden check over every folder here, and the faults that it must not let pass."""

from __future__ import annotations

import importlib.util
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
