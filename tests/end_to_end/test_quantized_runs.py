"""Whole runs of each family with weights in eight bits, against a checkpoint with those weights.

The other checkpoint is written here: the weights of those linear layers replaced by what they are
rounded to, which `tests/precision/test_quantization.py` holds against torchao. The same products of
the same numbers have the same bits. Step-Video's is `stepvideo/test_quantized.py`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import everyframe
from everyframe.core.plan import ComponentPlan
from everyframe.planning.resolve import prepare
from everyframe.precision.quantization import QuantizedLinear, quantize, rows
from helpers.tiny_checkpoints import inpaint as tiny_inpaint
from helpers.tiny_checkpoints import opensora as tiny_opensora
from helpers.tiny_checkpoints import svd as tiny_svd

PICTURE = np.random.default_rng(0).integers(0, 255, (32, 32, 3), np.uint8)

#: What makes a model, what it is asked for, and which of its parts have weights in eight bits.
FAMILIES: dict[str, tuple[Callable[[Path], Path], dict[str, Any], tuple[str, ...]]] = {
    "opensora": (
        tiny_opensora.opensora_1_2, {"prompt": "a red circle", "size": "32x32", "num_frames": 2},
        ("text_encoder", "denoiser"),
    ),
    "svd": (tiny_svd.svd, {"image": PICTURE, "size": "32x32", "num_frames": 3}, ("unet",)),
    "inpaint": (
        tiny_inpaint.inpaint,
        {"prompt": "a red ball", "image": PICTURE, "mask": "8,8,24,24", "control": "canny"},
        ("text_encoder", "controlnet", "unet"),
    ),
}  # fmt: skip
#: Root mean square of what may be between frames (0..1), of random weights under guidance; and
#: there is a difference: nothing is shown where none is rounded.
APART = {"int8": 0.02, "fp8": 0.06}


def asked(family: str, model: Path) -> dict[str, Any]:
    given = {"num_inference_steps": 2, "seed": 1, "device": "cpu", "dtype": "fp32"}
    return {"model": str(model), **given, **FAMILIES[family][1]}


def frames(family: str, model: Path, **options: Any) -> np.ndarray[Any, Any]:
    video = everyframe.generate(**asked(family, model), output="float", **options)
    assert isinstance(video, everyframe.Video)
    return video.frames


def round_weights(family: str, model: Path, kind: str) -> list[str]:
    """Replace those weights in the model's files by what they are rounded to; whose they are."""
    prepared = prepare(everyframe.Request(**asked(family, model), quantize=kind))
    parts = [part for part in prepared.plan.components if part.precision.weight_dtype]
    for part in parts:
        run = next(run for run in prepared.fitted.runs if run.stage_call.component == part.name)
        _round(_file(model, part), set(rows(run.stage_call.module(), part.precision)), kind)
    return [part.name for part in parts]


def _file(model: Path, part: ComponentPlan) -> Path:
    (file,) = (model.parent / part.source).glob("*.safetensors")
    return file


def _round(file: Path, names: set[str], kind: str) -> None:
    tensors = load_file(file)
    assert names
    assert names <= tensors.keys()
    for name in names:
        values, scale = quantize(tensors[name], kind, torch.device("cpu"))
        tensors[name] = QuantizedLinear(kind, values, scale, None).wide()
    save_file(tensors, file)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("opensora", "int8"),
        pytest.param("opensora", "fp8", marks=SLOW),
        pytest.param("svd", "int8", marks=SLOW),
        pytest.param("svd", "fp8", marks=SLOW),
        pytest.param("inpaint", "int8", marks=SLOW),
        pytest.param("inpaint", "fp8", marks=SLOW),
    ],
)
def test_a_run_is_that_of_a_checkpoint_with_the_rounded_weights(
    family: str, kind: str, tmp_path: Path
) -> None:
    make, _, parts = FAMILIES[family]
    whole = tmp_path / "model"
    make(whole)
    usual, found = frames(family, whole), frames(family, whole, quantize=kind)
    other = Path(shutil.copytree(whole, tmp_path / "other"))
    assert tuple(round_weights(family, other, kind)) == parts
    assert np.array_equal(found, frames(family, other))
    assert 1e-4 < np.sqrt(np.mean((found - usual) ** 2)) < APART[kind]
