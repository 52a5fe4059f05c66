"""Memory fallbacks of a pipeline call that ran out of memory, smallest change first.

All components are in memory together, so idle components leave the device first. Then come the
memory fallbacks of the component that ran out of memory. A fallback stays active for the rest of
the run. A pipeline in memory belongs to the caller: it is neither moved nor changed, and only the
arguments of its call may change. Repairs keep its weights in their storage beside the wide copies,
until memory runs out on a card; repaired weights then get the same bits in new storage.

`stage.py` makes the retry, and `module_calls.py` replays the denoiser answers computed before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import ceil
from typing import Any

from torch import nn

from everyframe.core.plan import Plan, Settings
from everyframe.diffusers_pipelines.files.components import STAGE
from everyframe.diffusers_pipelines.inputs.signature import CallSignature
from everyframe.diffusers_pipelines.loading import set_tiling, wait_elsewhere
from everyframe.runtime.interface import MemorySaving, MemorySavings, VideoState
from everyframe.runtime.memory import offload
from everyframe.runtime.memory.memory_fallbacks import CACHE_RELEASED, MemoryFallback
from everyframe.runtime.memory.oom_fallback import OomFallbacks

_NEW_STORAGE = "and weights that a repair replaces get the same bits in new storage"


class PipelineOomFallbacks(OomFallbacks):
    """The memory fallbacks of a run, each used once.

    `owned` are the modules that may be moved, by component; empty for a caller's pipeline.
    `savings` are the family's memory savings.

    Attributes:
        keeps_storage: whether repairs keep the storage of the caller's weights.
    """

    def __init__(
        self,
        plan: Plan,
        pipe: Any,
        owned: Mapping[str, nn.Module],
        savings: MemorySavings | None,
        free_others: Callable[[], bool] | None = None,
    ) -> None:
        note = CACHE_RELEASED if owned else f"{CACHE_RELEASED}, {_NEW_STORAGE}"
        super().__init__(
            plan,
            owned,
            savings,
            STAGE,
            takes_turns=True,
            cache_note=note,
            free_others=free_others,
        )
        self.keeps_storage = not owned
        self._pipe = pipe
        self._turns: offload.ModelOffload | None = None

    def resumed(self, video: VideoState) -> Iterator[MemoryFallback]:
        """Reapply the fallbacks that an interrupted run used up to this video; see `again`."""
        self.moments.of(video)
        return self.again(0)

    def _components(self, at: str) -> Sequence[str]:
        """The component alone; none if the pipeline's own code ran out of memory."""
        return [at] if at else []

    def _apply(self, fallback: MemoryFallback, plan: Plan) -> None:
        if fallback.turning or (fallback.block_offload and self._turns is not None):
            self._take_turns(plan)  # without a component that is offloaded block by block
        if fallback.block_offload:
            name = fallback.component
            module, device = self._modules[name], plan.component(name).device
            module.to("cpu")
            wait_elsewhere(module, device)
            offload.apply(module, device)
        elif not (fallback.component or fallback.turning):
            self.keeps_storage = False
        elif fallback.component in self._modules:
            set_tiling(self._pipe, fallback.settings)

    def _take_turns(self, plan: Plan) -> None:
        """Move each component that is on the device as a whole there only while it is called."""
        if self._turns is not None:
            self._turns.remove()
        device, in_blocks = (
            plan.device.torch_name,
            {p.name for p in plan.components if p.block_offload},
        )
        turning = [module for name, module in self._modules.items() if name not in in_blocks]
        for module in turning:
            module.to("cpu")
            wait_elsewhere(module, device)
        self._turns = offload.take_turns(turning, device)


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
