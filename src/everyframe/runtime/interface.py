"""What the engine and the resolver ask of a model family: protocols and plain values, no torch.

A family recognises its checkpoints by their configs, settles a request against one, names its
components, and gives the stages that run them. It is told device and precision by the plan and
chooses neither. Read next: `registry.py`, `model_spec.py`, `opensora/family.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from everyframe.core.events import Event
from everyframe.core.options import FamilyOptions
from everyframe.core.plan import Plan, Repair, Settings, Switches
from everyframe.core.request import Request
from everyframe.runtime.run_logs import OomLog, ReplayLog

if TYPE_CHECKING:
    import numpy as np

    from everyframe.checkpoints.locate import Location
    from everyframe.core.plan import Precision
    from everyframe.parallel.communicator import ParallelContext
    from everyframe.precision.policy import ComponentNeeds


@dataclass(frozen=True)
class Component:
    """One part of a model before a device is chosen for it.

    `num_elements` counts each tensor of its weights by name. The peak memory beside them is that
    of its rehearsals; a model without any gives `working_bytes(bytes_per_element)`.
    Components of the same `stage` are in memory together. `has_precision` is that of a component
    that is loaded already, by somebody else: then nothing is chosen for it.
    """

    name: str
    title: str
    stage: str
    source: str
    num_elements: Mapping[str, int]
    needs: ComponentNeeds
    working_bytes: Callable[[int], int] | None = None
    has_precision: Precision | None = None


@dataclass(frozen=True)
class ConditioningFrames:
    """Pictures and videos that came with the request, read: uint8 (T, H, W, 3).

    Fitted to the video's size, but for pictures where ``Settings.fit`` is None.
    `first` are frames that the video begins with (one for a picture), `last` the one it ends with.
    `as_given` holds instead, by the request's name, the pictures that a foreign pipeline is given
    as they are: Pillow's, tensors, arrays, lists of them. `notes` is what the person should know.
    """

    first: np.ndarray[Any, Any] | None = None
    last: np.ndarray[Any, Any] | None = None
    source: np.ndarray[Any, Any] | None = None
    as_given: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass
class VideoState:
    """One video in the making: what its stages hand on to each other.

    `text` and `known` are the family's own: what it made of prompts and of given frames.
    `latents` come of denoising, `tail` are the last frames of the clip before (float32 0..1,
    (T, H, W, 3)) that a chained clip goes on from.

    While a stage that `goes_on` runs, `step` counts its steps that are done for this take,
    `latents` is the state after them, `memory` what else the sampler needs to go on, and `finished`
    the latents of batches before the one that is worked on. `remedies` are the repairs that it
    needed in the stage that runs, `shortages` are when memory ran out in it.
    `answers` are those of a foreign pipeline's models, for a stage that is gone on with by replay.
    """

    seed: int
    given: ConditioningFrames = field(default_factory=ConditioningFrames)
    start_noise: Any = None
    text: Any = None
    known: Any = None
    latents: Any = None
    tail: Any = None
    step: int = 0
    memory: Any = None
    finished: tuple[Any, ...] = ()
    remedies: tuple[Repair, ...] = ()
    shortages: OomLog | None = None
    answers: ReplayLog | None = None

    def begin_stage(self) -> None:
        """Forget how far the stage before was."""
        self.step, self.memory, self.finished = 0, None, ()
        self.remedies = ()


class Stage(Protocol):
    """One stretch of a run: loads its component, works on every take, frees it on return."""

    @property
    def name(self) -> str:
        """What the stage does, in a word or two."""
        ...

    @property
    def component(self) -> str:
        """The component that it loads."""
        ...

    @property
    def goes_on(self) -> bool:
        """Whether its takes say at every `Step` how far they are, so that it can go on from there.

        Any other stage is done again from its beginning, with takes as they were then.
        """
        ...

    def num_steps(self, num_takes: int) -> int:
        """How many `Step` events it will yield."""
        ...

    def run(self, takes: Sequence[VideoState]) -> Iterator[Event]:
        """Do it. The component lives only as long as this generator."""
        ...


class ModelSpec(Protocol):
    """A checkpoint whose configs were read. Its weights were not."""

    @property
    def name(self) -> str:
        """Short name, folder or hub id."""
        ...

    @property
    def title(self) -> str:
        """What it is, for a person."""
        ...

    def settle(self, request: Request, seed: int) -> tuple[Settings, tuple[str, ...]]:
        """Every value of the request settled, and notes; `InputError` for what it can't do."""
        ...

    def components(self, settings: Settings) -> tuple[Component, ...]:
        """The parts that run, in the order of their stages."""
        ...

    def missing(self) -> tuple[str, ...]:
        """What must be fetched first, a line each."""
        ...

    def fetch(self) -> ModelSpec:
        """Fetch what is missing; the model as it then is. Called by the engine only."""
        ...

    def weight_files(self) -> tuple[str, ...]:
        """The files whose digest identifies the model."""
        ...

    def smaller(self, settings: Settings) -> Iterator[Settings]:
        """Settings like these that need less memory, largest first."""
        ...


@dataclass(frozen=True)
class DryRunCall:
    """One call of a component as its stage makes it, for a dry run on tensors without numbers.

    `module` gives the component's module, empty, on meta; a shared one may be given again.
    ``call(module, device)`` does what the stage does once, with what is around the model (guidance,
    a sampler's step) and everything on `device` that would be there; `num_calls` is how often the
    stage does that for one video. Calls with equal `key` find the same. `outputs` are those that
    the stage loads the component with (see `precision.edges.apply`).
    """

    stage: str
    component: str
    module: Callable[[], Any]
    call: Callable[[Any, str], object]
    num_calls: float
    key: Hashable
    outputs: tuple[str, ...] = ("",)

    @property
    def denoises(self) -> bool:
        """Whether it is of the steps, whose work several ranks share."""
        return self.stage == "denoise"

    def part(self) -> Any:
        """The component's own module."""
        return self.module()


