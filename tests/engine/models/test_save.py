"""Saved checkpoints: merged or quantized weights that load again with the same bits."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import everyframe
from everyframe.checkpoints import safetensors_writer
from everyframe.checkpoints.tensor_file import open_checkpoint
from everyframe.core.errors import CheckpointError, InputError
from everyframe.precision.quantization import quantize
from helpers.components import originals, stored
from helpers.diagonals import diagonal
from helpers.loras import files as lora_files
from helpers.loras.files import as_lora, factors_for
from helpers.slow_rows import slow_unless
from helpers.tiny_checkpoints import families as tiny_families

#: Model, and the folder of its denoiser.
MODELS = {"wan": "transformer", "ltx": "transformer", "svd": "unet", "inpaint": "unet",
          "stepvideo": "transformer", "opensora-1.2": "model.safetensors"}  # fmt: skip


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    opened = open_checkpoint(path)
    return {name: opened.load(name) for name in opened}


def frames(name: str, model: Path, **more: Any) -> np.ndarray[Any, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", everyframe.EveryframeWarning)
        video = everyframe.generate(
            **tiny_families.asked(name, model=str(model), run_dir="off", **more)
        )
    assert isinstance(video, everyframe.Video)
    return np.asarray(video.frames)


def lora_of(model: Path, name: str, path: Path) -> list[str]:
    state = tensors_of(model / MODELS[name])
    factors = factors_for(state, lora_files.matrices(state, "block")[:6], alpha=0.4)
    lora_files.write(path, as_lora(factors))
    return [f"{path}@both" if name == "wan" else str(path)]


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", slow_unless(("opensora-1.2", "svd", "wan"), MODELS))
def test_a_merged_lora(name: str, dtype: str, tiny_root: Path, tmp_path: Path) -> None:
    model = tiny_families.made(name, tiny_root)
    loras = lora_of(model, name, tmp_path / "a.safetensors")
    everyframe.save(model, tmp_path / "saved", loras=loras)
    wanted = frames(name, model, loras=loras, dtype=dtype)
    assert np.array_equal(frames(name, tmp_path / "saved", dtype=dtype), wanted)
    assert not np.array_equal(frames(name, model, dtype=dtype), wanted)


@pytest.mark.parametrize(
    ("component", "dtype"),
    [
        ("transformer", "bf16"),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (("transformer", "fp32"), ("text_encoder", "bf16"), ("text_encoder", "fp32"))
        ),
    ],
)
def test_a_component_of_scaled_weights(
    component: str, dtype: str, tiny_root: Path, tmp_path: Path
) -> None:
    model = tiny_families.made("wan", tiny_root)
    name = {"transformer": "wan", "text_encoder": "umt5"}[component]
    tensors = originals.OTHER_NAMES[name](tensors_of(model / component))
    file = stored.write(tmp_path / "a.safetensors", stored.scaled(tensors)[0])
    more = {"components": {component: file}}
    everyframe.save(model, tmp_path / "saved", **more)
    wanted = frames("wan", model, dtype=dtype, **more)
    assert np.array_equal(frames("wan", tmp_path / "saved", dtype=dtype), wanted)
    everyframe.save(model, tmp_path / "narrow", dtype=dtype, **more)
    assert np.array_equal(frames("wan", tmp_path / "narrow", dtype=dtype), wanted)
    if dtype == "bf16":
        (wide, narrow) = (
            sum(each.stat().st_size for each in (tmp_path / place / component).glob("*.safe*"))
            for place in ("saved", "narrow")
        )
        assert narrow < 0.9 * wide


@pytest.mark.parametrize(("name", "kind"), diagonal(["opensora-1.2", "svd"], ["fp8", "int8"]))
def test_quantized_weights(name: str, kind: str, tiny_root: Path, tmp_path: Path) -> None:
    """The codes of the file are those of the run: they are not rounded again."""
    model = tiny_families.made(name, tiny_root)
    loras = lora_of(model, name, tmp_path / "a.safetensors")
    everyframe.save(model, tmp_path / "saved", loras=loras, quantize=kind)
    wanted = frames(name, model, loras=loras, quantize=kind)
    found = tensors_of(tmp_path / "saved" / MODELS[name])
    narrow = {torch.int8, torch.float8_e4m3fn} & {each.dtype for each in found.values()}
    assert len(narrow) == 1
    assert np.array_equal(frames(name, tmp_path / "saved", quantize=kind), wanted)
    # Without the option the same rounded weights are multiplied in the plan's precision.
    wide = frames(name, tmp_path / "saved")
    assert np.abs(wide.astype(int) - wanted.astype(int)).max() <= 3


def test_each_weight_is_rounded_once(
    tiny_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from everyframe.runtime import saved_checkpoint

    rounded: list[tuple[int, ...]] = []

    def counted(weight: torch.Tensor, *rest: Any) -> Any:
        rounded.append(tuple(weight.shape))
        return quantize(weight, *rest)

    monkeypatch.setattr(saved_checkpoint, "quantize", counted)
    model = tiny_families.made("svd", tiny_root)
    everyframe.save(model, tmp_path / "saved", quantize="int8")
    files = [*(tmp_path / "saved").rglob("*.safetensors")]
    codes = [name for file in files for name, each in tensors_of(file).items()
             if each.dtype == torch.int8]  # fmt: skip
    assert len(rounded) == len(codes) > 0


def test_what_is_copied(tiny_root: Path, tmp_path: Path) -> None:
    """All files but those of the changed component, which has one."""
    model = tiny_families.made("wan", tiny_root)
    loras = lora_of(model, "wan", tmp_path / "a.safetensors")
    everyframe.save(model, tmp_path / "saved", loras=loras)

    def files(folder: Path) -> set[str]:
        return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}

    assert files(tmp_path / "saved") == files(model)
    for name in files(model) - {f"{part}/diffusion_pytorch_model.safetensors"
                                for part in ("transformer", "transformer_2")}:  # fmt: skip
        assert (tmp_path / "saved" / name).read_bytes() == (model / name).read_bytes()


def test_no_file_of_elsewhere_is_copied(tiny_root: Path, tmp_path: Path) -> None:
    """A model's folder comes from others, and what is saved goes to others."""
    model = Path(shutil.copytree(tiny_families.made("wan", tiny_root), tmp_path / "model"))
    loras = lora_of(model, "wan", tmp_path / "a.safetensors")
    (tmp_path / "secret").write_text("of this user", encoding="utf-8")
    (model / "notes" / "more").mkdir(parents=True)
    (model / "notes" / "more" / "readme").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="readme is a link out of"):
        everyframe.save(model, tmp_path / "saved", loras=loras)
    assert not (tmp_path / "saved").exists()


