"""Recording: every call is seen in its order, and nothing that is computed changes by it."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from everyframe.core.errors import InputError
from everyframe.numerics.trace.fingerprint import fingerprint
from everyframe.numerics.trace.recorder import Recorder
from everyframe.numerics.trace.trace import Trace
from helpers import traced_modules


def recorded(module: nn.Module, *full: str, **sizes: int) -> Trace:
    recorder = Recorder(full)
    recorder.watch("net", module)
    traced_modules.sample(module, **{"tokens": 40, **sizes})
    recorder.remove()
    return recorder.trace({}, {})


@pytest.mark.parametrize("inference", [False, True])
def test_no_bit_changes(inference: bool) -> None:
    net = traced_modules.net()
    plain = traced_modules.sample(net, tokens=40)
    recorder = Recorder()
    recorder.watch("net", net)
    with torch.inference_mode(inference):
        assert torch.equal(traced_modules.sample(net, tokens=40), plain)
    recorder.remove()
    hooks = [part._forward_hooks or part._forward_pre_hooks for part in net.modules()]
    assert not any(hooks)


def test_calls_are_in_order_and_know_what_is_around_them() -> None:
    trace = recorded(traced_modules.net(), steps=2)
    names = [trace.parts[call.part].name for call in trace.calls]
    block = ["", ".norm", ".attn", ".attn.qkv", ".attn.core", ".attn.out"]
    block += [".mlp", ".mlp.0", ".mlp.1", ".mlp.2"]
    once = ["net", "net.embed"]
    once += [f"net.blocks.{number}{part}" for number in range(3) for part in block]
    assert names == 2 * [*once, "net.last"]
    assert [call.number for call in trace.calls] == len(names) // 2 * [1] + len(names) // 2 * [2]
    qkv = names.index("net.blocks.1.attn.qkv")
    assert names[trace.calls[qkv].parent] == "net.blocks.1.attn"
    assert trace.calls[0].parent == -1


def test_what_is_seen_is_named_and_typed() -> None:
    trace = recorded(traced_modules.net().double(), steps=1)
    first = [each for each in trace.seen if each.call == 0]
    assert [(each.kind, each.name) for each in first] == [
        ("input", "x"), ("input", "t"), ("output", ""),
    ]  # fmt: skip
    assert {each.dtype for each in trace.seen} == {"float64"}
    assert trace.numbers.dtype == np.float64
    assert first[0].shape == (1, 40, traced_modules.WIDTH)
    qkv = [each for each in trace.seen if trace.place(each.call) == "net.blocks.0.attn.qkv, call 1"]
    assert [each.name for each in qkv] == ["weight", "bias", "input", ""]


def test_the_numbers_are_those_of_the_tensors() -> None:
    net = traced_modules.net()
    trace = recorded(net, steps=1)
    weight = next(each for each in trace.seen if each.name == "weight")
    assert np.array_equal(trace.numbers[weight.row], fingerprint(net.embed.weight).numpy())


def test_equal_fingerprints_are_kept_once() -> None:
    trace = recorded(traced_modules.net(), steps=2)
    assert len(trace.numbers) < 0.7 * len(trace.seen)
    gelu = [each for each in trace.seen if trace.place(each.call) == "net.blocks.0.mlp.2, call 2"]
    mlp = [each for each in trace.seen if trace.place(each.call) == "net.blocks.0.mlp, call 2"]
    assert gelu[-1].row == mlp[-1].row


@dataclass
class Answer:
    sample: Tensor
    more: tuple[Tensor, dict[str, Tensor]]


Pair = namedtuple("Pair", "left right")


class Odd(nn.Module):
    """Called with things of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x: Tensor, *rest: object, **more: object) -> Answer:
        x += 1  # in place: what was given is seen before
        return Answer(self.inner(x), (x * 2, {"three": x * 3}))


