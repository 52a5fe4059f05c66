"""How a pipeline asks about its branches of guidance, found by its call and not by its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from everyframe.core.facts import DeviceFacts
from everyframe.core.plan import Settings
from everyframe.core.request import Request
from everyframe.diffusers_pipelines.parallel import cfg_detection
from everyframe.diffusers_pipelines.parallel.cfg_detection import (
    CfgBranches,
    ObservedCalls,
    find_cfg_branches,
    observe_calls,
)
from everyframe.diffusers_pipelines.parallel.lazy_tensor import LazyTensor
from everyframe.dry_run import executor
from everyframe.parallel.communicator import FakeCommunicator, ParallelContext
from everyframe.planning.find_model import find_model
from helpers.tiny_checkpoints import pipelines as tiny_pipelines


class Denoiser(nn.Module):
    """Answers with what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, text: Tensor, timestep: Tensor, mask: Any = None) -> Any:
        return (self.linear(x) + text.mean(),)


class Encoder(nn.Module):
    """A text's encoder, of two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.last = nn.Embedding(9, 4), nn.Linear(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.embedding(ids))


Call = Callable[[nn.Module, nn.Module, bool], object]
TEXT = torch.zeros(1, dtype=torch.long)


def asks(call: Call, *, is_guided: bool = True, num_steps: int = 1) -> CfgBranches:
    """What is found of a pipeline whose call that is."""

    def see(guided: bool) -> ObservedCalls:
        modules = {"transformer": Denoiser(), "text_encoder": Encoder()}
        return observe_calls(modules, lambda: call(*modules.values(), guided))

    return find_cfg_branches(see, is_guided=is_guided, num_steps=num_steps)


def noise(batch: int = 1) -> Tensor:
    return torch.zeros(batch, 3, 4, device="meta")


def batched(denoise: nn.Module, encode: nn.Module, guided: bool) -> object:
    text = encode(TEXT.to("meta"))
    batch = 2 if guided else 1
    (answer,) = denoise(noise(batch), text.repeat(batch, 1), timestep=torch.zeros(1))
    return answer.float() * 2


def in_turn(denoise: nn.Module, encode: nn.Module, guided: bool) -> object:
    text = encode(TEXT.to("meta"))
    one = denoise(noise(), text, torch.zeros(1))[0]
    if guided:
        other = denoise(noise(), text, torch.zeros(1))[0]
        one = other + 5 * (one - other)
    return one


def looks_between(denoise: nn.Module, encode: nn.Module, guided: bool) -> object:
    one = denoise(noise(), encode(TEXT.to("meta")), torch.zeros(1))[0].float()
    return denoise(noise(), one[0], torch.zeros(1))[0] - one if guided else one


def an_input(denoise: nn.Module, encode: nn.Module, guided: bool) -> object:
    return denoise(noise(), encode(TEXT.to("meta")), torch.tensor([6.0 if guided else 1.0]))


def three_of_two(denoise: nn.Module, encode: nn.Module, guided: bool) -> object:
    text = encode(TEXT.to("meta"))
    return denoise(noise(3 if guided else 2), text, torch.zeros(1))


def more_with_guidance(denoise: nn.Module, encode: nn.Module, guided: bool) -> object:
    text = encode(TEXT.to("meta"))
    mask = {"mask": torch.zeros(2, 3)} if guided else {}
    return denoise(noise(2 if guided else 1), text, torch.zeros(1), **mask)


def by_parts(denoise: Any, encode: Any, guided: bool) -> object:
    return denoise(noise(), encode.last(encode.embedding(TEXT.to("meta"))), torch.zeros(1))


def by_frames(denoise: nn.Module, encode: nn.Module, guided: bool) -> object:
    """As a ControlNet's answers are: each branch has a row for each frame."""
    branches = 2 if guided else 1
    mask = torch.zeros(3 * branches, 3)
    return denoise(noise(branches), encode(TEXT.to("meta")), torch.zeros(1), mask=mask)


def nothing(denoise: nn.Module, encode: nn.Module, guided: bool) -> object:
    raise ValueError("the schedule is empty")


def test_branches_of_one_batch_are_what_is_longer_with_guidance() -> None:
    branches = asks(batched)
    assert (branches.count, branches.is_together, branches.why) == (2, True, "")
    assert branches.rows == {"['x']": 1, "['text']": 1}  # and not the timestep
    assert branches.answer == ((2, 3, 4),)


def test_branches_of_several_calls_are_those_that_nobody_looks_between() -> None:
    branches = asks(in_turn)
    assert (branches.count, branches.is_together, branches.num_calls) == (2, False, 2)
    assert branches.form == pytree.tree_flatten((0,))[1]


