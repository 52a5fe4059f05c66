"""Model family interface: the protocols and plain values that engine and planner use. No torch.

A family recognises its checkpoints by their configs, resolves a request into settings, lists its
components and provides the stages that run them. The plan decides device and precision.
Read next: `families/registry.py`, `model_spec.py`, `families/opensora/family.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from everyframe.core.events import Events
from everyframe.core.options import FamilyOptions
from everyframe.core.plan import Plan, Repair, Settings, Switches
from everyframe.core.request import Request
from everyframe.dry_run.call import DryRunCall
from everyframe.runtime.run_logs import OomLog, ReplayLog

if TYPE_CHECKING:
    import numpy as np

    from everyframe.checkpoints.locate import Location
    from everyframe.core.plan import Precision
    from everyframe.parallel.communicator import ParallelContext
    from everyframe.precision.policy import ComponentNeeds
    from everyframe.runtime.components.component_cache import WarmComponents


@dataclass(frozen=True)
class Component:
    """One component of a model, before a device is chosen for it.

    Attributes:
        stage: components of the same stage are in memory together.
        num_elements: elements of each weight tensor, by name.
        working_bytes: peak memory beside the weights, from bytes per element; only for a model
            without dry runs, which measure it otherwise.
        has_precision: precision of a component that the caller has loaded; nothing is chosen then.
        packed_bytes: bytes of each matrix that its file stores in blocks which can stay in memory.
    """

    name: str
    title: str
    stage: str
    source: str
    num_elements: Mapping[str, int]
    needs: ComponentNeeds
    working_bytes: Callable[[int], int] | None = None
    has_precision: Precision | None = None
    packed_bytes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ConditioningFrames:
    """Images and videos of the request, decoded to uint8 (T, H, W, 3).

    They are fitted to the video's size, except images where ``Settings.fit`` is None.

    Attributes:
        first, last: frames that the video begins with (one for an image), and the one it ends with.
        as_given: unchanged inputs of a diffusers pipeline by request field: Pillow images, tensors,
            arrays or lists of them.
        notes: messages for the user.
    """

    first: np.ndarray[Any, Any] | None = None
    last: np.ndarray[Any, Any] | None = None
    source: np.ndarray[Any, Any] | None = None
    as_given: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass
class VideoState:
    """State of one video while its stages run.

    Attributes:
        seed: noise seed; identifies the video within a request.
        inputs: conditioning frames of the request.
        text, conditioning: encoded prompts and conditioning frames (family-specific).
        latents: denoised latents; in a stage that `is_resumable`, the state after `step` steps.
        last_frames: last frames of the previous clip, float32 in 0..1, (T, H, W, 3); a chained clip
            continues from them.
        sampler_state: what else the sampler needs to resume.
        finished_batches: latents of the batches before the current one.
        repairs: repairs that the video needed in the current stage.
        oom_log: out-of-memory events of the current stage.
        replay_log: model outputs of a diffusers pipeline, for a stage that resumes by replay.
    """

    seed: int
    inputs: ConditioningFrames = field(default_factory=ConditioningFrames)
    start_noise: Any = None
    text: Any = None
    conditioning: Any = None
    latents: Any = None
    last_frames: Any = None
    step: int = 0
    sampler_state: Any = None
    finished_batches: tuple[Any, ...] = ()
    repairs: tuple[Repair, ...] = ()
    oom_log: OomLog | None = None
    replay_log: ReplayLog | None = None

    @property
    def has_history(self) -> bool:
        """Whether its stage begins with repairs or memory fallbacks of an interrupted run."""
        return bool(self.repairs) or (self.oom_log is not None and any(self.oom_log.known()))

    def begin_stage(self) -> None:
        """Reset the progress of the previous stage."""
        self.step, self.sampler_state, self.finished_batches = 0, None, ()
        self.repairs = ()


class Stage(Protocol):
    """One stage of a run: load its component, process every video, free the component on return."""

    @property
    def name(self) -> str:
        """Short name of the stage."""
        ...

    @property
    def component(self) -> str:
        """Name of the component that the stage loads."""
        ...

    @property
    def is_resumable(self) -> bool:
        """Whether the stage resumes in the middle, from the progress in its videos at each `Step`.

        Any other stage restarts from its beginning, with the videos as they were then.
        """
        ...

    def num_steps(self, num_videos: int) -> int:
        """Number of `Step` events that the stage yields."""
        ...

    def run(self, videos: Sequence[VideoState]) -> Events:
        """Run the stage. Its component is freed when this generator ends."""
        ...


class ModelSpec(Protocol):
    """A checkpoint whose configs were read, and whose weights were not."""

    @property
    def name(self) -> str:
        """Short name, folder or hub id."""
        ...

    @property
    def title(self) -> str:
        """Display name."""
        ...

    def resolve(self, request: Request, seed: int) -> tuple[Settings, tuple[str, ...]]:
        """Resolve the request into settings and notes. `InputError` for what the model can't do."""
        ...

    def components(self, settings: Settings) -> tuple[Component, ...]:
        """The components that run, in the order of their stages."""
        ...

    def missing(self) -> tuple[str, ...]:
        """Files to download first, one line each."""
        ...

    def fetch(self) -> ModelSpec:
        """Download missing files and return the complete model. Only the engine calls this."""
        ...

    def weight_files(self) -> tuple[str, ...]:
        """Files whose digest identifies the model."""
        ...

    def smaller(self, settings: Settings) -> Iterator[Settings]:
        """Similar settings that need less memory, largest first."""
        ...


