"""The family object: what a checkpoint turns into, full sizes without weights, its own defaults."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file

import everyframe
from everyframe.checkpoints import download
from everyframe.checkpoints.locate import locate
from everyframe.core.errors import InputError
from everyframe.families.opensora.family import OPEN_SORA
from everyframe.families.opensora.options import OpenSoraOptions
from everyframe.families.registry import stages_of
from helpers.tiny_checkpoints import opensora as tiny_opensora

T5_XXL = 4_762_310_656
#: The released counts (research report and hub cards), which count the checkpoint's parameters.
#: Buffers that are stored with them are no parameters: the null text, shift and scale.
RELEASED = {
    "opensora-1.2": {"denoiser": (1_207_643_972 - 36, 300 * 4096), "vae": (393_341_007, 8)},
    "opensora-1.0-16x256x256": {"denoiser": (759_620_768, 120 * 4096), "vae": (83_653_863, 0)},
    "opensora-1.0-16x512x512": {"denoiser": (759_620_768, 120 * 4096), "vae": (83_653_863, 0)},
}


def model_at(path: Path) -> Any:
    found = OPEN_SORA.recognise(locate(str(path)), OpenSoraOptions())
    assert found is not None
    return found


@pytest.mark.parametrize(
    "name",
    # Both squares of 1.0 are of the same parts.
    [pytest.param(name, marks=[pytest.mark.slow] * ("512" in name)) for name in RELEASED],
)
def test_a_plan_of_full_size_needs_no_weights(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(download, "fetch", never)
    monkeypatch.setattr("socket.socket.connect", never)
    before = psutil.Process().memory_info().rss
    plan = everyframe.plan("a cat", model=name)
    # torch's own code comes in with the first plan; T5 alone would be 19 GB.
    assert psutil.Process().memory_info().rss - before < 1e9
    assert plan.component("text_encoder").num_parameters == T5_XXL
    for part, (parameters, buffers) in RELEASED[name].items():
        assert plan.component(part).num_parameters == parameters + buffers, part
    assert len(plan.downloads) == 3
    assert [part.stage for part in plan.components] == ["text", "denoise", "decode"]


def test_squares_of_1_0_by_the_files_name() -> None:
    for side, scale in ((256, 0.5), (512, 1.0)):
        plan = everyframe.plan("a cat", model=f"16x{side}x{side}")
        assert (plan.settings.height, plan.settings.width) == (side, side)
        model = OPEN_SORA.recognise(locate(plan.model), OpenSoraOptions())
        assert model is not None
        assert model.config.denoiser.space_scale == scale


@pytest.mark.parametrize(("tokens", "side"), [(256, 256), (1024, 512)])
def test_squares_of_1_0_by_the_position_table(tmp_path: Path, tokens: int, side: int) -> None:
    names = {
        "pos_embed": torch.zeros(1, tokens, 4),
        "blocks.0.attn_temp.qkv.weight": torch.zeros(1),
    }
    save_file(names, tmp_path / "weights.safetensors")
    assert model_at(tmp_path / "weights.safetensors").config.square == side


def test_a_foreign_model_is_not_this_familys(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "weights.safetensors")
    location = locate(str(tmp_path / "weights.safetensors"))
    assert OPEN_SORA.recognise(location, OpenSoraOptions()) is None


def test_a_checkpoints_own_defaults(tmp_path: Path) -> None:
    folder = tiny_opensora.opensora_1_2(tmp_path / "own")
    assert model_at(folder).config.has_scores
    defaults = {"height": 16, "width": 24, "num_frames": 17, "fps": 12, "num_inference_steps": 3}
    (folder / "everyframe.json").write_text(json.dumps(defaults))
    model = model_at(folder)
    assert not model.config.has_scores
    settings, _ = model.resolve(everyframe.Request(prompt="a"), 0)
    assert (settings.height, settings.width, settings.num_frames) == (16, 24, 17)
    assert settings.guidance_scale == 7.0
    assert settings.option("aesthetic") is None


def test_stages_of_each_clip(tmp_path: Path) -> None:
    model = model_at(tiny_opensora.opensora_1_2(tmp_path / "tiny"))

    def names(clip: int, chain: int, *given: str) -> list[str]:
        settings = SimpleNamespace(chain=chain, given_frames=given, saving=lambda name, own: own)
        plan: Any = SimpleNamespace(family="opensora", settings=settings)
        return [stage.name for stage in stages_of(model, plan, clip)]

    assert names(0, 1) == ["text", "denoise", "decode"]
    assert names(0, 1, "image") == ["text", "given frames", "denoise", "decode"]
    assert names(0, 2, "last_image") == ["text", "denoise", "decode"]
    assert names(1, 2, "last_image") == ["given frames", "denoise", "decode"]
    assert names(0, 2, "extend") == ["text", "given frames", "denoise", "decode"]


def test_options_of_the_other_version(tmp_path: Path) -> None:
    path = tiny_opensora.opensora_1_0(tmp_path / "tiny")
    with pytest.raises(InputError, match=r"aesthetic has no effect on Open-Sora 1\.0"):
        everyframe.plan("a", model=str(path), aesthetic=6.0)
