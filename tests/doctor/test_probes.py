"""Each probe is content with this machine and finds the fault that it is there for, planted here.

The limits that they judge by are stated where they stand (`everyframe.doctor.probes.arithmetic`).
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from everyframe.doctor.probes import PROBES, arithmetic, call, layers, system
from everyframe.doctor.probes.collectives import among

QUICK = [item for item in PROBES if item.name not in ("compile", "collectives")]


@pytest.mark.parametrize("item", QUICK, ids=lambda item: item.name)
def test_a_probe_is_content_here(item: Any) -> None:
    report = call(item.place, "cpu")
    assert (report["wrong"], report["notes"], report["skipped"]) == ([], [], None)


@pytest.mark.parametrize(
    ("capability", "dtypes"),
    [
        ((7, 0), (torch.float32, torch.float16)),  # bf16 is emulated there, and not used
        ((8, 0), (torch.float32, torch.bfloat16, torch.float16)),
    ],
)
def test_dtypes_are_those_that_runs_use(
    capability: tuple[int, int], dtypes: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert arithmetic.dtypes_of("cuda:0") == dtypes
    assert arithmetic.dtypes_of("cpu") == (torch.float32, torch.bfloat16)


def test_a_product_that_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Tensor.__matmul__

    def cut(a: Tensor, b: Tensor) -> Tensor:
        """float32 with 10 bits after the point, which is TF32."""
        if a.dtype != torch.float32:
            return right(a, b)
        return right(a.half().float(), b.half().float())

    monkeypatch.setattr(Tensor, "__matmul__", cut)
    (text,) = arithmetic.products("cpu")["wrong"]
    assert "products in float32 are off by" in text


def test_a_product_that_sums_narrowly(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Tensor.__matmul__

    def halves(a: Tensor, b: Tensor) -> Tensor:
        """The two halves of a long sum, each kept in fp16: the first alone is infinite."""
        if a.dtype != torch.bfloat16 or a.shape[1] < 8192:
            return right(a, b)
        half = a.shape[1] // 2
        parts = right(a[:, :half].float(), b[:half].float()).half()
        return (parts + right(a[:, half:].float(), b[half:].float()).half()).bfloat16()

    monkeypatch.setattr(Tensor, "__matmul__", halves)
    (text,) = arithmetic.products("cpu")["wrong"]
    assert "products in bfloat16 are summed too narrowly" in text


def test_a_linear_layer_that_gives_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    right = F.linear

    def zeros(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        result = right(x, weight, bias)
        return torch.zeros_like(result) if weight.shape == (1280, 320) else result

    monkeypatch.setattr(F, "linear", zeros)
    (text,) = arithmetic.linear("cpu")["wrong"]
    assert "from 320 to 1280 with 2 rows in float32" in text


def test_attention_that_keeps_its_scores_in_half(monkeypatch: pytest.MonkeyPatch) -> None:
    def narrow(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Scores in fp16 before they are scaled, as in OneFlow's fused attention."""
        scores = (q @ k.transpose(-1, -2)).half() * q.shape[-1] ** -0.5
        return (scores.softmax(-1).to(v.dtype)) @ v

    monkeypatch.setattr(arithmetic, "attention", narrow)
    wrong = arithmetic.large_keys("cpu")["wrong"]
    assert "attention in float16 with large keys is not finite" in wrong


