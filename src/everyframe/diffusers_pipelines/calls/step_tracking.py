"""Track a pipeline's denoising steps with hooks on its denoisers; needs no callback.

A step may call the denoiser once (batched guidance) or several times (one call per prompt, two
experts, more branches), so calls are not steps. A new step begins when the timestep or the
scheduler's step index changes. A step ends when the next one begins; the last one ends when another
component runs or the call returns. Hooks are always removed.
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
from everyframe.diffusers_pipelines.calls.compiled_calls import is_in_graph

#: Message for a caller who calls a pipeline during a run of it.
_CALLED = (
    "the pipeline was called while a run of it was under way, which would mix their steps; read "
    "that run's stream to its end or close it first, or load the pipeline once more"
)
_TIMESTEP_NAMES = ("timestep", "timesteps", "t", "sigma")


class StepTracker:
    """Context: count denoising steps; `on_step(step, num_steps)` is called after each.

    `num_calls` counts the calls of each denoiser by name. Calls while paused, which repeat others
    for a repair, are not counted.
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
        """Context: calls are not counted."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    @property
    def is_paused(self) -> bool:
        """Whether a module call now is not one of the pipeline's own."""
        return self._is_paused or self._is_elsewhere

    @property
    def _is_elsewhere(self) -> bool:
        """Whether the call comes from a reader of events or from another thread.

        The thread is not checked while compiling, as it would break the graph.
        """
        if self._is_read or torch.compiler.is_compiling():
            return self._is_read
        return threading.get_ident() != self._thread

    def read_by(self, emit: Callable[[Event], None]) -> Callable[[Event], None]:
        """Wrap `emit`, so that module calls by an event's reader don't count as the pipeline's."""

        def handed_on(event: Event) -> None:
            with self._read():
                emit(event)

        return handed_on

    @contextmanager
    def _read(self) -> Iterator[None]:
        """Context: an event is being read; module calls are the reader's.

        Raises:
            EveryframeError: the reader called the pipeline itself, which changed its scheduler.
        """
        self._is_read = True
        try:
            yield
        finally:
            self._is_read = False
        if self._was_called:
            raise EveryframeError(f"the run is interrupted: {_CALLED}")

    def finish(self) -> None:
        """End the current step."""
        if self.done < self.begun:
            self.done = self.begun
            self.num_steps = max(self.num_steps, self.done)
            with self._read():
                self._on_step(self.done, self.num_steps)

    def saw(self, name: str, timestep: Any) -> None:
        """Record that a denoiser is about to be called; `timestep` is None if it gets none.

        Raises:
            InputError: the call is not one of the tracked pipeline call.
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

    def next_step(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[bool, float | None]:
        """Whether a call that is about to be made begins a step, and its highest timestep."""
        timestep = _timestep(module, args, kwargs)
        if timestep is None:
            return True, None
        now = (timestep, getattr(self._scheduler, "step_index", None))
        return not self.begun or now != self._last, timestep[1]

    def _elsewhere(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not is_in_graph() and not self.is_paused:
            self.finish()


def called_parts(module: nn.Module) -> tuple[str, ...]:
    """Submodules that a pipeline's code may call directly: the component and its children, by name.

    An autoencoder's ``decode`` calls its decoder only. Some pipelines, such as MiniMax-H3's, call
    the model inside the text encoder (``text_encoder.model(...)``).
    """
    return ("", *(name for name, _ in module.named_children()))


def bind_arguments(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a module call by parameter name."""
    names = list(inspect.signature(module.forward).parameters)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def notify_step_tracker(
    watch: StepTracker,
    name: str,
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    """Notify the tracker of a denoiser call that is about to be computed or replayed."""
    if is_in_graph():
        return
    watch.saw(name, _timestep(module, args, kwargs))


def _timestep(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[float, float] | None:
    """Lowest and highest timestep of a call; None if it gets none.

    Conditioning frames may have a different one than the rest.
    """
    given = bind_arguments(module, args, kwargs)
    found = next((given[each] for each in _TIMESTEP_NAMES if each in given), None)
    if found is None:
        return None
    flat = _numbers(found)
    return (float(flat.min()), float(flat.max()))


def _numbers(given: Any) -> torch.Tensor:
    """Numbers in float64 on the host: some devices have no float64."""
    return torch.as_tensor(given).detach().flatten().cpu().double()


def _num_steps(scheduler: Any, timestep: Any) -> int | None:
    """Steps of the scheduler from that timestep on, counted as `StepTracker` does.

    A video-to-video pipeline (``strength``) skips the first ones.
    """
    timesteps = getattr(scheduler, "timesteps", None)
    if timesteps is None or not len(timesteps):
        return None
    left = _numbers(timesteps)
    first = getattr(scheduler, "begin_index", None)
    if not first and isinstance(timestep, tuple):
        # Frames that are given may have a lower one.
        first = _first_index(scheduler, left, timestep[1])
    left = left[first or 0 :]
    return len(left) if hasattr(scheduler, "step_index") else len(torch.unique_consecutive(left))


def _first_index(scheduler: Any, timesteps: torch.Tensor, value: float) -> int:
    """Index of the step that begins with this timestep or sigma; 0 if the schedule has none such.

    Cosmos 2.5 hands its denoiser sigmas, of which the first may be the last timestep (1). A
    second-order scheduler has most timesteps twice: a pipeline begins with the first of its two
    calls, at a multiple of its order.
    """
    order, found = int(getattr(scheduler, "order", 1)), []
    for values in (timesteps, getattr(scheduler, "sigmas", None)):
        if values is not None:
            same = _numbers(values) == value
            found += same[::order].nonzero().flatten().tolist()[:1]
    return min(found, default=0) * order