@pytest.mark.parametrize("can_be_followed", [True, False])
def test_calls_of_a_step_are_counted_in_a_call_of_several(can_be_followed: bool) -> None:
    """As where a schedule is given; a dry run may stop before the second step."""

    def steps(denoise: nn.Module, encode: nn.Module, guided: bool) -> object:
        text, x = encode(TEXT.to("meta")), noise()
        for _ in range(3):
            one, other = (denoise(x, text, torch.zeros(1))[0] for _ in range(2))
            x = other + 5 * (one - other)
            if not can_be_followed:
                raise ValueError("no scheduler knows that")
        return x

    assert asks(steps, num_steps=3).num_calls == 2


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (looks_between, "asks its denoiser 2 times a step and looks at each answer before"),
        (an_input, "it asks its denoiser about one branch"),
        (three_of_two, r"with guidance its denoiser gets 1\.5 times as much"),
        (more_with_guidance, r"its denoiser's \['mask'\] is \(2, 3\) with guidance and None with"),
        (by_frames, r"\['mask'\] has 3 rows of each branch, which can't be assigned"),
        (by_parts, "parts of its text_encoder are called by themselves"),
        (nothing, r"no dry run can follow its .* \(ValueError: the schedule is empty\)"),
    ],
)
def test_why_they_can_not_be_apart(call: Call, why: str) -> None:
    branches = asks(call)
    assert branches.count == 1
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(branches.why)


def test_without_guidance_there_is_one() -> None:
    assert asks(batched, is_guided=False).why == "without guidance it has one branch"
    # What is asked at once is, whatever it is for.
    assert asks(lambda *given: in_turn(*given[:2], True), is_guided=False).count == 2


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x + 1, lambda x: 1 - x, lambda x: torch.ones(3) - x, lambda x: x.shape,
        lambda x: torch.cat([x, x]), lambda x: x.to(torch.float64), lambda x: x[0],
        lambda x: x.dtype, lambda x: list(x), lambda x: x.chunk(3), lambda x: x.numpy(),
        lambda x: repr(x), lambda x: torch.empty(3).copy_(x),
        lambda x: torch.ops.aten.add(x, 1),
    ],
)  # fmt: skip
def test_whatever_is_done_with_an_awaited_answer_has_it_brought_first(look: Any) -> None:
    known = torch.tensor([1.0, 2.0, 3.0])
    times: list[int] = []

    def bring() -> Tensor:
        times.append(1)
        return known

    awaited = LazyTensor.of(bring)
    assert isinstance(awaited, Tensor)
    assert not times, "who holds it alone does not look"
    made, right = look(awaited), look(known)
    assert times
    assert type(made) is type(right)
    assert str(made) == str(right)


def test_past_that_it_is_no_number() -> None:
    """A wrong answer in silence would be worse than none."""
    awaited = LazyTensor.of(lambda: torch.zeros(3))
    with torch._C.DisableTorchFunction():
        assert torch.isnan(awaited).all()


def resolved(folder: Path, name: str) -> tuple[Any, Settings]:
    """The model and the settings of a request for it."""
    tiny_pipelines.TINY[name](folder / name)
    asked = Request(
        prompt="a fox", model=str(folder / name), device="cpu", num_inference_steps=3,
        **tiny_pipelines.CALLS[name],
    )  # fmt: skip
    model: Any = find_model(asked, False)[0]
    return model, model.resolve(asked, 1)[0]


@cache
def of_pipeline(folder: Path, name: str, scale: float | None) -> CfgBranches:
    model, settings = resolved(folder, name)
    if scale is not None:
        settings = replace(settings, guidance_scale=scale)
    found_here: CfgBranches = model._dry.branches(settings)
    return found_here


def test_branches_are_found_before_a_dry_run_of_ranks_and_not_inside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The outer one would hand the inner one tensors without values where it needs some."""
    model, settings = resolved(tmp_path, "wan")
    begun, own = list[str](), executor.dry_run_modules

    def logged(*args: Any, **kwargs: Any) -> Any:
        begun.append("begins")
        found = own(*args, **kwargs)
        begun.append("ends")
        return found

    for module in (executor, cfg_detection):
        monkeypatch.setattr(module, "dry_run_modules", logged)
    two = FakeCommunicator(0, (1.0, 1.0))
    tiled = settings.with_option("vae_tiling", True)
    call = model._dry.dry_run_calls(tiled, ParallelContext(two, two, 2))[0]
    executor.dry_run(call, dict.fromkeys(call.components), DeviceFacts("any", "cpu", None, 0, 0))
    assert begun == ["begins", "ends"] * (len(begun) // 2)
    assert len(begun) == 4
    # Another dry run could find others; ranks that disagree would wait for each other for ever.
    assert model.num_branches(tiled) == model.num_branches(settings) == 2
    assert len(begun) == 4


@pytest.mark.parametrize(
    ("name", "count", "is_together"),
    [
        ("wan", 2, False),
        pytest.param("ltx", 2, True, marks=pytest.mark.slow),
        pytest.param("cogvideox", 2, True, marks=pytest.mark.slow),
        pytest.param("hunyuan15", 2, False, marks=pytest.mark.slow),
        pytest.param("mochi", 2, True, marks=pytest.mark.slow),
        pytest.param("latte", 2, True, marks=pytest.mark.slow),
        pytest.param("animatediff", 2, True, marks=pytest.mark.slow),
        pytest.param("hunyuan", 1, False, marks=pytest.mark.slow),
        pytest.param("ltx2", 1, False, marks=pytest.mark.slow),
    ],
)
def test_branches_of_diffusers_pipelines(
    tmp_path_factory: pytest.TempPathFactory, name: str, count: int, is_together: bool
) -> None:
    """As their code has it: torch.cat of both, or a call for each."""
    found_here = of_pipeline(tmp_path_factory.mktemp("models"), name, None)
    assert (found_here.count, found_here.is_together) == (count, is_together)
    assert bool(found_here.why) == (count == 1)
