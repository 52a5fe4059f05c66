"""Numerics guard of a pipeline that runs through its own call: hooks on its modules.

For each component the outermost call is watched: of the component, or of a direct submodule if the
pipeline calls that (an autoencoder's `decode` calls its decoder only). The inputs of a call are
saved until it returns, so a bad result is recomputed with repairs before the pipeline sees it.
Hooks and repairs are removed on exit. The rules of checking and repair are in
`everyframe.runtime.stages.guard`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from everyframe.core.errors import NumericsError
from everyframe.core.events import Event, Note
from everyframe.core.plan import Plan
from everyframe.diffusers_pipelines.calls.compiled_calls import is_in_graph
from everyframe.diffusers_pipelines.calls.saved_call import SavedCall
from everyframe.diffusers_pipelines.calls.step_tracking import StepTracker, called_parts
from everyframe.diffusers_pipelines.calls.weight_hooks import why_not_widened
from everyframe.diffusers_pipelines.files.components import STAGE, has_frames
from everyframe.diffusers_pipelines.inputs.defaults import denoisers
from everyframe.numerics.overflow_probe import OverflowProbe
from everyframe.numerics.tensor_stats import blank_frames, iter_tensors, value_range
from everyframe.parallel.communicator import ONE, Communicator
from everyframe.precision.cast_hooks import map_tensors
from everyframe.precision.upcast import has_float32, is_below
from everyframe.runtime.interface import VideoState
from everyframe.runtime.repair.rank_agreement import UnshardedCall
from everyframe.runtime.repair.repairs import asks_for
from everyframe.runtime.stages.decoder_check import check_decoder
from everyframe.runtime.stages.guard import GivenError, Guard


class PipelineGuard:
    """Context: guard a pipeline's modules, by component name.

    `watch` counts the steps, and none while a call is repeated. `emit` gets repairs and findings at
    once. `unsharded` gives, for components that are split across ranks, a context that runs them
    whole; all ranks of `group` have the denoisers' results. With `keeps_storage`, repaired weights
    get back their storage, not only their values.
    """

    def __init__(
        self,
        plan: Plan,
        modules: Mapping[str, nn.Module],
        watch: StepTracker,
        video: VideoState,
        emit: Callable[[Event], None],
        unsharded: Mapping[str, UnshardedCall] = MappingProxyType({}),
        group: Communicator = ONE.video_group,
        *,
        keeps_storage: bool = False,
    ) -> None:
        given = (video.inputs.first, video.inputs.last)
        is_asked = any(each is not None and each.min() == each.max() for each in given)
        self._is_asked, self._emit, self._watch = is_asked, emit, watch
        self._seed = video.seed
        self._prompt = plan.settings.prompt
        self._parts: list[_Part] = []
        self._at: list[str] = []
        unused: list[str] = []
        for name, module in modules.items():
            denoises = bool(denoisers((name,)))
            counts, of = ("step", STAGE) if denoises else ("call", name)
            guard = Guard(
                plan,
                STAGE,
                {name: module},
                counts=counts,
                of=of,
                unsharded=unsharded.get(name),
                group=group if denoises else ONE.video_group,
                keeps_storage=keeps_storage,
            )
            guard.start_video(video)
            made = _Denoiser if denoises else _Coder if has_frames(name) else _Part
            part = made(guard, name, module, watch, emit, is_asked=is_asked)
            part.at, part.unused, part.join_all = self._at, unused, self._join_all
            self._parts.append(part)

    def _join_all(self) -> None:
        for part in self._parts:
            part.join()

    @property
    def at(self) -> str:
        """The component that runs or whose call raised; empty in the pipeline's own code."""
        return self._at[-1] if self._at else ""

    def checked(self, name: str, module: nn.Module, args: Any, kwargs: Any, result: Any) -> Any:
        """Check and repair the result of a component's call that was computed elsewhere."""
        return self._part(name).handed_on(module, SavedCall(args, kwargs), result)

    def repeated(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The result of a component's call, computed by this rank alone and not checked."""
        with self.computing(name), self._part(name).unsharded():
            return module(*args, **kwargs)

    def _part(self, name: str) -> _Part:
        return next(each for each in self._parts if each.name == name)

    @contextmanager
    def computing(self, name: str) -> Iterator[None]:
        """Context: that component runs unguarded; its result goes to `checked` later."""
        self._at.append(name)
        with self._watch.paused():
            yield
        self._at.pop()  # not where it raised

    def check_frames(self, frames_THWC: Any) -> None:
        """Emit a note about frames (T, H, W, 3) of one colour, if no decoder output was checked."""
        if self._is_asked or any(part.has_seen_frames for part in self._parts):
            return
        most = 255 if frames_THWC.dtype == np.uint8 else 1
        frames = torch.from_numpy(frames_THWC).movedim(-1, 1).float() / most
        blank = blank_frames(frames, 0, 1, 1 / 255)
        if blank and not asks_for(self._prompt, frames[blank]):
            which = f"{len(blank)} of {len(frames_THWC)} frames"
            text = f"{which} are of one colour; they are written unchanged"
            self._emit(Note(text, in_record=True, seed=self._seed))

    def __enter__(self) -> PipelineGuard:
        for part in self._parts:
            part.apply()
        return self

    def __exit__(self, *_: object) -> None:
        for part in self._parts:
            part.remove()


class _Part:
    """One guarded component."""

    def __init__(
        self,
        guard: Guard,
        name: str,
        module: nn.Module,
        watch: StepTracker,
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
        #: Components whose calls have not returned, innermost last.
        self.at: list[str] = []
        #: Errors of results that were passed on unrepaired because they may be unused.
        self.unused: list[str] = []
        #: Lets all components accept inputs of a wider dtype than their own.
        self.join_all: Callable[[], None] = guard.join
        self._handles: list[RemovableHandle] = []
        self._depth = 0
        self._num_calls = 0
        self._saved = SavedCall((), {})
        self._probe: OverflowProbe | None = None
        self._within = ExitStack()
        #: Why nothing of it can run in a wider dtype; empty if it can.
        self._why_fixed = why_not_widened(module)
        #: Output dtype of each called module before any repair.
        self._dtypes: dict[nn.Module, torch.dtype] = {}

    def apply(self) -> None:
        """Hook the component and its direct submodules."""
        for module in map(self._module.get_submodule, called_parts(self._module)):
            # First of all before the call, and last of all after it.
            before = module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
            after = module.register_forward_hook(self._after, with_kwargs=True, always_call=True)
            self._handles += [before, after]

    def remove(self) -> None:
        """Remove the hooks and the guard's repairs."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._end_probe()  # where an interrupt ended the call
        self._guard.end()

    def join(self) -> None:
        """Let the component accept inputs of a wider dtype than its own."""
        self._guard.join()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_in_graph() or self._watch.is_paused:
            return
        self._depth += 1
        if self._depth == 1:
            self._num_calls += 1
            self.at.append(self.name)
            self._saved = SavedCall(args, kwargs)
            self._probe = self._begin_probe()
            if self._probe is not None:
                self._within.enter_context(self._probe)

    def _begin_probe(self) -> OverflowProbe | None:
        """The overflow probe of this call; None if it has none."""
        return None if self._why_fixed else self._guard.probe()

    def _end_probe(self) -> OverflowProbe | None:
        probe, self._probe = self._probe, None
        self._within.close()
        return probe

    def _after(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> Any:
        if is_in_graph() or self._watch.is_paused:
            return None
        self._depth -= 1
        probe = self._end_probe() if not self._depth else None
        if self._depth or result is None:  # called by the component itself, or it raised
            return None
        saved, self._saved = self._saved, SavedCall((), {})
        self.at.pop()
        return self.handed_on(module, saved, result, probe)

    def unsharded(self) -> AbstractContextManager[None]:
        """Context: this rank computes the component alone."""
        return self._guard.ranks.unsharded()

    def handed_on(
        self, module: nn.Module, saved: SavedCall, result: Any, probe: OverflowProbe | None = None
    ) -> Any:
        """The result of a call after check and repair, cast back to its original dtype."""
        self.at.append(self.name)
        with self._watch.paused():
            result = self._check_result(module, saved, result, probe)
            if self._guard.has_repaired:
                # As wide as before, for whoever is given it next.
                narrow = _Narrow(self._dtypes[module])
                result = map_tensors(result, narrow)
                if not narrow.has_fitted:
                    self.join_all()
        self.at.pop()
        for event in self._guard.events():
            self._emit(event)
        return result

    def _check_result(
        self, module: nn.Module, saved: SavedCall, result: Any, probe: OverflowProbe | None
    ) -> Any:
        """Check the result and repair it if needed."""
        first = next(iter_tensors(result), None)
        self._dtypes.setdefault(module, torch.float32 if first is None else first.dtype)
        if self._guard.ranks.are_finite(value_range(result)):
            again = saved.calling(module)
            return self._guard.check_overflow(self._number(), probe, result, again)
        try:
            given = saved.by_name(module)
            if self._why_fixed:
                self._guard.check_inputs(self._number(), given)
                raise NumericsError(
                    f"{self._guard.place(self._number())}: {self.name} made values that are not "
                    f"finite, and can't be repaired: {self._why_fixed}, or load the pipeline in a "
                    "wider dtype. Nothing was written"
                )
            with self.unsharded():
                return self._guard.repair(self._number(), saved.calling(module), given)
        except GivenError as error:
            # What was not used when it was made is used now.
            message = self.unused[0] if self.unused else str(error)
            raise NumericsError(message) from None
        except NumericsError as error:
            if not self._may_be_unused(result):
                raise
            self.unused.append(str(error))
            what = re.split(r"\. (?:No wider|Nothing was)", str(error))[0]
            self._guard.note(
                f"{what}. Other results of {self.name} are finite, so the run continues unless it "
                "uses the rest"
            )
            return saved.calling(module)()

    def _may_be_unused(self, result: Any) -> bool:
        """Whether the pipeline may not need the non-finite tensors of the result."""
        return any(value_range(each).is_finite for each in iter_tensors(result))

    def _number(self) -> int:
        """Index of the current step or call, whichever the guard counts."""
        return self._num_calls


class _Denoiser(_Part):
    """A guarded component whose calls belong to denoising steps."""

    def _begin_probe(self) -> OverflowProbe | None:
        # A run that continues from a later step has the repairs that its first step asked for.
        return None if self._watch.num_calls[self.name] else super()._begin_probe()

    def _may_be_unused(self, result: Any) -> bool:
        return False

    def _number(self) -> int:
        return self._watch.begun

    def _check_result(
        self, module: nn.Module, saved: SavedCall, result: Any, probe: OverflowProbe | None
    ) -> Any:
        result = super()._check_result(module, saved, result, probe)
        self._guard.note_output(self._number(), value_range(result))
        return result


class _Coder(_Part):
    """A guarded autoencoder; its decoder's frames are checked for single colours.

    A decoder that the plan has in bfloat16 is checked against float32 in a video's first call.
    """

    _is_checked = False

    def _may_be_unused(self, result: Any) -> bool:
        return False

    def _check_result(
        self, module: nn.Module, saved: SavedCall, result: Any, probe: OverflowProbe | None
    ) -> Any:
        result = super()._check_result(module, saved, result, probe)
        latents = next(iter_tensors((saved.args, saved.kwargs)), None)
        is_decoder = module is getattr(self._module, "decoder", None)
        if latents is None or not is_decoder or self._why_fixed:
            return result
        again = saved.calling(module)
        if not self._is_checked:
            self._is_checked = True
            result = self._near_float32(module, saved, result)
        if _pixels(result) is None:
            return result
        self.has_seen_frames = True
        return self._guard.not_blank(
            self._number(), result, again, latents, _pixels, is_asked=self._is_asked
        )

    def _near_float32(self, module: nn.Module, saved: SavedCall, result: Any) -> Any:
        """The result of the decoder, or that in float32 if bfloat16 is too coarse."""
        if not has_float32(self._module):
            return result
        again, after = saved.calling(module), SavedCall(saved.args, saved.kwargs)
        piece = saved.cropped().calling(module)
        is_coarse = check_decoder(
            self._guard, self._module, lambda: next(iter_tensors(piece())), self._number()
        )
        after.restore()
        return again() if is_coarse else result


class _Narrow:
    """Casts wider tensors to `dtype` where they fit; `has_fitted` is False if one did not."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.has_fitted = True

    def __call__(self, tensor: Tensor) -> Tensor:
        # bfloat16 is wider than float16, and clashes with it.
        is_wider = is_below(self.dtype, tensor.dtype) or (
            tensor.is_floating_point() and tensor.dtype.itemsize > self.dtype.itemsize
        )
        if not is_wider:
            return tensor
        narrow = tensor.to(self.dtype)
        if value_range(narrow).is_finite:
            return narrow
        self.has_fitted = False
        return tensor


def _pixels(result: Any) -> Any:
    """Frames (T, 3, H, W) of a decoder's result; None if its pixels have another layout."""
    made = next(iter_tensors(result), None)
    if made is None or made.ndim not in (4, 5) or made.shape[1] != 3:
        return None
    return made if made.ndim == 4 else made.movedim(1, 2).flatten(0, 1)
