"""Whole runs with weights in eight bits, against the same run of a checkpoint with those weights.

The other checkpoint is written by hand: each linear layer's weight replaced by what it is rounded
to, which `tests/precision/test_quantization.py` holds against torchao.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import everyframe
from everyframe.cli.main import main
from everyframe.core.plan import Precision
from everyframe.families.stepvideo.components import DENOISER_ISLANDS, LLM_ISLANDS
from everyframe.families.stepvideo.config import StepLLMConfig, StepVideoModelConfig
from everyframe.families.stepvideo.llm import StepLLM
from everyframe.families.stepvideo.model import StepVideoModel
from everyframe.precision.quantization import QuantizedLinear, layers, quantize
from helpers.tiny_checkpoints import stepvideo as tiny_stepvideo

GIVEN: dict[str, Any] = {
    "size": "32x16", "num_frames": 1, "num_inference_steps": 3, "seed": 5, "device": "cpu",
}  # fmt: skip
PROMPT = "a red circle moves"


@pytest.fixture(scope="module")
def folder(tiny_models: Callable[[str], Path]) -> Path:
    return tiny_models("stepvideo")


def frames(model: Path, **options: Any) -> np.ndarray[Any, Any]:
    video = everyframe.generate(PROMPT, model=str(model), output="float", **GIVEN, **options)
    assert isinstance(video, everyframe.Video)
    return video.frames


def rounded(folder: Path, kind: str) -> Path:
    """The same checkpoint with the weights of those layers as they come out of eight bits."""
    made = tiny_stepvideo.stepvideo(folder)
    empty = {
        "transformer": StepVideoModel(StepVideoModelConfig.from_json(tiny_stepvideo.DENOISER)),
        "step_llm": StepLLM(StepLLMConfig.from_json(tiny_stepvideo.LLM)),
    }
    islands = {"transformer": DENOISER_ISLANDS, "step_llm": LLM_ISLANDS}
    for part, module in empty.items():
        precision = Precision("float32", "float32", islands[part], kind)
        names = {f"{name}.weight" for name in layers(module, precision)}
        assert names
        for file in (made / part).glob("*.safetensors"):
            tensors = load_file(file)
            for name in names & tensors.keys():
                values, scale = quantize(tensors[name], kind, torch.device("cpu"))
                tensors[name] = QuantizedLinear(kind, values, scale, None).wide()
            save_file(tensors, file)
    return made


@pytest.mark.parametrize("kind", ["int8", pytest.param("fp8", marks=pytest.mark.slow)])
def test_a_run_is_that_of_a_checkpoint_with_the_rounded_weights(
    kind: str, folder: Path, tmp_path: Path
) -> None:
    found = frames(folder, quantize=kind)
    # The same products of the same numbers.
    assert np.array_equal(found, frames(rounded(tmp_path / "rounded", kind)))
    # Under guidance of 9, which brings out what branches differ by.
    apart = np.sqrt(np.mean((found - frames(folder)) ** 2))
    assert 1e-4 < apart < {"int8": 0.02, "fp8": 0.06}[kind]


def kept(record: dict[str, Any]) -> dict[str, str]:
    return {
        part["name"]: part["precision"]["weight_dtype"] for part in record["plan"]["components"]
    }


@pytest.mark.slow
def test_it_stands_in_plan_and_record_and_comes_out_of_it_again(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", str(folder), "--size", "32x16", "--num-frames", "1", "--steps", "2"]
    assert main(["plan", PROMPT, *words, "--quantize", "int8"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "kB int8" in printed
    assert "stored in int8 (lossy" in printed
    out = tmp_path / "first.png"
    assert main(["generate", PROMPT, *words, "--quantize", "int8", "-o", str(out)]) == 0
    record = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))
    assert kept(record) == {"step_llm": "int8", "clip": "", "denoiser": "int8", "vae": ""}
    # What was chosen for another machine's memory is taken as it was.
    del record["request"]["quantize"]
    out.with_suffix(".json").write_text(json.dumps(record), encoding="utf-8")
    again = tmp_path / "again.png"
    arguments = ["--from", str(out.with_suffix(".json")), "--model", str(folder), "-o", str(again)]
    assert main(["generate", *arguments]) == 0
    assert np.array_equal(*(np.asarray(Image.open(each)) for each in (again, out)))