def test_nothing_is_left_of_a_failure(
    tiny_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_families.made("wan", tiny_root)
    loras = lora_of(model, "wan", tmp_path / "a.safetensors")

    def fails(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors_writer.os, "fsync", fails)
    with pytest.raises(OSError, match="No space left"):
        everyframe.save(model, tmp_path / "saved", loras=loras)
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


def test_what_is_refused(tiny_root: Path, tmp_path: Path) -> None:
    model = tiny_families.made("wan", tiny_root)
    loras = lora_of(model, "wan", tmp_path / "a.safetensors")
    for more, text in (
        ({}, "nothing of the model would change"),
        ({"seed": 3}, "seed has no effect on a saved checkpoint"),
        ({"loras": loras, "chain": 2}, "chain has no effect on a saved checkpoint"),
    ):
        with pytest.raises(InputError, match=text):
            everyframe.save(model, tmp_path / "saved", **more)
    (tmp_path / "there").mkdir()
    with pytest.raises(InputError, match="exists already"):
        everyframe.save(model, tmp_path / "there", loras=loras)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InputError, match="exists already"):
        everyframe.save(model, tmp_path / "link", loras=loras)
    (tmp_path / "model").symlink_to(model)
    for inside in (model / "new", model / "transformer" / "new", tmp_path / "model" / "new"):
        with pytest.raises(InputError, match="is inside the model's own folder"):
            everyframe.save(model, inside, loras=loras)  # a copy of copies, without end
        assert not inside.exists()
    with pytest.raises(CheckpointError, match="there is no LoRA file"):
        everyframe.save(model, tmp_path / "saved", loras="none.safetensors")
    assert not (tmp_path / "saved").exists()


def test_the_command(tiny_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from everyframe.cli.main import main

    model = tiny_families.made("opensora-1.2", tiny_root)
    (lora,) = lora_of(model, "opensora-1.2", tmp_path / "a.safetensors")
    asked = ["save", str(model), "--lora", f"{lora}:0.5", "-o", str(tmp_path / "saved")]
    assert main(asked) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "saved")
    assert main(asked) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["save", str(model)]) == 2
    assert "give the folder to write" in capsys.readouterr().err
