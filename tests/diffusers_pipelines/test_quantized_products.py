"""Pipelines by folder with products in eight bits: asked for, tried here, then used or not."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import everyframe
from everyframe.core.errors import InputError, MissingPackageError
from everyframe.core.plan import Plan, Precision
from everyframe.fast_paths.registry import CATALOGUE
from everyframe.precision import quantized_products
from everyframe.precision.quantization import layers, quantize_layers
from everyframe.runtime.components import component_observers
from helpers.planted_products import KIND, certify_as
from helpers.tiny_checkpoints import families as tiny_families
from helpers.tiny_checkpoints.pipelines import loaded

pytestmark = pytest.mark.usefixtures("own_cache")

needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao isn't installed"
)


@pytest.fixture(scope="module")
def wan(tiny_models: Callable[[str], Path]) -> Path:
    return tiny_models("wan")


def asked(wan: Path, **more: Any) -> dict[str, Any]:
    """A request in which denoisers are called often enough."""
    return tiny_families.asked("wan", model=str(wan), dtype="fp32", **more)


def kinds(plan: Plan) -> dict[str, str]:
    return {part.name: part.precision.weight_dtype for part in plan.components}


@pytest.fixture
def present(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao is found; nothing here imports it."""
    monkeypatch.setattr(
        "everyframe.planning.fast_paths.choose_fast_paths.find_spec", lambda name: name
    )


@pytest.mark.usefixtures("present")
def test_denoisers_alone_multiply_in_eight_bits(wan: Path) -> None:
    plan = everyframe.plan(**asked(wan, quantize=KIND))
    expected = {"text_encoder": "", "transformer": KIND, "transformer_2": KIND, "vae": ""}
    assert kinds(plan) == expected
    assert any("stored and multiplied in int8-dynamic (lossy" in note for note in plan.notes)
    # Stored as by int8.
    stored = everyframe.plan(**asked(wan, quantize="int8")).component("transformer")
    assert plan.component("transformer").weight_bytes == stored.weight_bytes


