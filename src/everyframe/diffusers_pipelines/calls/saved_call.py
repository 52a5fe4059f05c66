"""Inputs of a module call, saved so that it can be repeated."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from everyframe.diffusers_pipelines.calls.global_generators import restore_torch, states_of_torch
from everyframe.numerics.tensor_stats import iter_tensors
from everyframe.precision.cast_hooks import map_tensors
from everyframe.runtime.stages.decoder_check import middle


class SavedCall:
    """Saved inputs of a module call, and the state that the call may change.

    Wan's decoder stores frames in a list that it gets as an argument. Noise may come from a
    generator argument or from torch's global generators.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args = args
        self.kwargs = kwargs
        values = (*args, *kwargs.values())
        self._lists = [(each, each.copy()) for each in values if type(each) is list]
        self._mappings = [(each, each.copy()) for each in values if type(each) is dict]
        self._generators = [
            (each, each.get_state()) for each in values if isinstance(each, torch.Generator)
        ]
        devices = {each.device for each in iter_tensors((args, kwargs))}
        self._of_torch = states_of_torch(devices) if values else {}

    def calling(self, module: nn.Module) -> Callable[[], Any]:
        """A function that repeats the call from the saved state, any number of times."""

        def call() -> Any:
            self.restore()
            return module(*self.args, **self.kwargs)

        return call

    def cropped(self) -> SavedCall:
        """The same call with the middle of its latents alone."""
        self.restore()
        return SavedCall(*map_tensors((self.args, self.kwargs), middle))

    def by_name(self, module: nn.Module) -> dict[str, Any]:
        """The inputs by parameter name."""
        self.restore()
        return inspect.signature(module.forward).bind_partial(*self.args, **self.kwargs).arguments

    def restore(self) -> None:
        """Undo the call's changes to its inputs and generators."""
        for items, before in self._lists:
            items[:] = before
        for mapping, held in self._mappings:
            mapping.clear()
            mapping.update(held)
        for generator, state in self._generators:
            generator.set_state(state)
        restore_torch(self._of_torch)
