"""The guard of a pipeline that runs through its own call: hooks on its modules, while it is called.

Of each component the outermost call is watched: that of the component itself, or of a direct part
where the pipeline's code calls that (an autoencoder's `decode` calls its decoder alone). What it
was called with is kept until it returns, so that a bad result is computed again, repaired, before
the pipeline sees it. A sampler's state is what the next call is given. On leaving, hooks and
repairs are taken off. Read next: `everyframe.families.guarding`, `watching.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from everyframe.core.errors import NumericsError
from everyframe.core.events import Event, Note
from everyframe.core.plan import Plan
from everyframe.families.family import Take
from everyframe.families.guarding import Guard
from everyframe.families.pipeline.components import STAGE
from everyframe.families.pipeline.global_generators import restore_torch, states_of_torch
from everyframe.families.pipeline.sizes import denoisers
from everyframe.families.pipeline.watching import StepWatch, called_parts
from everyframe.families.telling import asks_for_blank
from everyframe.numerics.watch import blank_frames, range_of, tensors_in
from everyframe.precision.edges import map_tensors

Apart = Callable[[], AbstractContextManager[None]]
"""Within what it gives, a component is computed by this process alone."""

#: Parameters that hold infinities on purpose.
_ON_PURPOSE = ("mask", "bias")


class Guarded:
    """Guards a pipeline's modules, by component, while it is entered.

    `watch` counts the steps, and counts none while a call is repeated; `emit` gets what was
    repaired and noticed at once. `apart` is how those compute alone whose work ranks share.
    """

    def __init__(
        self,
        plan: Plan,
        modules: Mapping[str, nn.Module],
        watch: StepWatch,
        take: Take,
        emit: Callable[[Event], None],
        apart: Mapping[str, Apart] = MappingProxyType({}),
    ) -> None:
        given = (take.given.first, take.given.last)
        is_asked = any(each is not None and each.min() == each.max() for each in given)
        is_asked = is_asked or asks_for_blank(plan.settings.prompt)
        self._is_asked, self._emit, self._watch = is_asked, emit, watch
        self._parts: list[_Part] = []
        self._at: list[str] = []
        for name, module in modules.items():
            denoises = bool(denoisers((name,)))
            counts, of = ("step", STAGE) if denoises else ("call", name)
            guard = Guard(plan, STAGE, {name: module}, counts=counts, of=of, apart=apart.get(name))
            guard.take(take)
            made = _Denoiser if denoises else _Coder if _has_frames(name) else _Part
            part = made(guard, name, module, watch, emit, is_asked=is_asked)
            part.at = self._at
            self._parts.append(part)

    @property
    def at(self) -> str:
        """The component that runs, or whose call raised; empty where the pipeline's own code is."""
        return self._at[-1] if self._at else ""

    def checked(self, name: str, module: nn.Module, args: Any, kwargs: Any, result: Any) -> Any:
        """The result of a call of that component, computed elsewhere, as the guard hands it on."""
        part = next(each for each in self._parts if each.name == name)
        return part.handed_on(module, _Kept(args, kwargs), result)

    @contextmanager
    def computing(self, name: str) -> Iterator[None]:
        """Within, that component runs, and nobody guards it: its result is `checked` later."""
        self._at.append(name)
        with self._watch.paused():
            yield
        self._at.pop()  # not where it raised

    def check_frames(self, frames_THWC: Any) -> None:
        """Tell of frames (T, H, W, 3) of one colour, where no decoder gave pixels to look at."""
        if self._is_asked or any(part.has_seen_frames for part in self._parts):
            return
        most = 255 if frames_THWC.dtype == np.uint8 else 1
        blank = blank_frames(torch.from_numpy(frames_THWC).float(), 0, most, most / 255)
        if blank:
            told = f"{len(blank)} of {len(frames_THWC)} frames are of one colour"
            self._emit(Note(f"{told}; they are written as they are"))

    def __enter__(self) -> Guarded:
        for part in self._parts:
            part.put_on()
        return self

    def __exit__(self, *_: object) -> None:
        for part in self._parts:
            part.take_off()


def _has_frames(name: str) -> bool:
    return "vae" in name and "audio" not in name


