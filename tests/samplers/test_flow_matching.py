"""Flow matching from noise at 0 against diffusers' own Euler and its shift, and against
`rectified_flow`.

Upstream's own numbers are held in the golden folders (`tests/golden`).
"""

from __future__ import annotations

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from everyframe.core.errors import InputError
from everyframe.core.quality import SamplingMethod
from everyframe.samplers import flow_matching, multistep, rectified_flow


def velocity(x: Tensor, t: Tensor) -> Tensor:
    return torch.sin(x) + 0.1 * t.view(-1, 1)


@pytest.mark.parametrize(("steps", "shift"), [(50, 13.0), (10, 17.0), (1, 2.0), (7, 0.5)])
def test_schedule_is_diffusers_with_time_turned(steps: int, shift: float) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)
    grid = torch.linspace(1, 0, steps + 1, dtype=torch.float64)[:-1]
    # diffusers shifts sigmas that fall from 1 (noise); its own are float32.
    wanted = shift * grid / (1 + (shift - 1) * grid)
    scheduler.set_timesteps(sigmas=wanted.tolist())
    sigmas = flow_matching.schedule(steps, shift)
    torch.testing.assert_close(1 - sigmas.float(), scheduler.sigmas, rtol=0, atol=1e-6)
    assert (float(sigmas[0]), float(sigmas[-1])) == (0.0, 1.0)
    reverse = flow_matching.schedule(steps, shift, reverse=True)
    torch.testing.assert_close(reverse, 1 - sigmas, rtol=0, atol=1e-15)


@pytest.mark.parametrize("reverse", [False, True])
def test_the_path_leads_where_the_steps_do(reverse: bool) -> None:
    """Adams-Bashforth-Moulton with all steps computed is the sampler itself."""
    sigmas = flow_matching.schedule(9, 3.0, reverse=reverse)
    x = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    path = flow_matching.path(sigmas)
    *_, here = flow_matching.sample(velocity, x, sigmas)
    *_, there = multistep.sample(velocity, x, path, SamplingMethod("abm2", 9))
    assert (there.x - here.x).abs().max() < 1e-12
    assert (path.alphas[0], path.sigmas[0]) == (0, 1)
    assert (path.alphas[-1], path.sigmas[-1]) == (1, 0)


def test_is_rflow_walked_the_other_way() -> None:
    """There t falls from 1000 at noise, and the model answers data - noise as well."""
    x = torch.randn(2, 3, dtype=torch.float64)
    *_, here = flow_matching.sample(velocity, x, flow_matching.schedule(9, 5.0))

    def turned(x: Tensor, t: Tensor) -> Tensor:
        return velocity(x, 1 - t / 1000)

    *_, there = rectified_flow.sample(turned, x, rectified_flow.schedule(9, shift=5.0))
    torch.testing.assert_close(here.x, there.x, rtol=0, atol=1e-12)


def test_goes_on_from_a_saved_step() -> None:
    x, sigmas = torch.randn(2, 3), flow_matching.schedule(6, 13.0)
    whole = list(flow_matching.sample(velocity, x, sigmas))
    rest = list(flow_matching.sample(velocity, whole[2].x, sigmas, start=3))
    assert [step.index for step in rest] == [3, 4, 5]
    assert torch.equal(rest[-1].x, whole[-1].x)


def test_half_precision_answers_are_summed_in_float32() -> None:
    x = torch.randn(1, 3)
    states = list(
        flow_matching.sample(
            lambda x, t: velocity(x, t).to(torch.bfloat16), x, flow_matching.schedule(4, 13.0)
        )
    )
    assert {state.x.dtype for state in states} == {torch.float32}


@pytest.mark.parametrize(("steps", "shift"), [(0, 13.0), (5, 0.0), (5, float("inf"))])
def test_what_can_not_be_a_schedule(steps: int, shift: float) -> None:
    with pytest.raises(InputError, match=r"a sampler needs 1 step|time shift must be above 0"):
        flow_matching.schedule(steps, shift)
