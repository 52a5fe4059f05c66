"""Two traces side by side: what precision explains is no alarm, what it doesn't is named."""

from __future__ import annotations

import copy
import io
import math

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from everyframe.core.errors import InputError
from everyframe.numerics.heat_map import draw_comparison
from everyframe.numerics.trace import diff
from everyframe.numerics.trace.diff import Comparison, TracePlace, compare
from everyframe.numerics.trace.recorder import Recorder
from everyframe.numerics.trace.trace import Trace
from helpers import traced_modules


def recorded(module: nn.Module, *, ended: str = "", **sizes: int) -> Trace:
    recorder = Recorder()
    recorder.watch("net", module)
    traced_modules.sample(module, **sizes)
    recorder.remove()
    return recorder.trace({"seed": "1"}, {}, ended)


@pytest.fixture(scope="module")
def right() -> Trace:
    return recorded(traced_modules.net())


def first(compared: Comparison) -> tuple[str, TracePlace]:
    """Where the first place is, in words, and the place."""
    place = compared.places[0]
    return compared.a.place(compared.a.seen[place.seen].call), place


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_another_precision_is_no_alarm(right: Trace, dtype: torch.dtype) -> None:
    other = recorded(traced_modules.net().to(dtype))
    for compared in (compare(right, other), compare(other, right)):
        assert compared.places == ()
        assert compared.largest > 1e-8  # it did differ


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_bound_has_room_to_spare(
    right: Trace, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diff, "GROWTH", diff.GROWTH / 2)
    monkeypatch.setattr(diff, "ROUNDINGS", diff.ROUNDINGS / 2)
    assert compare(right, recorded(traced_modules.net().to(dtype))).places == ()


def test_the_same_again_differs_by_nothing(right: Trace) -> None:
    compared = compare(right, recorded(traced_modules.net()))
    assert compared.places == ()
    assert np.nanmax(compared.errors) == 0


@pytest.mark.parametrize("block", [0, 1, 2])
def test_a_half_precision_sum_in_one_attention_is_named(right: Trace, block: int) -> None:
    compared = compare(right, recorded(traced_modules.planted(traced_modules.net(), block)))
    where, place = first(compared)
    assert where == f"net.blocks.{block}.attn.core, call 1"
    assert not place.is_between
    assert place.before == 0
    assert place.error > 100 * place.explained
    assert "its output differs by" in place.message
    assert "the same going in, to the bit" in place.message
    assert "was Core in the first run and HalfAccumulating in the second" in compared.notes[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_so_it_is_where_all_else_is_in_half_precision_too(dtype: torch.dtype) -> None:
    net = traced_modules.net().to(dtype)
    compared = compare(recorded(net), recorded(traced_modules.planted(net, 1, dtype)))
    where, _ = first(compared)
    assert where == "net.blocks.1.attn.core, call 1"


class Between(nn.Module):
    """Its own arithmetic, between two layers, loses what float16 has no room for."""

    def __init__(self, *, is_wrong: bool) -> None:
        super().__init__()
        self.one, self.two, self.is_wrong = nn.Linear(32, 32), nn.Linear(32, 32), is_wrong

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        return self.two((x * 1e-6).half().float() * 1e6 if self.is_wrong else x)


def test_code_between_modules_is_distinguished_from_the_modules() -> None:
    torch.manual_seed(0)
    module = Between(is_wrong=False)
    wrong = copy.deepcopy(module)
    wrong.is_wrong = True
    traces = []
    for each in (module, wrong):
        recorder = Recorder()
        recorder.watch("model", nn.Sequential(each))
        torch.manual_seed(1)
        nn.Sequential(each)  # hooks sit on the child
        with torch.no_grad():
            each(torch.randn(4, 32))
        traces.append(recorder.trace({}, {}))
    where, place = first(compare(*traces))
    assert where == "model.0.two, call 1"
    assert place.is_between
    assert place.message.startswith("model.0, call 1: the input input that it gives to model.0.two")
    assert "its own code, between its modules" in place.message


def test_other_weights_are_reported(right: Trace) -> None:
    net = traced_modules.net()
    with torch.no_grad():
        net.blocks[1].mlp[1].weight[3, 5] += 0.5
    where, place = first(compare(right, recorded(net)))
    assert where == "net.blocks.1.mlp.1, call 1"
    assert "these are not the same weights" in place.message


def test_another_beginning_is_no_module_s_fault(right: Trace) -> None:
    where, place = first(compare(right, recorded(traced_modules.net(), seed=2)))
    assert where == "net, call 1"
    assert place.message.startswith("before any module: the input x")


def test_what_is_not_finite_is_named_where_it_begins(right: Trace) -> None:
    class Overflows(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / 0 * 0

    net = traced_modules.net()
    net.blocks[2].mlp[2] = Overflows()
    net.blocks[2].mlp[2].training = False
    where, place = first(compare(right, recorded(net)))
    assert where == "net.blocks.2.mlp.2, call 1"
    assert place.error == math.inf
    assert "is not finite in the second trace" in place.message
    both = compare(recorded(net), recorded(net))
    assert both.places == ()


def test_two_sizes_are_refused_and_why(right: Trace) -> None:
    with pytest.raises(InputError, match=r"two sizes: .*input x of net, call 1 is \(1, 300, 32\)"):
        compare(right, recorded(traced_modules.net(), tokens=200))


def test_other_steps_and_seeds_are_refused_and_why(right: Trace) -> None:
    with pytest.raises(InputError, match="net was called 3 times in the first trace and 2 times"):
        compare(right, recorded(traced_modules.net(), steps=2))
    other = Recorder().trace({"seed": "2"}, {})
    with pytest.raises(InputError, match="seed is 1 in the first trace and 2 in the second"):
        compare(right, other)
    with pytest.raises(InputError, match="no call in common"):
        compare(right, Recorder().trace({"seed": "1"}, {}, ended="at once"))


def test_a_run_that_ended_early_is_compared_as_far_as_it_went(right: Trace) -> None:
    compared = compare(right, recorded(traced_modules.net(), steps=1, ended="it broke"))
    assert compared.places == ()
    assert "the second run ended early: it broke" in compared.notes


def test_whole_numbers_are_exact() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 4)

        def forward(self, ids: Tensor) -> Tensor:
            return self.embed(ids)

    torch.manual_seed(0)
    module = Words()
    traces = []
    for ids in ([1, 2, 3], [1, 2, 4]):
        recorder = Recorder()
        recorder.watch("text", module)
        module(torch.tensor(ids))
        recorder.remove()
        traces.append(recorder.trace({}, {}))
    _, place = first(compare(*traces))
    assert "the input ids that text, call 1 was given" in place.message


def test_the_picture_marks_the_place(right: Trace) -> None:
    compared = compare(right, recorded(traced_modules.planted(traced_modules.net(), 1)))
    drawn = np.asarray(Image.open(io.BytesIO(draw_comparison(compared, "a against b"))))
    framed = np.argwhere((drawn == (230, 30, 120)).all(-1))
    names = list(dict.fromkeys(compared.a.parts[call.part].name for call in compared.a.calls))
    row = names.index("net.blocks.1.attn.core")
    assert 48 + 14 * row - 2 <= framed[:, 0].min() <= framed[:, 0].max() <= 48 + 14 * (row + 1) + 2