def test_tensors_are_found_wherever_they_are() -> None:
    recorder = Recorder(["model"])
    module = Odd()
    recorder.watch("model", module)
    with torch.no_grad():
        x = torch.zeros(3)
        pair, far, none = Pair(torch.ones(2), None), {"a": torch.ones(4)}, torch.empty(0)
        nothing = torch.empty(2, device="meta")
        ids = torch.tensor([1])
        module(x, pair, [torch.ones(1), 7], flag=True, far=far, none=none, ids=ids, nothing=nothing)
    trace = recorder.trace({}, {})
    named = {(each.kind, each.name): each for each in trace.seen if each.call == 0}
    assert set(named) == {
        ("input", "x"), ("input", "1.0"), ("input", "2.0"), ("input", "far.a"), ("input", "ids"),
        ("output", "sample"), ("output", "more.0"), ("output", "more.1.three"),
    }  # fmt: skip
    given = trace.numbers[named["input", "x"].row]
    assert given[0] == given[1] == 0
    (x_kept,) = (trace.full[place] for place, each in enumerate(trace.seen) if each.name == "x")
    assert x_kept.tolist() == [0, 0, 0]


class Codes(Tensor):
    """A weight as GGUF's: bytes, and what they stand for."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.aminmax, Tensor.reshape):
            raise NotImplementedError(f"Codes dispatch: {func}")
        return super().__torch_function__(func, types, args, kwargs or {})


class Scaled(Codes):
    """A weight as torchao's: codes and scales."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], None

    codes, scale = torch.arange(4), torch.ones(2)


@pytest.mark.parametrize(
    ("kind", "names"), [(Codes, ["weight"]), (Scaled, ["weight.codes", "weight.scale"])]
)
def test_weights_of_a_quantizer_are_seen_as_what_they_hold(
    kind: type[Tensor], names: list[str]
) -> None:
    recorder = Recorder()
    module = nn.Identity()
    weight = torch.arange(4.0).as_subclass(kind)
    module.weight = nn.Parameter(weight, requires_grad=False)
    recorder.watch("model", module)
    module(torch.zeros(1))
    trace = recorder.trace({}, {})
    seen = [each for each in trace.seen if each.kind == "weight"]
    assert [each.name for each in seen] == names
    assert trace.numbers[seen[0].row][:2].tolist() == [0, 3]


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_a_call_that_fails_leaves_the_next_one_whole() -> None:
    recorder = Recorder()
    module = Fails()
    recorder.watch("model", module)
    with pytest.raises(RuntimeError):
        module(torch.ones(3))
    module(torch.ones(2))
    trace = recorder.trace({}, {})
    assert [trace.place(call) for call in range(4)] == [
        "model, call 1", "model.inner, call 1", "model, call 2", "model.inner, call 2",
    ]  # fmt: skip
    assert trace.calls[2].parent == -1


def test_a_module_is_called_several_times_in_one() -> None:
    shared = nn.Linear(2, 2)
    module = nn.Sequential(shared, nn.ReLU(), shared)
    recorder = Recorder()
    recorder.watch("model", module)
    module(torch.ones(2))
    trace = recorder.trace({}, {})
    assert [trace.place(call) for call in range(4)][1::2] == [
        "model.0, call 1", "model.0, call 1 (time 2)",
    ]  # fmt: skip


def test_names_to_keep_whole_must_be_there() -> None:
    with pytest.raises(InputError, match=r"no module 'net.blocks.7'; did you mean 'net.blocks"):
        recorded(traced_modules.net(), "net.blocks.7")
    with pytest.raises(InputError, match=r"no module 'net\.blocks'"):  # a list is never called
        recorded(traced_modules.net(), "net.blocks")


def test_it_holds_no_module_after_its_hooks_are_off() -> None:
    net = copy.deepcopy(traced_modules.net())
    recorder = Recorder()
    recorder.watch("net", net)
    traced_modules.sample(net, tokens=8, steps=1)
    gone = weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None
    assert recorder.trace({}, {}).calls