class _Part:
    """One component under its guard."""

    def __init__(
        self,
        guard: Guard,
        name: str,
        module: nn.Module,
        watch: StepWatch,
        emit: Callable[[Event], None],
        *,
        is_asked: bool,
    ) -> None:
        self._guard = guard
        self.name = name
        self._module = module
        self._watch = watch
        self._emit = emit
        self._is_asked = is_asked
        self.has_seen_frames = False
        #: Of those that were called and have not returned, the components.
        self.at: list[str] = []
        self._handles: list[RemovableHandle] = []
        self._depth = 0
        self._num_calls = 0
        self._kept = _Kept((), {})
        #: What each called module gave before anything was repaired.
        self._dtypes: dict[nn.Module, torch.dtype] = {}

    def put_on(self) -> None:
        """Hook the component and its direct parts."""
        for module in map(self._module.get_submodule, called_parts(self._module)):
            # First of all before the call, and last of all after it.
            before = module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
            after = module.register_forward_hook(self._after, with_kwargs=True, always_call=True)
            self._handles += [before, after]

    def take_off(self) -> None:
        """The component as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._guard.end()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._watch.is_paused:
            return
        self._depth += 1
        if self._depth == 1:
            self._num_calls += 1
            self.at.append(self.name)
            self._kept = _Kept(args, kwargs)

    def _after(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> Any:
        if self._watch.is_paused:
            return None
        self._depth -= 1
        if self._depth or result is None:  # called by the component itself, or it raised
            return None
        kept, self._kept = self._kept, _Kept((), {})
        self.at.pop()
        return self.handed_on(module, kept, result)

    def handed_on(self, module: nn.Module, kept: _Kept, result: Any) -> Any:
        """The result of a call, once it was looked at, and repaired if need be."""
        self.at.append(self.name)
        with self._watch.paused():
            result = self._watched(module, kept, result)
            if self._guard.has_repaired:
                # As wide as before, for whoever is given it next.
                result = map_tensors(result, _Narrow(self._dtypes[module]))
        self.at.pop()
        for event in self._guard.events():
            self._emit(event)
        return result

    def _watched(self, module: nn.Module, kept: _Kept, result: Any) -> Any:
        """The result, repaired if need be."""
        first = next(tensors_in(result), None)
        self._dtypes.setdefault(module, torch.float32 if first is None else first.dtype)
        if range_of(result).is_finite:
            return result
        kept.restore()
        self._check_given(module, kept)
        with self._guard.apart():
            return self._guard.repaired(self._number(), kept.calling(module))

    def _number(self) -> int:
        """Of what the guard counts."""
        return self._num_calls

    def _check_given(self, module: nn.Module, kept: _Kept) -> None:
        """Raise `NumericsError` if the module was given what is not finite."""
        named = inspect.signature(module.forward).bind_partial(*kept.args, **kept.kwargs).arguments
        for name, value in named.items():
            if any(word in name for word in _ON_PURPOSE) or range_of(value).is_finite:
                continue
            raise NumericsError(
                f"{self._guard.place(self._number())}: {self.name} was given {name} that is not "
                "finite, though all that its modules made was: the sampler's arithmetic or the "
                "pipeline's own did it. Nothing was written; other settings (steps, guidance), "
                "another scheduler or the whole pipeline in float32 may not"
            )


class _Denoiser(_Part):
    """A component whose calls belong to steps."""

    def _number(self) -> int:
        return self._watch.begun

    def _watched(self, module: nn.Module, kept: _Kept, result: Any) -> Any:
        result = super()._watched(module, kept, result)
        self._guard.answered(self._number(), range_of(result))
        return result


class _Coder(_Part):
    """An autoencoder, whose decoder makes frames."""

    def _watched(self, module: nn.Module, kept: _Kept, result: Any) -> Any:
        result = super()._watched(module, kept, result)
        latents = next(tensors_in((kept.args, kept.kwargs)), None)
        is_decoder = module is getattr(self._module, "decoder", None)
        if latents is None or not is_decoder or _pixels(result) is None:
            return result
        self.has_seen_frames = True
        again = kept.calling(module)
        return self._guard.not_blank(
            self._number(), result, again, latents, _pixels, is_asked=self._is_asked
        )


class _Kept:
    """What a module was called with, and the state of what its call may change.

    Wan's decoder keeps frames in a list that it is given; noise may come of a generator, given to
    it or torch's own.
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
        devices = {each.device for each in tensors_in((args, kwargs))}
        self._of_torch = states_of_torch(devices) if values else {}

    def calling(self, module: nn.Module) -> Callable[[], Any]:
        """The same call, as often as is wanted."""

        def call() -> Any:
            self.restore()
            return module(*self.args, **self.kwargs)

        return call

    def restore(self) -> None:
        """What the call has changed of it, as it was."""
        for items, before in self._lists:
            items[:] = before
        for mapping, held in self._mappings:
            mapping.clear()
            mapping.update(held)
        for generator, state in self._generators:
            generator.set_state(state)
        restore_torch(self._of_torch)


class _Narrow:
    """Casts wider tensors to `dtype` where they fit."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or tensor.dtype.itemsize <= self.dtype.itemsize:
            return tensor
        narrow = tensor.to(self.dtype)
        return narrow if range_of(narrow).is_finite else tensor


def _pixels(result: Any) -> Any:
    """Frames (T, 3, H, W) of what a decoder gives; None where its pixels lie otherwise."""
    made = next(tensors_in(result), None)
    if made is None or made.ndim not in (4, 5) or made.shape[1] != 3:
        return None
    return made if made.ndim == 4 else made.movedim(1, 2).flatten(0, 1)
