"""Sees a pipeline's steps from outside, by hooks on its denoisers; no callback is needed.

A step may call the denoiser once (guidance batched) or several times (a call for each prompt, two
experts, more branches), so calls are not counted: a new step begins where the timestep changes, or
the scheduler's own index. A step is over when the next one begins, the last one when something else
than a denoiser runs, or the call returns. Hooks are taken off again whatever happens.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from everyframe.core.errors import EveryframeError, InputError
from everyframe.core.events import Event

#: What is said to who calls a pipeline that is in the middle of a run.
_CALLED = (
    "the pipeline was called while a run of it was under way, which would mix their steps; read "
    "that run's stream to its end or close it first, or load the pipeline once more"
)
_TIMESTEP_NAMES = ("timestep", "timesteps", "t", "sigma")


class StepTracker:
    """Counts steps while it is entered; `on_step(step, num_steps)` is told of each that is done.

    `num_calls` counts the calls of each denoiser by name. Nothing is counted while it is paused,
    because a call is repeated.
    """

    def __init__(
        self,
        denoisers: Mapping[str, nn.Module],
        others: Iterable[nn.Module],
        scheduler: Any,
        expected: int,
        on_step: Callable[[int, int], None],
    ) -> None:
        self._denoisers = denoisers
        self._others = list(others)
        self._scheduler = scheduler
        self._on_step = on_step
        self._handles: list[RemovableHandle] = []
        self._last: Any = None
        self._thread = threading.get_ident()
        self._is_paused = self._is_read = False
        self._was_called = False
        self.num_steps = expected
        self.begun = 0
        self.done = 0
        self.num_calls = dict.fromkeys(denoisers, 0)

    def __enter__(self) -> StepTracker:
        for name, module in self._denoisers.items():
            hook = partial(notify_step_tracker, self, name)
            self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        for module in self._others:
            for part in map(module.get_submodule, called_parts(module)):
                self._handles.append(part.register_forward_pre_hook(self._elsewhere))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within, calls are no steps."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    @property
    def is_paused(self) -> bool:
        """Whether a call of a module now is none of the pipeline's own."""
        return self._is_paused or self._is_elsewhere

    @property
    def _is_elsewhere(self) -> bool:
        """Whether somebody else calls: who reads an event, or another thread.

        Within what is being compiled the thread is no question, and a graph would break at it.
        """
        if self._is_read or torch.compiler.is_compiling():
            return self._is_read
        return threading.get_ident() != self._thread

    def read_by(self, emit: Callable[[Event], None]) -> Callable[[Event], None]:
        """`emit`, whose reader's own calls of modules are told from the pipeline's."""

        def handed_on(event: Event) -> None:
            with self._read():
                emit(event)

        return handed_on

    @contextmanager
    def _read(self) -> Iterator[None]:
        """Within, an event is read, and modules that are called are called by its reader.

        Raises:
            EveryframeError: the reader called the pipeline itself, whose scheduler is another now.
        """
        self._is_read = True
        try:
            yield
        finally:
            self._is_read = False
        if self._was_called:
            raise EveryframeError(f"the run is broken off: {_CALLED}")

    def finish(self) -> None:
        """The step that is under way is done."""
        if self.done < self.begun:
            self.done = self.begun
            self.num_steps = max(self.num_steps, self.done)
            with self._read():
                self._on_step(self.done, self.num_steps)

    def saw(self, name: str, timestep: Any) -> None:
        """A denoiser is about to be called; `timestep` is None where it is not told any.

        Raises:
            InputError: by somebody else than the pipeline's call that is watched.
        """
        if self._is_elsewhere:
            self._was_called = True
            raise InputError(_CALLED)
        if self.is_paused:
            return
        self.num_calls[name] += 1
        index = getattr(self._scheduler, "step_index", None)
        if timestep is None and not hasattr(self._scheduler, "step_index"):
            timestep = self.num_calls[name]  # each call is taken for a step
        now = (timestep, index)
        if self.begun and now == self._last:
            return
        self.finish()
        if not self.begun:
            self.num_steps = _num_steps(self._scheduler, timestep) or self.num_steps
        self._last = now
        self.begun += 1

    def _elsewhere(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not self.is_paused:
            self.finish()


def called_parts(module: nn.Module) -> tuple[str, ...]:
    """The parts of a component that a pipeline's code may call: itself, and its direct parts.

    An autoencoder's ``decode`` calls its decoder alone, and some pipelines call no text encoder but
    the model inside of it (``text_encoder.model(...)``), as MiniMax-H3's does.
    """
    return ("", *(name for name, _ in module.named_children()))


def bind_arguments(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """What a module is called with, by the names of its parameters."""
    names = list(inspect.signature(module.forward).parameters)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def notify_step_tracker(
    watch: StepTracker,
    name: str,
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    """Tell the watch of a call of that denoiser, which is about to be made or served."""
    given = bind_arguments(module, args, kwargs)
    found = next((given[each] for each in _TIMESTEP_NAMES if each in given), None)
    watch.saw(name, None if found is None else _value(found))


def _value(timestep: Any) -> tuple[float, float]:
    """The timestep as numbers: frames that are given may have another one than the rest."""
    flat = torch.as_tensor(timestep).detach().double().flatten()
    return (float(flat.min()), float(flat.max()))


def _num_steps(scheduler: Any, timestep: Any) -> int | None:
    """How many steps the scheduler is set to from that timestep on, counted as `StepTracker` does.

    A pipeline that begins at a given video (``strength``) leaves out the first ones.
    """
    timesteps = getattr(scheduler, "timesteps", None)
    if timesteps is None or not len(timesteps):
        return None
    left = torch.as_tensor(timesteps).detach().double().flatten().cpu()
    first = getattr(scheduler, "begin_index", None)
    if not first and isinstance(timestep, tuple):
        # Frames that are given may have a lower one.
        first = next(iter((left == timestep[1]).nonzero().flatten().tolist()), 0)
    left = left[first or 0 :]
    return len(left) if hasattr(scheduler, "step_index") else len(torch.unique_consecutive(left))