@pytest.mark.usefixtures("present")
@pytest.mark.parametrize(("verdict", "used"), [("certified", KIND), ("refused", "")])
def test_a_run_has_what_was_certified_here(
    wan: Path, verdict: str, used: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from everyframe.core.request import Request
    from everyframe.planning.resolve import prepare

    tried = certify_as(monkeypatch, verdict, 2.0)
    request = Request(**asked(wan, quantize=KIND))
    plan = prepare(request, will_run=True).plan
    assert sorted(tried) == ["transformer", "transformer_2"]
    assert kinds(plan)["transformer"] == used
    assert (KIND in (plan.component("transformer").fast_paths or ())) == bool(used)
    assert any("without int8-dynamic, which was refused" in note for note in plan.notes) != bool(
        used
    )
    # What is refused for its cost alone can be forced.
    forced = everyframe.plan(**asked(wan, quantize=KIND, force=True))
    assert kinds(forced)["transformer"] == KIND


def test_without_the_package_the_command_is_named(
    wan: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from everyframe.cli.main import main

    monkeypatch.setattr(
        "everyframe.planning.fast_paths.choose_fast_paths.find_spec", lambda name: None
    )
    with pytest.raises(MissingPackageError, match=r"pip install 'everyframe\[torchao\]'"):
        everyframe.generate(**asked(wan, quantize=KIND))
    assert main(["plan", "a fox", "-m", str(wan), "--quantize", KIND]) == 2
    assert capsys.readouterr().err == (
        "error: int8-dynamic needs torchao: pip install 'everyframe[torchao]'\n"
    )
    # A plan for another machine needs nothing here.
    plan = everyframe.plan(**asked(wan, quantize="fp8-scaled"), profile="cuda-sm90")
    assert kinds(plan)["transformer"] == "fp8-scaled"


@pytest.mark.usefixtures("present")
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"quantize": "fp8-scaled"}, "needs a CUDA card of compute capability 8.9 or later"),
        ({"quantize": "fp8-scaled", "profile": "cuda-sm80"}, "8.9 or later, not"),
        ({"quantize": KIND, "profile": "mps"}, "needs a CPU or a CUDA card, not .*--quantize int8"),
        ({"quantize": KIND, "compile": True}, "quantize=int8-dynamic and compile: give one"),
    ],
)
def test_what_can_t_be_is_reported(wan: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        everyframe.plan(**asked(wan, **options))


def test_no_file_holds_products(wan: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="save with int8, and run the folder with int8-dynamic"):
        everyframe.save(wan, tmp_path / "saved", quantize=KIND)
    assert not (tmp_path / "saved").exists()


# --------------------------------------------------------------------------------- with torchao


@needs_torchao
@pytest.mark.parametrize("size", [(16, 16), (24, 40), (512, 256)])
def test_a_layer_is_torchao_s(size: tuple[int, int]) -> None:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    torch.manual_seed(0)
    ours, theirs = nn.Sequential(nn.Linear(*size)), nn.Sequential(nn.Linear(*size))
    theirs.load_state_dict(ours.state_dict())
    quantize_layers(ours, Precision("float32", "float32", weight_dtype=KIND))
    quantize_(theirs, Int8DynamicActivationInt8WeightConfig())
    x = torch.randn(2, 7, size[0])
    with torch.no_grad():
        assert torch.equal(ours(x), theirs(x))
        wide = nn.functional.linear(x, ours[0].wide(), ours[0].bias)  # type: ignore[operator]
        assert not torch.equal(ours(x), wide)
        ours[0].is_plain = True  # as a repair sets it
        assert torch.equal(ours(x), wide)


@needs_torchao
def test_a_run_by_folder_has_torchao_s_layers(wan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    certify_as(monkeypatch, "certified", 2.0)
    options = asked(wan, quantize=KIND)
    found: dict[str, nn.Module] = {}
    with component_observers.on_component_loaded(
        lambda name, module: found.setdefault(name, module)
    ):
        video = everyframe.generate(**options, run_dir="off")
    assert isinstance(video, everyframe.Video)
    parts = {part["name"]: part for part in video.record["plan"]["components"]}
    assert parts["transformer"]["precision"]["weight_dtype"] == KIND
    theirs = loaded(wan).transformer
    for layer in layers(theirs, everyframe.plan(**options).component("transformer").precision):
        quantize_(theirs.get_submodule(layer), Int8DynamicActivationInt8WeightConfig())
    generator = torch.Generator().manual_seed(0)
    given = {
        "hidden_states": torch.randn(1, theirs.config.in_channels, 2, 2, 2, generator=generator),
        "encoder_hidden_states": torch.randn(1, 16, theirs.config.text_dim, generator=generator),
        "timestep": torch.tensor([500.0]),
    }
    with torch.no_grad():
        ours, wanted = (
            module(**given, return_dict=False)[0] for module in (found["transformer"], theirs)
        )
    assert float((ours - wanted).norm() / wanted.norm()) < 1e-6  # attention by another kernel
    # The record makes the same frames again.
    again = everyframe.generate(from_record=video, model=str(wan), run_dir="off")
    assert isinstance(again, everyframe.Video)
    assert np.array_equal(again.frames, video.frames)


@needs_torchao
@pytest.mark.slow
def test_a_trial_says_whether_it_is_faster_here(wan: Path) -> None:
    from everyframe.core.request import Request
    from everyframe.planning.list_fast_paths import survey

    rows = survey(Request(**asked(wan, quantize=KIND)), certify=True).rows
    own = {row.component: row.choice for row in rows if row.path is CATALOGUE[KIND]}
    assert set(own) == {"transformer", "transformer_2"}
    for choice in own.values():  # layers of a few channels: right, and slower
        assert choice.error is not None
        assert 0 < choice.error < 0.05
        assert (choice.verdict, choice.gain is not None) == ("refused", True)


def test_layers_of_nothing_and_of_other_sizes_are_widened() -> None:
    codes = torch.zeros(24, 40, dtype=torch.int8)
    assert quantized_products.can_multiply(KIND, torch.zeros(2, 40), codes)
    assert not quantized_products.can_multiply(KIND, torch.zeros(0, 40), codes)
    half = torch.zeros(2, 48, dtype=torch.bfloat16)
    assert quantized_products.can_multiply("fp8-scaled", half, torch.zeros(32, 48))
    assert not quantized_products.can_multiply("fp8-scaled", half.float(), torch.zeros(32, 48))
    assert not quantized_products.can_multiply("fp8-scaled", half[:, :40], codes)
    assert "torchao" not in sys.modules or importlib.util.find_spec("torchao")
