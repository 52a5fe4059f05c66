"""Files of an Open-Sora 2.0: found by what they hold, and parts of other models named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import everyframe
from everyframe.checkpoints.locate import locate
from everyframe.core.errors import CheckpointError, EveryframeError, InputError
from everyframe.core.request import Request
from everyframe.families.opensora2.checkpoint import (
    CLIP,
    DEEP_DENOISER,
    DEEP_VAE,
    DENOISER,
    FLUX,
    HUNYUAN_VAE,
    T5,
)
from everyframe.families.opensora2.vae_config import DCAEConfig, HunyuanVAEConfig
from everyframe.planning.find_model import find_model
from helpers.tiny_checkpoints import opensora2 as tiny

Models = Callable[[str], Path]
ASKED = {"prompt": "a red circle", "size": "32x32", "num_frames": 9, "device": "cpu"}


def found(model: Path | str, **options: Any) -> Any:
    spec, family = find_model(Request(model=str(model), **{**ASKED, **options}), may_fetch=False)
    assert family == "opensora2"
    return spec


@pytest.fixture
def copy(tiny_models: Models, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_models("opensora2"), tmp_path / "open-sora"))


def test_files_may_have_any_name(copy: Path) -> None:
    (copy / DENOISER).rename(copy / "mine.safetensors")
    (copy / HUNYUAN_VAE).rename(copy / "decoder.safetensors")
    files = found(copy, first_frame="flux").files
    assert files.path("denoiser").name == "mine.safetensors"
    assert files.path("vae").name == "decoder.safetensors"
    assert files.path("first_denoiser").name == FLUX
    # A file stands for the folder that it lies in.
    assert found(copy / "mine.safetensors").files.path("clip") == copy / CLIP


def test_each_variant_is_known_by_its_autoencoder(tiny_models: Models) -> None:
    assert isinstance(found(tiny_models("opensora2")).config.vae, HunyuanVAEConfig)
    deep = found(tiny_models("opensora2-dcae"), vae_scaling=0.493).config.vae
    assert isinstance(deep, DCAEConfig)
    assert deep.scale_factor == 0.493


def test_parts_elsewhere_are_named_by_options(copy: Path, tmp_path: Path) -> None:
    moved = {}
    for option, name in (("text_encoder", T5), ("clip", CLIP), ("vae", HUNYUAN_VAE)):
        moved[option] = tmp_path / Path(name).name
        (copy / name).rename(moved[option])
    flux = tmp_path / "flux"
    flux.mkdir()
    for name in (FLUX, "flux1-dev-ae.safetensors"):
        (copy / name).rename(flux / name)
    options = {name: str(path) for name, path in moved.items()}
    spec = found(copy, first_frame="flux", flux=str(flux), **options)
    assert spec.missing() == ()
    assert everyframe.generate(
        model=str(copy), first_frame="flux", flux=str(flux), num_inference_steps=1, seed=1,
        first_frame_resolution="video",
        **options, **ASKED,
    )  # fmt: skip


def test_what_is_not_on_disk_comes_from_upstreams_repository(copy: Path) -> None:
    shutil.rmtree(copy / "google")
    (copy / FLUX).unlink()
    missing = " ".join(found(copy, first_frame="flux").missing())
    assert "hpcai-tech/Open-Sora-v2: google/t5-v1_1-xxl/config.json" in missing
    assert "flux1-dev.safetensors" in missing


@pytest.mark.parametrize(
    ("name", "channels"),
    [("opensora-2.0", 16), ("hpcai-tech/Open-Sora-v2", 16), ("opensora-2.0-dcae", 128)],
)
def test_known_names_are_planned_before_download(name: str, channels: int) -> None:
    spec = found(name, size="768x768", num_frames=1)
    assert spec.config.vae.latent_channels == channels
    assert spec.missing()
    sizes = {each.name: sum(each.num_elements.values()) for each in spec.components(None)}
    assert sizes["denoiser"] == {16: 11_891_390_528, 128: 11_891_971_200}[channels]
    assert sizes["text_encoder"] == 4_762_310_656


def test_names_of_2_0_are_not_refused_any_more() -> None:
    for name in ("opensora-2.0", "hpcai-tech/Open-Sora-v2-Video-DC-AE"):
        assert locate(name).known is not None
    with pytest.raises(InputError, match=r"Open-Sora 1\.3; supported: 1\.0, 1\.2, 2\.0"):
        locate("opensora-1.3")


def mixed(models: Models, **options: str) -> Callable[[str], str]:
    def message(model: str) -> str:
        with pytest.raises(EveryframeError) as error:
            find_model(Request(model=model, **{**ASKED, **options}), may_fetch=False)
        text = str(error.value)
        assert "\n" not in text
        return text

    return message


def test_parts_of_other_models_are_named(tiny_models: Models) -> None:
    """The parts of 1.0, 1.2 and 2.0 mixed up."""
    new, deep = tiny_models("opensora2"), tiny_models("opensora2-dcae")
    old, oldest = tiny_models("opensora-1.2"), tiny_models("opensora-1.0")
    message = mixed(tiny_models, vae=str(old / "vae" / "model.safetensors"))(str(new))
    assert "it is Open-Sora 1.2's autoencoder" in message
    image = oldest / "vae" / "diffusion_pytorch_model.safetensors"
    assert "single pictures, as Open-Sora 1.0 has it" in mixed(tiny_models, vae=str(image))(
        str(new)
    )
    message = mixed(tiny_models, vae=str(old / "model.safetensors"))(str(new))
    assert "it is Open-Sora 1.2's denoiser" in message
    message = mixed(tiny_models, vae=str(deep / DEEP_VAE))(str(new))
    assert "the autoencoder has 4 latent channels, but the denoiser takes 2" in message
    message = mixed(tiny_models, text_encoder=str(new / CLIP))(str(new))
    assert "text encoder" in message
    # 2.0's autoencoder for the older versions.
    for folder in (old, oldest / "OpenSora-v1-HQ-16x256x256.pth"):
        message = mixed(tiny_models, vae=str(new / HUNYUAN_VAE))(str(folder))
        assert "HunyuanVideo's autoencoder" in message
    message = mixed(tiny_models)(str(new / FLUX))
    assert "this is FLUX.1, which draws pictures" in message


def test_several_denoisers_are_refused(copy: Path) -> None:
    shutil.copy(copy / DENOISER, copy / "second.safetensors")
    with pytest.raises(CheckpointError, match=r"second\.safetensors.*give one of the files"):
        found(copy)
    # One of them may be named.
    assert found(copy / "second.safetensors").files.path("denoiser").name == "second.safetensors"


def test_flux_schnell_is_no_video_model(copy: Path) -> None:
    tensors = load_file(copy / FLUX)
    save_file(
        {name: each for name, each in tensors.items() if not name.startswith("guidance_in.")},
        copy / FLUX,
    )
    assert found(copy).files.path("denoiser").name == DENOISER
    with pytest.raises(CheckpointError, match=r"drawn by FLUX\.1-dev"):
        found(copy, first_frame="flux")
    (copy / DENOISER).unlink()
    with pytest.raises(InputError, match=r"this is FLUX\.1, which draws pictures"):
        found(copy / FLUX)


def test_a_flux_folder_of_diffusers_is_checked(copy: Path, tmp_path: Path) -> None:
    folder = tiny.diffusers_flux(tmp_path / "flux", copy)
    spec = found(copy, first_frame="flux", flux=str(folder))
    assert spec.config.first_denoiser == replace(tiny.FIRST, fused_qkv=False, is_diffusers=True)
    assert dict(spec.config.first_vae) == tiny.FIRST_VAE
    config = json.loads((folder / "transformer" / "config.json").read_text())
    for wrong, text in (
        ({**config, "_class_name": "SD3Transformer2DModel"}, "of SD3Transformer2DModel"),
        ({}, "missing or of no class"),
    ):
        (folder / "transformer" / "config.json").write_text(json.dumps(wrong))
        with pytest.raises(InputError, match=f"must be of FluxTransformer2DModel, .*{text}"):
            found(copy, first_frame="flux", flux=str(folder))
    (folder / "transformer" / "config.json").write_text(json.dumps(config))
    shutil.rmtree(folder / "vae")
    with pytest.raises(InputError, match=r"flux: .*vae"):
        found(copy, first_frame="flux", flux=str(folder))


def test_flux_of_a_hub_repository_is_in_diffusers_layout(copy: Path) -> None:
    missing = found(copy, first_frame="flux", flux="black-forest-labs/FLUX.1-dev").missing()
    assert any("FLUX.1-dev: transformer/config.json" in line for line in missing)
    assert any("FLUX.1-dev: vae/config.json" in line for line in missing)


def test_a_denoiser_without_its_first_layer_is_named(copy: Path) -> None:
    tensors = load_file(copy / DENOISER)
    del tensors["vector_in.in_layer.weight"]
    save_file(tensors, copy / DENOISER)
    with pytest.raises(CheckpointError, match=r"vector_in\.in_layer\.weight"):
        found(copy)


@pytest.mark.parametrize(
    ("variant", "name"), [("opensora2", DENOISER), ("opensora2-dcae", DEEP_DENOISER)]
)
def test_the_patch_of_a_denoiser_without_condition_follows_from_its_autoencoder(
    tiny_models: Models, tmp_path: Path, variant: str, name: str
) -> None:
    folder = Path(shutil.copytree(tiny_models(variant), tmp_path / "plain"))
    whole = found(folder).config.denoiser
    tensors = load_file(folder / name)
    save_file({n: each for n, each in tensors.items() if "cond_in" not in n}, folder / name)
    assert found(folder).config.denoiser == replace(whole, cond_embed=False)


def test_options_of_other_parts_are_refused(tiny_models: Models, tmp_path: Path) -> None:
    folder = tiny_models("opensora2")
    for options, text in (
        ({"vae_scaling": 0.5}, "vae_scaling is for the DC-AE"),
        ({"vae": str(tmp_path / "none")}, "vae must be a folder or a file"),
        ({"flux": str(tmp_path), "first_frame": "flux"}, r"flux: .*flux1-dev\.safetensors"),
        ({"aesthetic": 6.5}, "aesthetic is an option of opensora models"),
    ):
        with pytest.raises((InputError, CheckpointError), match=text):
            found(folder, **options)


def test_tokens_beyond_each_encoder_are_reported(tiny_models: Models) -> None:
    folder = tiny_models("opensora2")
    words = "red circle " * 20
    plan = everyframe.plan(**{**ASKED, "prompt": words, "model": str(folder)})
    assert any("CLIP reads 77 tokens, and not" in note for note in plan.notes)
    with pytest.raises(InputError, match="this model reads 512; shorten it"):
        everyframe.plan(**{**ASKED, "prompt": words * 40, "model": str(folder)})
    cut = everyframe.plan(
        **{**ASKED, "prompt": words * 40, "model": str(folder), "truncate_prompt": True}
    )
    assert any("too long for T5; its end is cut" in note for note in cut.notes)


def test_flux_of_the_hub_cache_is_read(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards of the denoiser among others, and an autoencoder of one file."""
    folder = tiny.diffusers_flux(tmp_path / "flux", copy)
    cache = tmp_path / "hub" / "models--someone--flux"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("0123456789abcdef0123456789abcdef01234567")
    shutil.copytree(folder, cache / "snapshots" / "0123456789abcdef0123456789abcdef01234567")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache.parent))
    spec = found(copy, first_frame="flux", flux="someone/flux")
    assert spec.missing() == ()
    assert spec.config.first_denoiser == replace(tiny.FIRST, fused_qkv=False, is_diffusers=True)
    assert spec.weights("first_vae")[0].source.name == "diffusion_pytorch_model.safetensors"
