"""Certificates that are made on a CUDA card: every kernel gets its verdict, and none dies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import everyframe
from everyframe.core.facts import OpShape
from everyframe.core.plan import Precision
from everyframe.core.request import Request
from everyframe.fast_paths.certification.certify import certify
from everyframe.fast_paths.certification.target import CertificationTarget
from everyframe.fast_paths.registry import CATALOGUE
from everyframe.hardware.facts import machine_facts
from everyframe.planning.list_fast_paths import survey

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
    pytest.mark.usefixtures("own_cache"),
]

PATIENCE = 120.0
KERNELS = [CATALOGUE[name] for name in CATALOGUE if name.startswith("attention-")]
PROMPT = "a red circle moves to the right on a blue background"


@pytest.mark.parametrize("flags", [(), ("masked",)], ids=["bare", "masked"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_attention_of_many_tokens(
    dtype: str, flags: tuple[str, ...], record_property: Callable[..., None]
) -> None:
    """Half precision in blocks is right, and quicker than to hold all scores."""
    shape = (2, 16, 4096, 64)
    products = ((OpShape("attention", dtype, (shape, shape, shape), flags), 1e12),)
    card = machine_facts().devices[0]
    subject = CertificationTarget("denoiser", card, 1, Precision(dtype, dtype), "plan", "device",
                      products=products)  # fmt: skip
    made = certify(subject, KERNELS, PATIENCE)
    assert not made.untried
    verdicts = {each.what: each for each in made.certificates}
    for name, each in verdicts.items():
        record_property(name, f"{each.verdict} {each.error} {each.limit} {each.gain} {each.reason}")
        # What it can't do it says; nothing died, and nothing that it gave was wrong.
        assert each.error is not None or "no such kernel" in each.reason, each
        assert each.error is None or each.limit is None or each.error <= each.limit, each
    assert verdicts["attention-efficient"].verdict == "certified"
    if dtype != "float32" and not flags:
        assert verdicts["attention-flash"].verdict == "certified"


def test_every_path_of_the_embedded_model(record_property: Callable[..., None]) -> None:
    found = survey(Request(prompt=PROMPT, device="cuda"), certify=True)
    for row in found.rows:
        choice = row.choice
        record_property(
            f"{row.component} {choice.path}",
            f"{choice.verdict} {choice.error} {choice.limit} {choice.gain} {choice.reason}",
        )
        assert "died" not in (choice.reason or ""), choice
        assert "Error" not in (choice.reason or ""), choice


@pytest.mark.slow
def test_compiled_blocks_give_the_same_video() -> None:
    asked: dict[str, Any] = {
        "prompt": PROMPT, "device": "cuda", "num_frames": 9, "num_inference_steps": 3, "seed": 1,
        "output": "float", "run_dir": "off",
    }  # fmt: skip
    plain = everyframe.generate(**asked)
    compiled = everyframe.generate(compile=True, **asked)
    assert isinstance(plain, everyframe.Video)
    assert isinstance(compiled, everyframe.Video)
    assert np.abs(compiled.frames - plain.frames).mean() < 0.02
