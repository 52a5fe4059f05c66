"""Memory fallbacks in the one order that plans and runs use.

  1. exact memory savings of the family,
  2. weight sharding across ranks,
  3. offload of weights to the host,
  4. lossy savings of the family.
A plan uses as few as make it fit (`everyframe.planning.memory_fit`); a stage that runs out of
memory applies the next one (`oom_fallback.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from everyframe.core.plan import Settings
from everyframe.runtime.interface import MemorySaving, MemorySavings

#: Name of the saving that computes fewer guidance branches in one call.
_BRANCHES = "branches_at_once"


#: Note for weights that are offloaded block by block.
BLOCK_OFFLOAD = (
    "block offload: weights stay in host memory and are copied to the device block by block"
)
#: Note for weights that host memory does not hold.
DISK_OFFLOAD = (
    "disk offload: weights are read from their files block by block at every call, as host memory "
    "does not hold them"
)


@dataclass(frozen=True)
class MemoryFallback:
    """One more memory fallback for a component, on top of all earlier ones.

    Either weights move, which changes only the time, or it is a memory saving of the family.

    Attributes:
        settings: settings with this and every earlier fallback.
        says: note for the user.
        offload: the weights are offloaded to the host.
        stage: the stage of a memory saving; empty for all.
        holders: number of ranks that shard the weights; 1 is no sharding.
    """

    component: str
    settings: Settings
    says: str
    is_lossy: bool = False
    offload: bool = False
    stage: str = ""
    holders: int = 1

    @property
    def moves_weights(self) -> bool:
        """Whether it moves weights, and is no memory saving of the family."""
        return self.offload or self.holders > 1


def memory_fallbacks(
    components: Sequence[str],
    settings: Settings,
    savings: MemorySavings | None,
    *,
    may_wait: bool,
    stage: str | None = None,
    holders: int = 1,
) -> Iterator[MemoryFallback]:
    """Yield all fallbacks for these components, in order.

    Weights are offloaded only if `may_wait`, and sharded across `holders` ranks if above 1. `stage`
    limits memory savings to that stage.
    """
    for is_lossy in (False, True):
        for name in components if savings is not None else ():
            assert savings is not None
            for at in _stages(savings, name, settings, stage):
                for saving in savings(name, settings):
                    wanted = (saving.is_lossy, saving.stage) == (is_lossy, at)
                    if wanted and saving.settings != settings:
                        settings = saving.settings
                        yield MemoryFallback(name, settings, saving.says, is_lossy, stage=at)
        for name in components if holders > 1 and not is_lossy else ():
            yield MemoryFallback(name, settings, held_says(holders), holders=holders)
        for name in components if may_wait and not is_lossy else ():
            says = BLOCK_OFFLOAD
            yield MemoryFallback(name, settings, says, offload=True)


def cfg_batch_size(settings: Settings, branches: int) -> int:
    """Number of guidance branches that one call of a step computes."""
    return min(branches, settings.saving(_BRANCHES, branches))


def split_cfg_saving(settings: Settings) -> MemorySaving:
    """Memory saving of a denoiser with two guidance branches: one after the other."""
    says = "guidance branches run one after the other (batch size 1)"
    return MemorySaving(settings.with_saving(_BRANCHES, 1), says)


def _stages(savings: MemorySavings, name: str, settings: Settings, only: str | None) -> list[str]:
    """Stages with memory savings, "" (all stages) first."""
    found = dict.fromkeys(saving.stage for saving in savings(name, settings))
    return sorted((at for at in found if only is None or at in ("", only)), key=bool)


BY_TURNS = "model offload: one component on the device at a time, the others in host memory"
"""Note for components that are offloaded as a whole, one on the device at a time."""


def held_says(holders: int) -> str:
    """Note for weights that `holders` ranks shard."""
    return (
        f"sharded weights: each of {holders} devices stores about 1/{holders} and "
        "broadcasts its blocks when needed"
    )
