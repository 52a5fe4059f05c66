"""The ways to do with less memory, in the one order that plans and runs take them in.

Exact savings of a family come first, then ranks keep weights between them, then these wait on the
host, then what shows in the picture.
A plan takes as few of them as make it fit (`everyframe.planning.memory_fit`); a stage that runs out
of memory takes the next one (`oom_fallback.py`). Read next: `family.Saving`, `offload.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from everyframe.core.plan import Settings
from everyframe.runtime.interface import MemorySaving, MemorySavings

#: The saving by which fewer branches of guidance are computed together.
_BRANCHES = "branches_at_once"


@dataclass(frozen=True)
class MemoryFallback:
    """One more thing done for `component`: `settings` hold then, with all that was done before.

    With `offload` this one is that its weights wait on the host, with `holders` above 1 that so
    many ranks keep them between them, in which nothing changes but the time; else it is a saving of
    the family, with what is said of it, for that `stage` or all.
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
        """Whether it is about where weights are, and not a saving of the family."""
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
    """All that can be done for these components; weights wait only where they `may_wait`.

    With `stage`, only what helps in that one. `holders` ranks can keep weights between them.
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
            says = "its weights wait in the host's memory and come to the device block by block"
            yield MemoryFallback(name, settings, says, offload=True)


def cfg_batch_size(settings: Settings, branches: int) -> int:
    """How many of a step's branches of guidance are computed together."""
    return min(branches, settings.saving(_BRANCHES, branches))


def split_cfg_saving(settings: Settings) -> MemorySaving:
    """The saving of every denoiser whose guidance has two branches."""
    says = "the two branches of guidance are computed one after the other"
    return MemorySaving(settings.with_saving(_BRANCHES, 1), says)


def _stages(savings: MemorySavings, name: str, settings: Settings, only: str | None) -> list[str]:
    """The stages that there are savings for, those for all stages first."""
    found = dict.fromkeys(saving.stage for saving in savings(name, settings))
    return sorted((at for at in found if only is None or at in ("", only)), key=bool)


BY_TURNS = "its parts wait in the host's memory, and come to the device by turns"
"""What is said of parts that are not on the device together."""


def held_says(holders: int) -> str:
    """What is said of weights that so many ranks keep between them."""
    return (
        f"each of {holders} devices keeps a part of its weights and hands them to the others, "
        "block by block"
    )
