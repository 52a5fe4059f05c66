"""Fake 8-bit products without torchao: planted certificates, and products in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from everyframe.fast_paths.certificates import Certificate, keep
from everyframe.planning.fast_paths import choose_fast_paths, component_certificates
from everyframe.planning.fast_paths.component_certificates import MissingCertificates
from everyframe.precision import quantization

KIND = "int8-dynamic"


def certify_as(monkeypatch: pytest.MonkeyPatch, verdict: Any, gain: float) -> list[str]:
    """In place of the trials: certificates of that verdict; names of those that were tried."""
    tried: list[str] = []

    def make(certificates: Any, missing: list[MissingCertificates], runs: Any, _: float) -> None:
        for each in missing:
            own = [run for run in runs if run.stage_call.component == each.component]
            subject = certificates.subject(each.component, each.precision, own)
            assert not subject.precision.weight_dtype  # the plain layers are tried against it
            for path in each.paths:
                if path.name == KIND:
                    tried.append(each.component)
                    keep([Certificate(path.name, each.component, subject.device_key,
                                      subject.plan_key, verdict, "planted", 0.01, 0.05, gain,
                                      "2026-11-23")])  # fmt: skip

    monkeypatch.setattr(component_certificates, "make", make)
    return tried


def multiply_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao is found, and its products are float32 ones of rounded rows; nothing imports it."""
    monkeypatch.setattr(choose_fast_paths, "find_spec", lambda name: name)
    monkeypatch.setattr(quantization, "multiply", _product)


def _product(kind: str, x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    assert kind == KIND
    step = x.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny) / 127
    return F.linear((x / step).round() * step, codes.to(x.dtype) * scale, bias)
