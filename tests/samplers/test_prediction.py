"""Predicted answers: exact for polynomials, resumed to the bit, and checked online."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from everyframe.core.quality import SamplingMethod
from everyframe.samplers import rectified_flow
from everyframe.samplers.prediction import AnswerHistory, PredictedDenoise, lagrange_weights

STEPS = 20
TIMESTEPS = rectified_flow.schedule(STEPS)
X = torch.randn(1, 2, 3, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def run(method: SamplingMethod, answer, start=0, x=X, memory=None, **more):  # type: ignore[no-untyped-def]
    """All steps as (x, memory, note), and the steps in which the answer was computed."""
    computed: list[int] = []

    def denoise(x: Tensor, t: Tensor) -> Tensor:
        computed.append(predicted.step)
        return answer(x, t)

    predicted = PredictedDenoise(denoise, method, STEPS, start=start, memory=memory, **more)
    seen = []
    for step in rectified_flow.sample(predicted, x, TIMESTEPS, start=start):
        seen.append((step.x, predicted.memory, predicted.take_note()))
        predicted.step = step.index + 1
    return seen, computed


@pytest.mark.parametrize(("name", "order"), [("taylor1", 1), ("taylor2", 2)])
def test_is_exact_for_polynomials_of_its_order(name: str, order: int) -> None:
    def answer(x: Tensor, t: Tensor) -> Tensor:
        return X * (t[0] / 1000) ** order + 1

    method = SamplingMethod(name, 8, num_warm=3)
    seen, computed = run(method, answer)
    *_, exact = rectified_flow.sample(answer, X, TIMESTEPS)
    assert tuple(computed) == method.computed_steps(STEPS)
    assert (seen[-1][0] - exact.x).abs().max() < 1e-12


def test_a_polynomial_of_higher_order_is_missed() -> None:
    def answer(x: Tensor, t: Tensor) -> Tensor:
        return X * (t[0] / 1000) ** 3

    seen, _ = run(SamplingMethod("taylor1", 8, num_warm=3), answer)
    *_, exact = rectified_flow.sample(answer, X, TIMESTEPS)
    assert (seen[-1][0] - exact.x).abs().max() > 1e-4


@pytest.mark.parametrize("limit", [None, 1e-9, 1e9])
@pytest.mark.parametrize("name", ["taylor1", "taylor2"])
def test_resumed_equals_unbroken(name: str, limit: float | None) -> None:
    method = SamplingMethod(name, 6, num_warm=2, limit=limit)
    answer = lambda x, t: torch.sin(2 * x + t[0] / 100)  # noqa: E731
    whole, computed = run(method, answer)
    for index, (x, memory, _) in enumerate(whole[:-1]):
        rest, later = run(method, answer, index + 1, x, memory)
        assert torch.equal(rest[-1][0], whole[-1][0])
        assert later == [step for step in computed if step > index]
        assert [each[2] for each in rest] == [each[2] for each in whole[index + 1 :]]


def test_saved_answers_go_to_the_device_of_the_state() -> None:
    """The state of a run that resumes on another device."""
    with FakeTensorMode():
        x = torch.empty(1, 2, device="cuda")
        answers = [torch.empty(1, 2), torch.empty(1, 2, device="cuda")]
        memory = {"times": [1000.0, 900.0], "answers": answers, "error": 0.0}
        method = SamplingMethod("taylor1", 2)
        predicted = PredictedDenoise(lambda x, t: x, method, 4, start=3, memory=memory)
        assert predicted(x, torch.tensor([800.0])).device == x.device


def test_passing_the_limit_computes_every_later_step() -> None:
    method = SamplingMethod("taylor1", 6, num_warm=2, limit=1e-9)
    seen, computed = run(method, lambda x, t: torch.sin(2 * x + t[0] / 100))
    (noted,) = [index for index, each in enumerate(seen) if each[2]]
    assert computed[-(STEPS - noted) :] == list(range(noted, STEPS))
    assert "all steps from here are exact" in seen[noted][2]


def test_predictions_are_shown_to_the_guard() -> None:
    skipped: list[Tensor] = []
    method = SamplingMethod("taylor1", 5)
    run(method, lambda x, t: -x, skipped=skipped.append)
    assert len(skipped) == STEPS - 5


def test_history_replaces_an_answer_of_the_same_time() -> None:
    history = AnswerHistory(SamplingMethod("taylor1", 5))
    history.add(1.0, torch.ones(1))
    history.add(1.0, torch.zeros(1))
    assert history.times == (1.0,)
    assert history.predict(0.5).item() == 0


def test_answers_keep_their_dtype() -> None:
    history = AnswerHistory(SamplingMethod("taylor2", 5))
    for time in (1.0, 0.9, 0.8):
        history.add(time, torch.full((2,), time, dtype=torch.bfloat16))
    assert history.predict(0.7).dtype == torch.bfloat16


def test_weights_sum_to_one() -> None:
    assert sum(lagrange_weights((9.0, 7.0, 4.0), 2.5)) == pytest.approx(1)
    assert lagrange_weights((3.0,), 1.0) == [1.0]
