"""Seed the process-wide random generators for a pipeline's call, and restore them afterwards.

Not all noise comes from the generator that a call gets: the decoder of LTX-Video 0.9.1 and
components of other pipelines draw without one. With seeded global generators the same seed gives
the same video. Between two steps, readers of events find the generators as they left them.

All threads share one set of generators, and such draws can't be reached in any other way. So
draws of another thread during a call come from the call's seed, and the second of two
simultaneous calls continues with the first one's numbers. `is_mixed` reports when that may have
changed a video. `call.py` handles noise that a pipeline draws with a generator.
"""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

_LOCK = threading.Lock()
#: Original state of each generator in use, by name: from before the first active call.
_OUTSIDE: dict[str, Any] = {}
#: Active calls. Weak references drop a call that an interrupt ended half-way.
_AT_WORK: weakref.WeakSet[GlobalGenerators] = weakref.WeakSet()


@dataclass(frozen=True)
class _Source:
    """One process-wide generator; `begin` gives the state that a seed starts with."""

    read: Callable[[], Any]
    write: Callable[[Any], None]
    begin: Callable[[int], Any]


class GlobalGenerators:
    """The process-wide generators of one call: torch's (CPU and `devices`), numpy's and Python's.

    One of torch's that is among the call's arguments (`given`), as ``torch.manual_seed(7)`` returns
    it, is left alone: the call draws from it as it is, and its owner goes on with it afterwards.

    `is_mixed` is set if another call was active at the same time and either of them drew.
    """

    def __init__(
        self,
        devices: Iterable[str | torch.device] = (),
        given: Iterable[torch.Generator] = (),
    ) -> None:
        left_alone = {str(each.device) for each in given if _is_global(each)}
        of_torch = _of_torch(devices).items()
        self._sources = {
            "python": _PYTHON,
            "numpy": _NUMPY,
            **{name: source for name, source in of_torch if name not in left_alone},
        }
        self._mine: dict[str, Any] = {}
        self._is_inside = self._is_beside = False
        self.is_mixed = False

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Context: the generators start with that seed; on exit the outer state is restored."""
        self._mine = {name: source.begin(seed) for name, source in self._sources.items()}
        try:
            self._enter()
            yield
        finally:
            self._leave()

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Context: restore the outer state while other code runs, such as a reader of events."""
        if not self._is_inside:
            yield
            return
        self._leave()
        try:
            yield
        finally:
            self._enter()

    def _enter(self) -> None:
        self._is_inside = True
        with _LOCK:
            self._is_beside = bool(_AT_WORK)
            for other in _AT_WORK:
                other._is_beside = True
            for name, source in self._sources.items():
                if _is_held(name):
                    self._mine[name] = source.read()
                else:
                    _OUTSIDE[name] = source.read()
                    source.write(self._mine[name])
            _AT_WORK.add(self)

    def _leave(self) -> None:
        self._is_inside = False
        with _LOCK:
            _AT_WORK.discard(self)
            for name, source in self._sources.items():
                before, self._mine[name] = self._mine[name], source.read()
                self.is_mixed |= self._is_beside and not is_same(before, self._mine[name])
                # Nothing is there where an interrupt came before it was read.
                if not _is_held(name) and name in _OUTSIDE:
                    source.write(_OUTSIDE.pop(name))


def _is_held(name: str) -> bool:
    return any(name in each._sources for each in _AT_WORK)


def states_of_torch(devices: Iterable[str | torch.device]) -> Mapping[str, Any]:
    """States of torch's generators for the CPU and these devices."""
    return {name: source.read() for name, source in _of_torch(devices).items()}


def restore_torch(states: Mapping[str, Any]) -> None:
    """Restore states from `states_of_torch`."""
    for name, state in states.items():
        _source(torch.device(name)).write(state)


def is_same(one: Any, other: Any) -> bool:
    """Whether two states, or mappings of states, are equal."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, Mapping):
        return all(is_same(state, other[name]) for name, state in one.items())
    if isinstance(one, tuple):
        return all(map(is_same, one, other))
    return bool(one == other)


def _is_global(generator: torch.Generator) -> bool:
    """Whether it is the one that torch draws from, on its device, where no generator is given."""
    if generator.device.type == "cpu":
        return generator is torch.default_generator
    module = torch.get_device_module(generator.device)
    return any(generator is each for each in getattr(module, "default_generators", ()))


def _of_torch(devices: Iterable[str | torch.device]) -> dict[str, _Source]:
    """Torch's generators by device; meta has none."""
    found = {_exact(torch.device(each)) for each in devices if str(each) != "meta"}
    return {str(device): _source(device) for device in (torch.device("cpu"), *found)}


def _exact(device: torch.device) -> torch.device:
    """The device with its index, so that each device occurs once."""
    if device.type in ("cpu", "mps"):
        return torch.device(device.type)
    if ":" in str(device):
        return device
    return torch.device(device.type, torch.get_device_module(device).current_device())


def _source(device: torch.device) -> _Source:
    def begin(seed: int) -> Any:
        return torch.Generator(device).manual_seed(seed).get_state()

    if device.type == "cpu":
        return _Source(torch.get_rng_state, torch.set_rng_state, begin)
    module = torch.get_device_module(device)
    if device.type == "mps":  # there is one
        return _Source(module.get_rng_state, module.set_rng_state, begin)
    write = partial(module.set_rng_state, device=device)
    return _Source(partial(module.get_rng_state, device), write, begin)


def _begin_python(seed: int) -> Any:
    return random.Random(seed).getstate()


def _begin_numpy(seed: int) -> Any:
    return np.random.RandomState(seed % 2**32).get_state()


_PYTHON = _Source(random.getstate, random.setstate, _begin_python)
_NUMPY = _Source(np.random.get_state, np.random.set_state, _begin_numpy)
