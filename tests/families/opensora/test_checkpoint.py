"""Upstream's layouts are recognised and loaded as they are; all else is named and refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import everyframe
from everyframe.checkpoints import download
from everyframe.checkpoints.locate import locate
from everyframe.core.errors import CheckpointError, InputError
from everyframe.families.opensora.checkpoint import find_files
from everyframe.families.opensora.options import OpenSoraOptions
from helpers.tiny_checkpoints import opensora as tiny_opensora

SIZES: dict[str, Any] = {"size": "16x16", "num_frames": 3, "num_inference_steps": 2, "seed": 5}
#: What hpcai-tech/OpenSora-STDiT-v3 and the configuration class of 1.2 say beside the sizes.
RELEASED_KEYS = {
    "_name_or_path": "hpcai-tech/OpenSora-STDiT-v3", "class_dropout_prob": 0.1, "drop_path": 0.0,
    "enable_flash_attn": True, "enable_layernorm_kernel": True,
    "enable_sequence_parallelism": False, "freeze_y_embedder": True, "mlp_ratio": 4.0,
    "only_train_temporal": False, "pred_sigma": True, "skip_y_embedder": False,
    "transformers_version": "4.37.2",
}  # fmt: skip
KEYS_OF_1_3 = {"use_spatial_rope": True, "kernel_size": [8, 8, -1]}


@pytest.fixture(scope="module")
def plain(model: str) -> Path:
    return Path(model)


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_opensora.opensora_1_0(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def plain_frames(plain: Path) -> np.ndarray[Any, Any]:
    return frames(plain)


@pytest.fixture(scope="module")
def old_frames(old: Path) -> np.ndarray[Any, Any]:
    return frames(old)


@pytest.fixture
def copy(plain: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(plain, tmp_path / "copy"))


@pytest.fixture
def old_copy(old: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(old.parent, tmp_path / "old-copy")) / old.name


def frames(model: Path, **options: Any) -> np.ndarray[Any, Any]:
    video = everyframe.generate("a red circle", model=str(model), **SIZES, **options)
    assert isinstance(video, everyframe.Video)
    return video.frames


def refused(model: Path) -> str:
    """The one line with which `generate` refuses a model."""
    with pytest.raises(InputError) as error:
        frames(model)
    text = str(error.value)
    assert "\n" not in text
    return text


def change_config(path: Path, **changes: Any) -> None:
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, **changes}))


# Layouts that load.


def test_sharded_safetensors(copy: Path, plain_frames: np.ndarray[Any, Any]) -> None:
    tiny_opensora.shard(copy)
    tiny_opensora.shard(copy / "vae")
    tiny_opensora.shard(copy / "text_encoder")
    assert len(list(copy.rglob("*-00002-of-00002.safetensors"))) == 3
    np.testing.assert_array_equal(frames(copy), plain_frames)


def test_released_config_keys(copy: Path, plain_frames: np.ndarray[Any, Any]) -> None:
    change_config(copy / "config.json", **RELEASED_KEYS)
    np.testing.assert_array_equal(frames(copy), plain_frames)


@pytest.mark.parametrize("named", [{}, {"type": "STDiT3-XL/2"}])
def test_a_config_of_sizes_alone_and_one_with_upstreams_type(
    copy: Path, plain_frames: np.ndarray[Any, Any], named: dict[str, str]
) -> None:
    file = copy / "config.json"
    config = json.loads(file.read_text())
    for key in ("model_type", "architectures"):
        del config[key]
    file.write_text(json.dumps({**config, **named}))
    np.testing.assert_array_equal(frames(copy), plain_frames)


@pytest.mark.parametrize("wrap", [lambda t: {"ema": t}, lambda t: {"ema": t, "epoch": 3}])
def test_a_pickle_may_hold_the_averaged_weights_inside(
    old_copy: Path, old_frames: np.ndarray[Any, Any], wrap: Callable[[Any], Any]
) -> None:
    torch.save(wrap(torch.load(old_copy)), old_copy)
    np.testing.assert_array_equal(frames(old_copy), old_frames)
    np.testing.assert_array_equal(frames(old_copy.parent), old_frames)


def test_names_of_old_autoencoders(
    copy: Path,
    old_copy: Path,
    plain_frames: np.ndarray[Any, Any],
    old_frames: np.ndarray[Any, Any],
) -> None:
    for place, name, expected in (
        (copy, "model.safetensors", plain_frames),
        (old_copy, "diffusion_pytorch_model.safetensors", old_frames),
    ):
        folder = place if place.is_dir() else place.parent
        tiny_opensora.old_attention_names(folder / "vae" / name)
        np.testing.assert_array_equal(frames(place), expected)


def test_t5_as_deepfloyd_has_it(copy: Path, plain_frames: np.ndarray[Any, Any]) -> None:
    shutil.rmtree(copy / "text_encoder")
    folder = tiny_opensora.deepfloyd_t5(copy / "text_encoder")
    assert sorted(file.name for file in folder.iterdir()) == [
        "config.json", "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin",
        "pytorch_model.bin.index.json", "spiece.model",
    ]  # fmt: skip
    other = frames(copy)
    assert not np.array_equal(other, plain_frames)


def test_parts_may_lie_elsewhere(
    copy: Path, tmp_path: Path, plain_frames: np.ndarray[Any, Any]
) -> None:
    vae = (copy / "vae").rename(tmp_path / "autoencoder")
    text = (copy / "text_encoder").rename(tmp_path / "t5")
    found = frames(copy, vae=str(vae), text_encoder=str(text))
    np.testing.assert_array_equal(found, plain_frames)


def test_a_missing_part_is_the_hubs(copy: Path) -> None:
    shutil.rmtree(copy / "vae")
    plan = everyframe.plan("a", model=str(copy), **SIZES)
    assert any(line.startswith("hpcai-tech/OpenSora-VAE-v1.2: ") for line in plan.downloads)


def test_a_repository_without_what_a_part_needs(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "fetch", lambda *_: None)
    with pytest.raises(CheckpointError, match=r"some/thing holds no config.json.*not the vae"):
        frames(copy, vae="some/thing")


def test_offline_every_missing_part_is_reported_with_its_command() -> None:
    files = find_files(locate("opensora-1.2"), OpenSoraOptions())
    assert files is not None
    with pytest.raises(InputError) as caught:
        files.fetch()
    for name in ("OpenSora-STDiT-v3", "OpenSora-VAE-v1.2", "t5-v1_1-xxl"):
        assert re.search(rf"hf download \S+/{name} ", str(caught.value))


# Versions that are recognised and refused.


@pytest.mark.parametrize(
    ("version", "config"),
    [("1.1", {"model_type": "STDiT2"}), ("1.3", {"model_type": "STDiT3", **KEYS_OF_1_3}),
     ("1.1", {"type": "STDiT2-XL/2"})],
)  # fmt: skip
def test_other_versions_by_config(tmp_path: Path, version: str, config: dict[str, Any]) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert f"this is Open-Sora {version}; supported: 1.0, 1.2" in refused(tmp_path)


@pytest.mark.parametrize(
    ("version", "names"),
    [
        ("1.1", ["blocks.0.attn_temp.qkv.weight", "t_block_temp.1.weight"]),
        ("1.3", ["spatial_blocks.0.attn.qkv.weight", "x_embedder_cond.proj.weight"]),
    ],
)
@pytest.mark.parametrize("as_folder", [False, True])
def test_other_versions_by_tensors(
    tmp_path: Path, version: str, names: list[str], as_folder: bool
) -> None:
    file = tmp_path / "weights.safetensors"
    save_file({name: torch.zeros(1) for name in names}, file)
    found = refused(tmp_path if as_folder else file)
    assert f"this is Open-Sora {version}; supported: 1.0, 1.2" in found


@pytest.mark.parametrize(
    ("name", "version"),
    [("hpcai-tech/OpenSora-STDiT-v4", "1.3"),
     ("opensora-1.1", "1.1")],
)  # fmt: skip
def test_other_versions_by_name(name: str, version: str) -> None:
    with pytest.raises(InputError, match=f"this is Open-Sora {version}; supported: 1.0, 1.2"):
        everyframe.generate("a", model=name)


# What is no model, or a broken one.


def test_folders_that_are_no_models(tmp_path: Path) -> None:
    assert "is no checkpoint" in refused(tmp_path)
    save_file({"conv.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert "is a model of no family that is known here" in refused(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert", "architectures": null}')
    assert "is a model of no family that is known here" in refused(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "config.json is not JSON" in refused(tmp_path)


def test_several_files_in_a_folder(old: Path, tmp_path: Path) -> None:
    for name in ("a.pth", "b.pth"):
        shutil.copy(old, tmp_path / name)
    assert "holds several checkpoints (a.pth, b.pth); give one of the files" in refused(tmp_path)


def test_an_unknown_key_of_the_config(copy: Path) -> None:
    change_config(copy / "config.json", hiden_size=32)
    found = refused(copy)
    assert "unknown key: 'hiden_size'; did you mean 'hidden_size'?" in found


@pytest.mark.parametrize("part", [".", "vae", "text_encoder"])
def test_a_truncated_file(copy: Path, part: str) -> None:
    file = copy / part / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    found = refused(copy)
    assert str(file) in found
    assert "truncated" in found


def test_parts_of_different_models(copy: Path) -> None:
    change_config(copy / "text_encoder" / "config.json", d_model=32)
    assert "the text encoder has 32 text channels, but the denoiser takes 16" in refused(copy)


@pytest.mark.parametrize(
    # The other way round, `test_family.py` reads tables alone.
    ("num_patches", "side"),
    [(256, 256), pytest.param(1024, 512, marks=pytest.mark.slow)],
)
def test_a_1_0_is_recognized_by_its_table_and_not_by_its_folder(
    tmp_path: Path, num_patches: int, side: int
) -> None:
    other = {256: 512, 512: 256}[side]
    folder = tmp_path / f"16x{other}x{other}"
    folder.mkdir()
    file = folder / "weights.pth"
    table = torch.zeros(1, num_patches, 8)
    torch.save({"blocks.0.attn_temp.qkv.weight": torch.zeros(1), "pos_embed": table}, file)
    for part in ("vae", "text_encoder"):
        (folder / part).mkdir()
    tiny_opensora.sentence_pieces(folder / "text_encoder" / "spiece.model")  # plans count tokens
    plan = everyframe.plan("a red circle", model=str(file))
    assert (plan.settings.height, plan.settings.width) == (side, side)


def test_a_1_0_of_unknown_size(old_copy: Path) -> None:
    (old_copy.parent / "config.json").unlink()
    unnamed = old_copy.rename(old_copy.with_name("weights.pth"))
    assert "put 256x256 or 512x512 into the file's name" in refused(unnamed)
