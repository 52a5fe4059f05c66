"""Components with weights in eight bits: made tensor by tensor, equal wherever the weights wait."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from everyframe.checkpoints.key_map import KeyMap
from everyframe.checkpoints.tensor_file import TensorFile
from everyframe.core.errors import CheckpointError
from everyframe.core.plan import ComponentPlan, Precision
from everyframe.precision.islands import weight_bytes
from everyframe.precision.quantization import QuantizedLinear, layers, quantize, rows
from everyframe.precision.upcast import Upcast
from everyframe.runtime.loading import load_component
from everyframe.runtime.memory import offload

KINDS = ("int8", "fp8")


class Block(nn.Module):
    """Layers with and without a bias, a table and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(16))
        self.norm = nn.LayerNorm(16)
        self.widen, self.narrow = nn.Linear(16, 64), nn.Linear(64, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.narrow(self.widen(self.norm(x)).relu()) * self.table
        return out


class Model(nn.Module):
    """Blocks between layers that are an island."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(12))
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.last(x)
        return out


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    save_file(dict(Model().state_dict()), path)
    return path


def plan(kind: str, dtype: str = "float32", **fields: Any) -> ComponentPlan:
    precision = Precision(dtype, dtype, ("last",), kind)
    return ComponentPlan("model", "model", "denoise", "here", 0, "cpu", precision, 0, 0, **fields)


def loaded(path: Path, kind: str, dtype: str = "float32", **fields: Any) -> Model:
    return load_component(plan(kind, dtype, **fields), Model, path, KeyMap())


X = torch.randn(2, 16, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_model_has_the_rounded_weights_and_no_others(kind: str, stored: Path) -> None:
    model, plain = loaded(stored, kind), loaded(stored, "")
    part = model.blocks[7].narrow
    assert isinstance(part, QuantizedLinear)
    values, scale = quantize(plain.blocks[7].narrow.weight, kind, torch.device("cpu"))
    assert torch.equal(part.weight, values)
    assert torch.equal(part.weight_scale, scale)
    assert torch.equal(model.blocks[7].widen.bias, plain.blocks[7].widen.bias)
    assert type(model.last) is nn.Linear
    # As exact as the same layers with those weights in float32; and not as without.
    with torch.no_grad():
        for name in layers(plain, plan(kind).precision):
            plain.get_submodule(name).weight.copy_(model.get_submodule(name).wide())
    torch.testing.assert_close(model(X), plain(X), rtol=0, atol=1e-6)
    assert (model(X) - loaded(stored, "")(X)).abs().max() > 1e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["", *KINDS])
def test_the_bytes_are_those_that_a_plan_tells(kind: str, dtype: str, stored: Path) -> None:
    precision = plan(kind, dtype).precision
    count = {name: p.numel() for name, p in Model().named_parameters()}
    model = loaded(stored, kind, dtype)
    expected = weight_bytes(count, precision, rows=rows(Model(), precision))
    assert sum(p.nbytes for p in model.parameters()) == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("streams", [False, True])
def test_weights_that_wait_elsewhere_give_the_same_bits(
    kind: str, streams: bool, stored: Path
) -> None:
    expected = loaded(stored, kind, "bfloat16")(X)
    model = loaded(stored, kind, "bfloat16", block_offload=True, from_disk=streams)
    assert model.blocks[3].narrow.weight.is_meta == streams
    for _ in range(3):
        assert torch.equal(model(X), expected)
    # Also where a part was raised meanwhile: what was sent for is not taken.
    raised = Upcast(model.blocks[4], torch.float32)
    wide = model(X)
    raised.undo()
    assert not torch.equal(wide, expected)
    there = loaded(stored, kind, "bfloat16")
    Upcast(there.blocks[4], torch.float32)
    assert torch.equal(wide, there(X))
    assert torch.equal(model(X), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_no_more_is_on_the_device_than_the_plan_says(kind: str, stored: Path) -> None:
    precision = plan(kind, "bfloat16").precision
    resident = offload.resident_bytes(Model(), precision)
    model = loaded(stored, kind, "bfloat16")
    offloaded = offload.apply(model, "cpu")
    model(X)
    assert offloaded.most_bytes == resident
    assert resident < 0.62 * offload.resident_bytes(Model(), Precision("bfloat16", "bfloat16"))


def test_one_tensor_at_a_time_is_there_in_full(
    stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = TensorFile.load
    wide: list[weakref.ref[Tensor]] = []
    most = 0

    def noted(self: TensorFile, name: str, *given: Any) -> Tensor:
        nonlocal most
        most = max(most, sum(each() is not None for each in wide))
        tensor = read(self, name, *given)
        if tensor.ndim == 2 and "last" not in name:
            wide.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(TensorFile, "load", noted)
    loaded(stored, "int8")
    assert len(wide) == 24
    # The last one is let go when the next was read; a whole model would be 24.
    assert most <= 1


def test_a_file_that_is_wrong_is_reported_as_ever(stored: Path, tmp_path: Path) -> None:
    tensors = dict(Model().state_dict())
    tensors["blocks.2.widen.weight"] = torch.zeros(3, 16)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"blocks\.2\.widen\.weight.*\(3, 16\)"):
        loaded(tmp_path / "model.safetensors", "int8")