@dataclass(frozen=True)
class MemorySaving:
    """Settings with which a component needs less memory.

    Attributes:
        message: the plan's note on the change.
        is_lossy: the frames change; lossy savings come after all exact ones.
        stage: the stage in which it helps, for a component of several; empty for all stages.
    """

    settings: Settings
    message: str
    is_lossy: bool = False
    stage: str = ""


MemorySavings = Callable[[str, Settings], Iterator[MemorySaving]]
"""Memory savings of a family for a component at these settings; see `DryRunSpec.savings`."""


@runtime_checkable
class DryRunSpec(Protocol):
    """A model with dry runs: the planner learns its dtype conflicts, memory and time from them."""

    def dry_run_calls(
        self, settings: Settings, parallel: ParallelContext | None = None
    ) -> Sequence[DryRunCall]:
        """One dry-run call for every stage, in order; with `parallel`, as one of its ranks.

        Only a `ShardableSpec` gets `parallel`; its rank may be simulated.
        """
        ...

    def savings(self, component: str, settings: Settings) -> Iterator[MemorySaving]:
        """Memory savings for a component, smallest change first, lossy ones last.

        Each includes the earlier ones of its stage and of the stages before, and none for another
        stage alone. What the request sets explicitly stays unchanged.
        """
        ...


@runtime_checkable
class LossySpec(Protocol):
    """A model whose steps can be sampled by lossy methods."""

    @property
    def is_distilled(self) -> bool:
        """Whether it was distilled to few steps, so that no exact run exists to compare with."""
        ...

    @property
    def has_partial_guidance(self) -> bool:
        """Whether its stages can leave guidance out of the last steps."""
        ...

    @property
    def has_held_guidance(self) -> bool:
        """Whether its denoiser can hold what guidance adds; see `GuidanceShare`."""
        ...

    def sampling_methods(self, settings: Settings) -> tuple[str, ...]:
        """Names of `everyframe.core.quality.METHODS` that its stages can run by."""
        ...

    def why_not(self, method: str) -> str | None:
        """Why its stages can't run by that method, where there is more to say than that."""
        ...


@runtime_checkable
class InMemory(Protocol):
    """A model that the caller holds in memory: it runs under the caller's torch settings."""

    @property
    def switches(self) -> Switches:
        """The caller's torch settings."""
        ...


@runtime_checkable
class WarmSpec(Protocol):
    """A model whose components can stay in memory between runs; a dataclass with this field."""

    @property
    def warm(self) -> WarmComponents | None:
        """What the run lends from a cache; None to load everything."""
        ...

    def identity(self) -> Hashable:
        """What its components are built from, beside the weights that its digest identifies."""
        ...

    def weight_files(self) -> tuple[str, ...]:
        """Files whose digest identifies the weights."""
        ...


@runtime_checkable
class PromptReadingSpec(Protocol):
    """A model that knows before loading how much of a prompt its text encoders read."""

    def unread(self, settings: Settings) -> Sequence[str]:
        """Truncated ends of the prompts, one line each; empty until tokenizers are downloaded.

        Raises:
            InputError: a prompt is too long and must not be truncated; quotes what would be lost.
        """
        ...


@dataclass(frozen=True)
class VideoGroup:
    """Ranks of these speeds (`weights`) that compute one video together.

    `num_cfg_groups` is the number of groups that split the guidance branches, `backend` the
    sequence-parallel one, one of the model's `sequence_backends`.
    """

    weights: tuple[float, ...]
    num_cfg_groups: int = 1
    backend: str = ""


@dataclass(frozen=True)
class RankShare:
    """One rank's share of each step.

    Attributes:
        tokens: fraction (0..1) of all tokens.
        attention: fraction (0..1) of attention, or of the layers that use another partition.
        sent_bytes: bytes that leave the rank.
        idle: why the rank is idle at times; empty if it never is.
        works: False if it never works; the others then do not wait for it.
    """

    tokens: float
    attention: float
    sent_bytes: int
    idle: str = ""
    works: bool = True


@runtime_checkable
class ShardableSpec(Protocol):
    """A model that several ranks can run together for one video."""

    @property
    def lead_rank_components(self) -> tuple[str, ...]:
        """Components that only rank 0 loads, for all ranks."""
        ...

    @property
    def sequence_backends(self) -> tuple[str, ...]:
        """Sequence-parallel backends; ("",) for a single one, empty if tokens can't be split."""
        ...

    @property
    def is_collective(self) -> bool:
        """Whether all ranks load the denoiser and call it together, as weight sharding needs."""
        ...

    @property
    def has_independent_branches(self) -> bool:
        """Whether ranks with different guidance branches call the denoiser independently.

        The planner then weighs CFG groups; else the tokens of all branches form one list.
        """
        ...

    def num_branches(self, settings: Settings) -> int:
        """Number of guidance branches in a step, which ranks can split."""
        ...

    def rank_part(
        self, settings: Settings, video_group: VideoGroup, rank: int, element_bytes: int
    ) -> RankShare:
        """Share of that rank in a video; `element_bytes` is that of intermediate results."""
        ...


@runtime_checkable
class CfgParallelSpec(Protocol):
    """A model that can explain why its guidance branches can't be split across ranks."""

    def why_one_branch(self, settings: Settings) -> str:
        """The reason; empty where they can be split."""
        ...


class Family(Protocol):
    """A model family."""

    name: str
    title: str
    options: type[FamilyOptions]

    def recognise(self, location: Location, options: FamilyOptions) -> ModelSpec | None:
        """The model at that location if its configs are of this family; reads no weights."""
        ...

    def stages(
        self, spec: ModelSpec, plan: Plan, clip: int, parallel: ParallelContext
    ) -> Sequence[Stage]:
        """The stages of one clip of a chain, in order, as one rank runs them.

        Only the events from the first rank of a video are used.
        """
        ...
