"""Clean latents (x0) that a diffusers scheduler predicts in a step, from the inputs of that step.

Schedulers convert a model's output to clean latents inside ``step``, and few of them return it.
The formulas are those of their code: `prediction_type` over ``sigmas`` (Karras et al. 2022,
arXiv 2206.00364, table 1; flow matching) or over ``alphas_cumprod`` (Ho et al. 2020, arXiv
2006.11239, equation 15; v-prediction of Salimans and Ho 2022, arXiv 2202.00512, appendix D).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def predicted_clean(scheduler: Any, answer: Tensor, t: Any, x: Tensor) -> Tensor | None:
    """The clean latents after ``scheduler.step(answer, t, x)``, shaped like `x`; None if unknown.

    Call it after that step, whose index the scheduler then counts.
    """
    config = scheduler.config
    converted = getattr(scheduler, "model_outputs", None)
    if converted:
        algorithm = str(config.get("algorithm_type", ""))
        gives_clean = config.get("predict_x0", "++" in algorithm)
        last: Tensor | None = converted[-1]
        return last if gives_clean else None
    kind = config.get("prediction_type", "epsilon")
    if type(scheduler).__name__.startswith("FlowMatch"):
        kind = "flow_prediction"
    answer, x = answer.to(torch.float32), x.to(torch.float32)
    if answer.shape != x.shape:  # a learned variance follows
        answer = answer[:, : x.shape[1]]
    index = getattr(scheduler, "step_index", None)
    if getattr(scheduler, "sigmas", None) is not None and index:
        sigma = float(scheduler.sigmas[index - 1])
        if hasattr(scheduler, "precondition_outputs"):
            found: Tensor = scheduler.precondition_outputs(x, answer, torch.tensor(sigma))
            return found
        return _from_sigma(kind, sigma, answer, x)
    if getattr(scheduler, "alphas_cumprod", None) is not None:
        return _from_signal(kind, float(scheduler.alphas_cumprod[int(t)]), answer, x)
    return None


def _from_sigma(kind: str, sigma: float, answer: Tensor, x: Tensor) -> Tensor | None:
    if kind in ("epsilon", "flow_prediction"):
        return x - sigma * answer
    if kind == "v_prediction":
        variance: float = sigma**2 + 1
        return x / variance - answer * (sigma / math.sqrt(variance))
    return answer if kind == "sample" else None


def _from_signal(kind: str, signal: float, answer: Tensor, x: Tensor) -> Tensor | None:
    """`signal` is the product of the alphas, the variance of the data in `x`."""
    keep, noise = math.sqrt(signal), math.sqrt(1 - signal)
    if kind == "epsilon":
        return (x - noise * answer) / keep
    if kind == "v_prediction":
        return keep * x - noise * answer
    return answer if kind == "sample" else None
