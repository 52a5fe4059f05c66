"""Calls made again in float32: growth is distinguished from its source; which run is wrong."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from everyframe.core.errors import DeviceLostError, InputError
from everyframe.numerics.trace.diff import Comparison, compare
from everyframe.numerics.trace.recorder import Recorder
from everyframe.numerics.trace.replay import Replayed, is_kept, replay
from everyframe.precision.upcast import Upcast, held_in
from helpers import traced_modules
from helpers.lost_device import dying_device

CORE = "net.blocks.1.attn"


def recorded(module: nn.Module, name: str = CORE) -> object:
    recorder = Recorder([name], held_in)
    recorder.watch("net", module)
    traced_modules.sample(module, steps=2)
    recorder.remove()
    return recorder.trace({}, {})


def replayed(a: nn.Module, b: nn.Module, module: nn.Module, name: str = CORE) -> Replayed:
    """The first call of that module, made again with `module`."""
    compared = compare(recorded(a, name), recorded(b, name))  # type: ignore[arg-type]
    return replay(compared, call_of(compared, name), module.get_submodule(name[4:]))


def call_of(compared: Comparison, name: str, number: int = 1) -> int:
    return next(
        place
        for place, call in enumerate(compared.a.calls)
        if compared.a.parts[call.part].name == name and call.number == number
    )


def test_rounded_weights_are_no_fault_of_a_module_that_was_raised() -> None:
    """Weights that were float16 when they were widened are not float32's; nor is that wrong."""
    net = traced_modules.net()
    narrow = copy.deepcopy(net).half()
    Upcast(narrow, torch.float32)
    name = "net.blocks.1.mlp.1"
    compared = compare(recorded(narrow, name), recorded(net, name))  # type: ignore[arg-type]
    assert compared.places == ()
    assert 1e-5 < compared.largest < 1e-2
    for number in (1, 2):
        found = replay(compared, call_of(compared, name, number), net.get_submodule(name[4:]))
        assert found.errors[0] > 1e-5
        assert found.wrong == ()


def test_a_device_that_is_lost_is_reported_as_that() -> None:
    net = traced_modules.net()
    compared = compare(recorded(net), recorded(net))  # type: ignore[arg-type]
    with dying_device() as device:
        net.blocks[1].attn.core.forward = lambda *_: device.die()
        with pytest.raises(DeviceLostError, match=r"cpu was lost while .*attn was replayed .*ECC"):
            replay(compared, call_of(compared, CORE), net.get_submodule(CORE[4:]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_wrong_run_is_named(dtype: torch.dtype) -> None:
    net = traced_modules.net()
    narrow = copy.deepcopy(net).to(dtype)
    wrong = traced_modules.planted(narrow, 1, torch.bfloat16)
    found = replayed(narrow, wrong, net)
    assert found.wrong == ("second",)
    assert replayed(wrong, narrow, net).wrong == ("first",)
    assert replayed(narrow, narrow, net).wrong == ()
    assert "the source is here, in the second run" in found.message


class Steep(nn.Module):
    """Right, and makes any difference many times larger."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(200 * x.float()).to(x.dtype)


def test_growth_is_distinguished_from_source() -> None:
    net = traced_modules.net()
    net.blocks[1].attn.out = nn.Sequential(Steep(), net.blocks[1].attn.out)
    name = "net.blocks.1.attn.out.0"
    compared = compare(
        recorded(net, name), recorded(copy.deepcopy(net).half(), name)  # type: ignore[arg-type]
    )  # fmt: skip
    call = call_of(compared, name)
    assert compared.a.seen[compared.places[0].seen].call == call
    assert is_kept(compared, call)
    assert not is_kept(compared, 0)
    found = replay(compared, call, net.get_submodule(name[4:]))
    assert found.wrong == ()
    assert found.growth > 20
    assert "growth, and the source is before it" in found.message


def test_hooks_and_precision_of_the_module_are_left_out() -> None:
    net = traced_modules.net()
    narrow = copy.deepcopy(net).bfloat16()

    def never(*_: object) -> None:
        raise AssertionError("a hook ran")

    for part in narrow.modules():
        part.register_forward_hook(never)
    compared = compare(recorded(net), recorded(copy.deepcopy(net)))  # type: ignore[arg-type]
    found = replay(compared, call_of(compared, CORE), narrow.get_submodule(CORE[4:]))
    # bfloat16 weights are not those of the runs.
    assert found.wrong == ("first", "second")
    assert next(narrow.parameters()).dtype == torch.bfloat16


class Told:
    """Something that no trace keeps."""


class Takes(nn.Module):
    def forward(self, x: Tensor, how: object, *, by: float = 1.0) -> Tensor:
        return x * by if how is None or isinstance(how, (Told, list)) else x


def compared_of(*args: object, **kwargs: object) -> Comparison:
    recorder = Recorder(["model"])
    module = Takes()
    recorder.watch("model", module)
    module(*args, **kwargs)
    trace = recorder.trace({}, {})
    return compare(trace, trace)


def test_arguments_of_all_kinds_are_given_again() -> None:
    compared = compared_of(torch.ones(3), [None, (1, "two"), {"x": torch.ones(2)}], by=2.0)
    assert replay(compared, 0, Takes()).errors == (0, 0)


@pytest.mark.parametrize("how", [Told(), math.inf, torch.Size([1])])
def test_what_a_trace_can_not_keep_is_reported(how: object) -> None:
    with pytest.raises(InputError, match=f"given a {type(how).__name__}, which a trace can't keep"):
        replay(compared_of(torch.ones(3), how), 0, Takes())


def test_another_module_is_reported() -> None:
    compared = compared_of(torch.ones(1, 3), None)
    with pytest.raises(InputError, match="model can't be replayed"):
        replay(compared, 0, nn.Linear(3, 3))


@pytest.mark.parametrize(
    "given", [{"args": [{}], "kwargs": {}}, {"args": [{"dict": [1]}], "kwargs": {}}, "net"]
)
def test_arguments_that_no_recorder_wrote_are_one_line(given: object) -> None:
    """A trace is a file, which anybody may have written."""
    net = traced_modules.net()
    compared = compare(recorded(net), recorded(net))  # type: ignore[arg-type]
    call = call_of(compared, CORE)
    made = replace(compared.a, arguments={call: given})
    with pytest.raises(InputError, match="can't be replayed"):
        replay(replace(compared, a=made), call, net.get_submodule(CORE[4:]))
