"""A target goes to the process of its trials without the modules that planning made of it."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch

from everyframe.core.facts import DeviceFacts
from everyframe.core.plan import Precision
from everyframe.fast_paths.certification import trials
from everyframe.fast_paths.certification.target import CertificationTarget, TargetCall
from everyframe.fast_paths.registry import CATALOGUE
from helpers import config_only_models

CPU = DeviceFacts("a processor", "cpu", None, 10**10, 10**10)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_planning_looks_at_a_module_and_the_trial_still_casts_it(dtype: str) -> None:
    """A module made out of inference mode can't be cast in it, and each path would be refused."""
    model = config_only_models.opensora("1.2")
    calls = model.dry_run_calls(config_only_models.settings())
    call = next(each for each in calls if each.component == "denoiser")
    precision = Precision(dtype, dtype)
    target = CertificationTarget(
        "denoiser", CPU, 1, precision, "plan", "device",
        calls=(TargetCall(call, {"denoiser": precision}),),
    )  # fmt: skip
    path = CATALOGUE["native-norm"]
    target.calls[0].module()  # as a plan that asks whether a path applies
    sent = pickle.loads(pickle.dumps(target))
    with torch.inference_mode():
        found = [each.name for each in trials.modules(sent, path)]
        alone = [each.name for each in trials.modules(replace(target, calls=sent.calls), path)]
    assert found == alone
    assert any("norm" in name for name in found)
