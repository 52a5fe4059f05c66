"""Diffusers pipelines with planted weights, and everything that a run could leave in one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def planted(
    pipe: Any, place: str, value: float | None = None, *, by: float | None = None
) -> Iterator[None]:
    """Within, one weight is as large as float16 just holds, one of its numbers is `value`, or all
    of them are multiplied `by` that.
    """

    def change(weight: Tensor, before: Tensor) -> None:
        if by is not None:
            weight.copy_(before.double() * by)
        elif value is not None:
            weight.view(-1)[3] = value
        else:
            weight.copy_(before.float() * (6e4 / before.float().abs().max()))

    component, _, module = place.partition(".")
    weight = pipe.components[component].get_submodule(module).weight
    before = weight.detach().clone()
    with torch.no_grad():
        change(weight, before)
    try:
        yield
    finally:
        with torch.no_grad():
            weight.copy_(before)


@contextmanager
def hooked(pipe: Any, place: str, hook: Callable[[Any, Any, Any], Any]) -> Iterator[None]:
    """Within, a module has that forward hook, as somebody may put on a pipeline of his own."""
    component, _, module = place.partition(".")
    handle = pipe.components[component].get_submodule(module).register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def state_of(pipe: Any) -> dict[str, Any]:
    """All that a repair could leave behind."""
    found: dict[str, Any] = {}
    for name, part in pipe.components.items():
        if isinstance(part, torch.nn.Module):
            for path, tensor in part.state_dict().items():
                # The very bits, NaN among them.
                held = tensor.detach().contiguous().view(torch.uint8).to(torch.int64)
                found[f"{name}.{path}"] = (tensor.dtype, tensor.data_ptr(), held.sum().item())
            for path, module in part.named_modules():
                found[f"{name}.{path}"] = (
                    type(module), len(module._forward_hooks), len(module._forward_pre_hooks),
                    sorted(vars(module)),
                )  # fmt: skip
    return found
