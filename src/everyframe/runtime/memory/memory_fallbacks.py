"""Memory fallbacks: what a plan does to need less memory, in the one order that all callers use.

  1. exact memory savings of the family,
  2. weight sharding across ranks,
  3. offload of weights to the host,
  4. lossy savings of the family.
A plan uses as few as make it fit (`planning/memory/memory_fit.py`). A stage takes the next one
when it runs out of memory (`oom_fallback.py`); if ranks do so together, the launcher takes it and
restarts all of them (`everyframe.engine.resumption.replan`). No torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from everyframe.core.events import Repaired
from everyframe.core.plan import ComponentPlan, Plan, Settings
from everyframe.runtime.interface import MemorySaving, MemorySavings

#: Name of the saving that computes fewer guidance branches in one call.
_BRANCHES = "branches_at_once"

CACHE_RELEASED = "torch's memory cache is emptied"
"""Note for the first fallback on an accelerator: torch's cache is emptied."""
_BY_TURNS = "model offload: one component on the device at a time, the others in host memory"
OFFLOADED = "block offload: weights stay in host memory and are copied to the device block by block"
"""Note for weights that are offloaded to the host."""


@dataclass(frozen=True)
class MemoryFallback:
    """One more memory fallback, on top of all earlier ones.

    Either weights move, which changes only the time, or it is a memory saving of the family.

    Attributes:
        component: the component that it is for; empty for all.
        settings: settings with this and every earlier fallback.
        message: note for the user.
        block_offload: the weights are offloaded to the host.
        stage: the stage of a memory saving; empty for all.
        num_weight_shards: number of ranks that shard the weights; 1 is no sharding.
        turning: components that wait on the host, and of which one at a time is on the device.
    """

    component: str
    settings: Settings
    message: str
    is_lossy: bool = False
    block_offload: bool = False
    stage: str = ""
    num_weight_shards: int = 1
    turning: tuple[str, ...] = ()

    @property
    def moves_weights(self) -> bool:
        """Whether it moves the component's weights, and is no memory saving of the family."""
        return self.block_offload or self.num_weight_shards > 1

    def apply_to(self, plan: Plan) -> Plan:
        """The plan with this fallback."""

        def placed(component: ComponentPlan) -> ComponentPlan:
            if component.name in self.turning:
                return replace(component, model_offload=True)
            if component.name != self.component or not self.moves_weights:
                return component
            where = {
                "block_offload": self.block_offload,
                "num_weight_shards": self.num_weight_shards,
                "model_offload": False,
            }
            return replace(component, **where, resident_bytes=None)  # type: ignore[arg-type]

        return replace(plan, settings=self.settings, components=tuple(map(placed, plan.components)))

    def event(self, stage: str, step: int, why: str, seed: int | None = None) -> Repaired:
        """The event: `why` it was applied in that step; `seed` if it concerns one video only."""
        return Repaired(
            stage, step, self.component, "", "", "memory", "", "", self.message,
            f"{why}: {self.message}", seed,
        )  # fmt: skip


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
                        yield MemoryFallback(name, settings, saving.message, is_lossy, stage=at)
        for name in components if holders > 1 and not is_lossy else ():
            yield MemoryFallback(name, settings, sharding_note(holders), num_weight_shards=holders)
        for name in components if may_wait and not is_lossy else ():
            yield MemoryFallback(name, settings, OFFLOADED, block_offload=True)


class RemainingFallbacks:
    """Take the memory fallbacks that a plan has left for one stage, one at a time.

    Attributes:
        plan: the plan with those taken so far.
        taken: those in words, by component.
    """

    def __init__(
        self,
        plan: Plan,
        savings: MemorySavings | None,
        stage: str,
        *,
        movable: Collection[str],
        takes_turns: bool = False,
        cache_note: str = "",
        holders: int = 1,
    ) -> None:
        """Weights of `movable` components may leave the device; `takes_turns` if also as a whole.

        `cache_note` is for the release of cached memory, if the process has any. `holders` ranks
        may shard the weights.
        """
        self.plan = plan
        self.taken: list[tuple[str, str]] = []
        self._savings, self._stage, self._holders = savings, stage, holders
        self._movable, self._takes_turns, self._cache_note = movable, takes_turns, cache_note

    def next(self, components: Sequence[str]) -> MemoryFallback | None:
        """Take the next fallback for these components; None if there is none left."""
        for each in self._remaining(components):
            key = (each.component, each.message)
            if key not in self.taken:
                self.taken.append(key)
                self.plan = each.apply_to(self.plan)
                return each
        return None

    def _remaining(self, components: Sequence[str]) -> Iterator[MemoryFallback]:
        settings, can_move = self.plan.settings, self.plan.device.kind != "cpu"
        if can_move and self._cache_note:
            yield MemoryFallback("", settings, self._cache_note)
        parts = {part.name: part for part in self.plan.components}
        away = {
            name for name, part in parts.items() if part.block_offload or part.num_weight_shards > 1
        }
        idle = (name for name, part in parts.items() if not (name in away or part.model_offload))
        turning = tuple(name for name in idle if name in self._movable)
        if can_move and self._takes_turns and len(self._movable) > 1 and turning:
            yield MemoryFallback("", settings, _BY_TURNS, turning=turning)
        for each in memory_fallbacks(
            components,
            settings,
            self._savings,
            may_wait=can_move,
            stage=self._stage,
            holders=self._holders,
        ):
            name = each.component
            is_offloaded = name in parts and parts[name].block_offload
            is_done = (
                name in away if each.num_weight_shards > 1 else each.block_offload and is_offloaded
            )
            if not is_done and (name in self._movable or not each.moves_weights):
                yield each


def cfg_batch_size(settings: Settings, branches: int) -> int:
    """Number of guidance branches that one call of a step computes."""
    return min(branches, settings.saving(_BRANCHES, branches))


def split_cfg_saving(settings: Settings) -> MemorySaving:
    """Memory saving of a denoiser with two guidance branches: one after the other."""
    message = "guidance branches run one after the other (batch size 1)"
    return MemorySaving(settings.with_saving(_BRANCHES, 1), message)


def sharding_note(holders: int) -> str:
    """Note for weights that `holders` ranks shard."""
    return (
        f"sharded weights: each of {holders} devices stores about 1/{holders} and "
        "broadcasts its blocks when needed"
    )


def _stages(savings: MemorySavings, name: str, settings: Settings, only: str | None) -> list[str]:
    """Stages with memory savings, "" (all stages) first."""
    found = dict.fromkeys(saving.stage for saving in savings(name, settings))
    return sorted((at for at in found if only is None or at in ("", only)), key=bool)