@dataclass(frozen=True)
class JointDryRunCall(DryRunCall):
    """The share of one component in a call in which all components of the stage work.

    Here `module` gives every component's module by name, and ``call(modules, device)`` is handed
    those; it may be code that no dry run can follow. `outputs_of` takes the place of `outputs`.
    `model` stands for the model alone, whatever is asked of it.
    """

    outputs_of: Callable[[Any], tuple[str, ...]] = lambda module: ("",)
    is_of_step: bool = False
    model: Hashable = None

    @property
    def denoises(self) -> bool:
        """See `DryRunCall`."""
        return self.is_of_step

    def part(self) -> Any:
        """The component's own module."""
        return self.module()[self.component]


@dataclass(frozen=True)
class MemorySaving:
    """Settings with which a component takes less memory, and what the plan says of the change.

    What `is_lossy` shows in the picture, and is taken after everything that doesn't. `stage` is the
    one in which it helps, where the component works in several; empty for all of them.
    """

    settings: Settings
    says: str
    is_lossy: bool = False
    stage: str = ""


MemorySavings = Callable[[str, Settings], Iterator[MemorySaving]]
"""What a family offers for a component at these settings; see `DryRunSpec.savings`."""


@runtime_checkable
class DryRunSpec(Protocol):
    """A model whose stages can be run dry, so that plans know clashes, memory and time of them."""

    def rehearsals(self, settings: Settings) -> Sequence[DryRunCall]:
        """A call of every stage, in their order."""
        ...

    def savings(self, component: str, settings: Settings) -> Iterator[MemorySaving]:
        """Ways to run that component in less memory, from the least change to the most.

        Each has those of its stage and of all stages before it in it, and nothing that helps in
        another stage alone; lossy ones come last. Nothing that the request asked for by name is
        changed.
        """
        ...


@runtime_checkable
class InMemory(Protocol):
    """A model that somebody has in memory: torch is as its owner has set it while it runs."""

    @property
    def switches(self) -> Switches:
        """How that is."""
        ...


@runtime_checkable
class PromptReadingSpec(Protocol):
    """A model that knows, before anything is loaded, how much of a prompt its encoders read."""

    def unread(self, settings: Settings) -> Sequence[str]:
        """What no encoder reads of the prompts, a line each; nothing before tokenizers are fetched.

        Raises:
            InputError: a prompt is too long and may not be cut; says what would be.
        """
        ...


@dataclass(frozen=True)
class VideoGroup:
    """Ranks of these speeds that make one video together, its branches in so many `groups`.

    `way` is one of those that the model has.
    """

    weights: tuple[float, ...]
    groups: int = 1
    way: str = ""


@dataclass(frozen=True)
class RankShare:
    """What one rank does of each step: parts (0..1) of all tokens, and of the attention or layers
    for which they are dealt out in another way; the bytes that leave it.

    `idle` says when it has nothing to do, empty if it always has; one that never `works` is not
    waited for.
    """

    tokens: float
    attention: float
    sent_bytes: int
    idle: str = ""
    works: bool = True


@runtime_checkable
class ShardableSpec(Protocol):
    """A model of which several ranks make one video together."""

    @property
    def led(self) -> tuple[str, ...]:
        """The components that the first of all ranks alone loads, for all of them."""
        ...

    @property
    def ways(self) -> tuple[str, ...]:
        """Its ways to exchange what attention needs: ("",) where there is but one, none where the
        tokens of a video can't be dealt out.
        """
        ...

    @property
    def in_step(self) -> bool:
        """Whether ranks call the denoiser, which is loaded here, together: then they can keep its
        weights between them.
        """
        ...

    @property
    def apart(self) -> bool:
        """Whether ranks with other branches call the denoiser apart, in teams of their own, so that
        it is to be weighed whether they do; else tokens of all branches are dealt out as one list.
        """
        ...

    def num_branches(self, settings: Settings) -> int:
        """How many branches of guidance one step computes, which ranks can have apart."""
        ...

    def rank_part(
        self, settings: Settings, crew: VideoGroup, rank: int, element_bytes: int
    ) -> RankShare:
        """That rank's part of a video, with products in numbers of so many bytes."""
        ...

    def shared_rehearsals(self, settings: Settings, teams: ParallelContext) -> Sequence[DryRunCall]:
        """`DryRunSpec.rehearsals` of one (imagined) rank of ``teams.team``."""
        ...


@runtime_checkable
class CfgParallelSpec(Protocol):
    """A model that knows why its branches of guidance can't be computed apart, where they can't."""

    def why_one_branch(self, settings: Settings) -> str:
        """Why; empty where they can."""
        ...


class Family(Protocol):
    """One model family."""

    name: str
    title: str
    options: type[FamilyOptions]

    def recognise(self, location: Location, options: FamilyOptions) -> ModelSpec | None:
        """The model at that place if it is one of this family's, by its configs alone."""
        ...

    def stages(
        self, spec: ModelSpec, plan: Plan, clip: int, teams: ParallelContext
    ) -> Sequence[Stage]:
        """The stages of one clip of a chain, in order, as one rank runs them.

        What they yield counts on the first rank of a video.
        """
        ...