def test_attention_that_ignores_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    right = F.scaled_dot_product_attention

    def careless(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        if q.dtype == torch.float64:
            return right(q, k, v, attn_mask)
        q, k, v = (x.as_strided(x.shape, torch.empty(x.shape).stride()) for x in (q, k, v))
        return right(q, k, v, attn_mask)

    monkeypatch.setattr(F, "scaled_dot_product_attention", careless)
    wrong = arithmetic.strides("cpu")["wrong"]
    assert len(wrong) == 4  # two dtypes, masked or not
    assert "is off by" in wrong[0]


def test_timesteps_that_are_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    right = arithmetic.timestep_embedding

    def rounded(t: Tensor, dim: int) -> Tensor:
        return right(t if t.dtype == torch.float64 else t.bfloat16().float(), dim)

    monkeypatch.setattr(arithmetic, "timestep_embedding", rounded)
    (text,) = arithmetic.timestep("cpu")["wrong"]
    assert "embedding of timesteps is off by" in text


def test_a_layer_that_is_missing_and_one_that_gives_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(device: str, dtype: torch.dtype) -> Tensor:
        raise RuntimeError("\"LayerNormKernelImpl\" not implemented for 'Half'")

    monkeypatch.setitem(layers._LAYERS, "layer norm", missing)
    monkeypatch.setitem(
        layers._LAYERS, "SiLU", lambda device, dtype: torch.full((2,), torch.nan, dtype=dtype)
    )
    wrong = layers.layers("cpu")["wrong"]
    assert "layer norm in float32: \"LayerNormKernelImpl\" not implemented for 'Half'" in wrong
    assert "SiLU in bfloat16 is not finite" in wrong
    assert len(wrong) == 4


def test_a_convolution_that_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    right = nn.Conv3d.__call__

    def off(self: nn.Conv3d, x: Tensor) -> Tensor:
        result: Tensor = right(self, x)
        return result * 1.1 if x.dtype == torch.bfloat16 else result

    monkeypatch.setattr(nn.Conv3d, "__call__", off)
    (text,) = layers.convolution("cpu")["wrong"]
    assert "a 3D convolution in bfloat16 is off by" in text


def test_a_convolution_that_takes_too_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    right = layers._time

    def greedy(module: nn.Module, x: Tensor, kind: str) -> tuple[Tensor, float, float | None]:
        got, seconds, _ = right(module, x, kind)
        return got, seconds, 17.0 if x.dtype == torch.bfloat16 else 2.0

    monkeypatch.setattr(layers, "_time", greedy)
    report = layers.convolution("cpu")
    assert report["wrong"] == []
    assert report["notes"] == [
        "a 3D convolution in bfloat16 takes 17 times the memory of its output"
    ]


def test_upsampling_that_smooths(monkeypatch: pytest.MonkeyPatch) -> None:
    right = F.interpolate

    def smooth(x: Tensor, scale_factor: float, mode: str) -> Tensor:
        if x.ndim == 5:
            return right(x, scale_factor=scale_factor, mode=mode)
        return right(x, scale_factor=scale_factor, mode="bilinear")

    monkeypatch.setattr(F, "interpolate", smooth)
    wrong = layers.upsampling("cpu")["wrong"]
    assert wrong == [f"2D upsampling in {name} changes values" for name in ("float32", "bfloat16")]


def test_an_extension_that_does_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sageattention.py").write_text('raise ImportError("undefined symbol: _ZN3c10")')
    monkeypatch.syspath_prepend(tmp_path)
    (text,) = system.extensions("cpu")["wrong"]
    assert text == "sageattention can't be imported: ImportError: undefined symbol: _ZN3c10"
    assert "sageattention" not in sys.modules


def test_times_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {torch.float32: 1.0, torch.bfloat16: 2.5}
    monkeypatch.setattr(system, "_product", lambda size, device, dtype: seconds[dtype])
    assert system.bf16("cpu")["measured"]["bf16_over_float32"] == 2.5


@pytest.mark.slow
def test_a_compiled_kernel_is_right() -> None:
    item = next(item for item in PROBES if item.name == "compile")
    report = call(item.place, "cpu")
    assert report["wrong"] == []


@pytest.mark.slow
def test_three_ranks_on_the_cpu_sum_and_deal_uneven_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They meet in a temporary folder of any name."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "job#1"))
    (tmp_path / "job#1").mkdir()
    assert among(3, "gloo")["wrong"] == []


def test_memory_is_that_of_the_card_that_is_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a name torch tells of the current card, which is the first."""
    asked: list[object] = []

    def ask(device: object = None) -> int:
        asked.append(device)
        return 0

    for name in ("reset_peak_memory_stats", "memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, ask)
    x = torch.ones(2)
    layers._time(torch.nn.SiLU(), x, "cuda")
    assert asked == [x.device] * 3
