"""Retry a pipeline call with less memory after an out-of-memory error, smallest change first.

All components are in memory together, so idle components leave the device first. Then come the
memory fallbacks of the component that ran out of memory. A fallback stays active for the rest of
the run. A pipeline in memory belongs to the caller: it is neither moved nor changed, and only the
arguments of its call may change. Repairs keep its weights in their storage beside the wide copies,
until memory runs out on a card; repaired weights then get the same bits in new storage.

`stage.py` makes the retry, and `module_calls.py` replays the denoiser answers computed before. The
order is that of `everyframe.runtime.memory_fallbacks`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from math import ceil
from typing import Any

from torch import nn

from everyframe.core.plan import Plan, Settings
from everyframe.diffusers_pipelines.loading import set_tiling, wait_elsewhere
from everyframe.diffusers_pipelines.signature import CallSignature
from everyframe.hardware.memory import empty_cache
from everyframe.runtime import offload
from everyframe.runtime.interface import MemorySaving, MemorySavings, VideoState
from everyframe.runtime.memory_fallbacks import BY_TURNS, MemoryFallback, memory_fallbacks
from everyframe.runtime.oom_fallback import GIVEN_BACK, AppliedFallback
from everyframe.runtime.run_logs import OomEvent

_NEW_STORAGE = "and weights that a repair replaces get the same bits in new storage"


class PipelineMemoryFallbacks:
    """The memory fallbacks of a run, each used once.

    `owned` are the modules that may be moved, by component; empty for a caller's pipeline.
    `savings` are the family's memory savings.

    Attributes:
        tried: fallbacks used so far, in words.
        settings: the settings with these fallbacks.
        keeps_storage: whether repairs keep the storage of the caller's weights.
    """

    def __init__(
        self, plan: Plan, pipe: Any, owned: Mapping[str, nn.Module], savings: MemorySavings | None
    ) -> None:
        self.tried: list[str] = []
        self.settings = plan.settings
        self.keeps_storage = not owned
        self._known: list[OomEvent] | None = None
        self._plan = plan
        self._pipe = pipe
        self._owned = dict(owned)
        self._savings = savings
        self._done: set[tuple[str, str]] = set()
        self._turns: offload.ModelOffload | None = None
        self._waiting = {part.name for part in plan.components if part.offload or part.by_turns}
        self._in_blocks = {part.name for part in plan.components if part.offload}

    def at(self, take: VideoState, part: str) -> AppliedFallback | None:
        """Apply the next fallback for that component and video; None if there is none left.

        The event is saved for resume.
        """
        relief = self.next(part)
        if relief is not None and take.shortages is not None:
            take.shortages.keep(OomEvent(take.seed, at=part))
        return relief

    def again(self, take: VideoState) -> Iterator[AppliedFallback]:
        """Resume: reapply the fallbacks that the run used up to this video.

        Yields those of this video, as their events were not emitted. Earlier answers are replayed.
        """
        if self._known is None:
            self._known = [] if take.shortages is None else [*take.shortages.known()]
        while self._known and (self._known[0].seed or 0) <= take.seed:
            shortage = self._known.pop(0)
            relief = self.next(shortage.at)
            if relief is not None and shortage.seed == take.seed:
                yield relief

    def next(self, at: str) -> AppliedFallback | None:
        """Apply the next fallback for component `at`; None if there is none left.

        `at` is empty if the pipeline's own code ran out of memory. Torch's cached memory is
        released first.
        """
        empty_cache()
        for relief, do in self._ways(at):
            key = (relief.component, relief.says)
            if key not in self._done:
                self._done.add(key)
                do()
                self.tried.append(relief.says)
                return relief
        return None

    def _ways(self, at: str) -> Iterator[tuple[AppliedFallback, Callable[[], None]]]:
        may_wait = self._plan.device.kind != "cpu"
        if may_wait and self._owned:
            yield AppliedFallback("", GIVEN_BACK), lambda: None
        elif may_wait:
            yield AppliedFallback("", f"{GIVEN_BACK}, {_NEW_STORAGE}"), self._release_storage
        idle = self._owned.keys() - self._waiting
        if may_wait and len(self._owned) > 1 and idle:
            yield AppliedFallback("", BY_TURNS), self._take_turns
        if not at:
            return
        may_wait = may_wait and at in self._owned
        for way in memory_fallbacks((at,), self.settings, self._savings, may_wait=may_wait):
            if not (way.offload and at in self._in_blocks):
                yield AppliedFallback(at, way.says), lambda way=way: self._go(way)  # type: ignore[misc]

    def _release_storage(self) -> None:
        self.keeps_storage = False

    def _take_turns(self) -> None:
        """Move each component that is on the device as a whole there only while it is called."""
        if self._turns is not None:
            self._turns.remove()
        turning = [module for name, module in self._owned.items() if name not in self._in_blocks]
        for module in turning:
            module.to("cpu")
            wait_elsewhere(module, self._plan.device.torch_name)
        self._turns = offload.take_turns(turning, self._plan.device.torch_name)
        self._waiting |= self._owned.keys()

    def _go(self, way: MemoryFallback) -> None:
        self.settings = way.settings
        if not way.offload:
            if way.component in self._owned:
                set_tiling(self._pipe, way.settings)
            return
        module, device = self._owned[way.component], self._plan.component(way.component).device
        self._in_blocks.add(way.component)
        if self._turns is not None:
            self._take_turns()  # without this one
        module.to("cpu")
        wait_elsewhere(module, device)
        offload.apply(module, device)


#: Parameter of the call, and name of the memory saving in settings.
NAME = "decode_chunk_size"


def chunk_savings(
    interface: CallSignature, given: Collection[str], settings: Settings, vae: str
) -> Iterator[MemorySaving]:
    """Memory savings: decode half as many frames at once, then half of that, down to one.

    `given` are the parameters set by the user; their values are not changed. `vae` is the
    autoencoder's class: an image VAE decodes each frame separately, while a temporal decoder sees
    neighbouring frames of the same chunk, so smaller chunks change its result.
    """
    parameter = interface.parameters.get(NAME)
    if parameter is None or NAME in given:
        return
    own = parameter.default if isinstance(parameter.default, int) else settings.num_frames
    chunk = min(settings.saving(NAME, own), settings.num_frames)
    is_lossy = "Temporal" in vae
    why = (
        "which changes the picture a little: the decoder sees a frame's neighbours only inside of "
        "these"
        if is_lossy
        else "each by itself"
    )
    while chunk > 1:
        chunk = ceil(chunk / 2)
        settings = settings.with_saving(NAME, chunk)
        yield MemorySaving(
            settings, f"frames are decoded {chunk} at once ({NAME}), {why}", is_lossy
        )
