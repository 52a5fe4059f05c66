"""What will run: the request with every value settled, and where each part of the model runs.

Plans are frozen and printable, and are made by `everyframe.planning.resolve` alone. Nothing was
loaded or fetched to make one. Read next: `everyframe.engine`, which runs them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from everyframe.core.facts import DeviceFacts
from everyframe.core.parallel_plan import ParallelPlan


@dataclass(frozen=True)
class Settings:
    """The request, settled: sizes in pixels, `num_frames` per clip, options by flag name.

    `nominal_size` (height, width) is the size as it was named, where the model is told that one and
    works in steps that do not hit it (240p is 240x426 to Open-Sora 1.2, which makes 240x424).
    `nominal_length` is likewise the `num_frames` that the model is told where it makes others.
    `own_choices` are those of height, width and num_frames that nobody gave and that it isn't told.
    `prompt` is empty for a model that takes none. `fit` is how given pictures are brought to the
    size (``crop``, ``pad``, ``stretch``), None where the family wants them as they were given.
    `given_forms` are what those of `given_frames` are, by name, that are handed on as they are.
    `savings` are what the resolver chose so that less memory is needed, by the family's own names.
    """

    prompt: str
    negative_prompt: str | None
    height: int
    width: int
    num_frames: int
    fps: float
    num_inference_steps: int
    guidance_scale: float
    seed: int
    num_videos: int = 1
    chain: int = 1
    edit_strength: float = 0.0
    given_frames: tuple[str, ...] = ()
    nominal_size: tuple[int, int] | None = None
    nominal_length: int | None = None
    own_choices: tuple[str, ...] = ()
    given_forms: tuple[tuple[str, Any], ...] = ()
    fit: str | None = "crop"
    options: tuple[tuple[str, Any], ...] = ()
    savings: tuple[tuple[str, int], ...] = ()

    @property
    def told_size(self) -> tuple[int, int]:
        """(height, width) that the model is told: the nominal one where there is one."""
        return self.nominal_size or (self.height, self.width)

    @property
    def told_length(self) -> int:
        """Frames that the model is told: the nominal ones where there are."""
        return self.nominal_length or self.num_frames

    def option(self, name: str) -> Any:
        """The settled value of a family's own option."""
        return dict(self.options)[name]

    def saving(self, name: str, otherwise: int) -> int:
        """What the resolver chose to save memory, or what holds without."""
        return dict(self.savings).get(name, otherwise)

    def with_saving(self, name: str, value: int) -> Settings:
        """These settings with one more saving."""
        return replace(self, savings=(*dict(self.savings, **{name: value}).items(),))


@dataclass(frozen=True)
class Precision:
    """Dtypes of one component by torch's names, and the parts that stay in float32 at least.

    `weights` is what its linear layers keep theirs in (``int8``, ``fp8``), empty where that is the
    dtype of all other parameters.
    """

    parameters: str
    compute: str
    islands: tuple[str, ...] = ()
    weights: str = ""

    def __str__(self) -> str:
        return f"{self.compute} with {self.weights} weights" if self.weights else self.compute


#: What a remedy's module runs in whose fast kernel is wrong.
PLAIN = "plain kernels"


@dataclass(frozen=True)
class Repair:
    """A repair: `module` of `component`, by its dotted name, runs in `to` where `dtype` is wanted.

    The whole component where the name is empty. Dtypes by torch's names; `to` may also be
    `PLAIN`, for attention, and whatever else has a fast way and a plain one, the plain way.
    """

    component: str
    module: str
    to: str
    dtype: str

    @property
    def place(self) -> str:
        """Component and module, as one dotted name."""
        return ".".join(each for each in (self.component, self.module) if each)


@dataclass(frozen=True)
class FastPathChoice:
    """A fast path that was weighed for a component, and what came of it.

    `verdict` is ``certified`` or ``refused`` by its certificate, ``untried`` without one,
    ``pinned`` or ``off`` by the person who asked, ``avoided`` for a known issue, ``expected`` in a
    plan that nobody runs yet. `error` is relative to float32, `limit` what it may be, `gain` the
    plain path's time over its own. `despite` is the known issue that a pinned one is used with.
    """

    path: str
    verdict: str
    reason: str
    error: float | None = None
    limit: float | None = None
    gain: float | None = None
    despite: str | None = None


@dataclass(frozen=True)
class ComponentPlan:
    """One part of the model: what it is read from, where and in which precision it runs.

    `weight_bytes` is what its parameters take in that precision, `working_bytes` the forecast peak
    of everything else while it runs. With `offload` the parameters lie in the host's memory, or in
    their files if it `streams`; with `holders` above 1 so many ranks keep them between them. Then
    `resident_bytes` of them at most are on the device at any time. `remedies` are repairs that it
    has from the start. `paths` are the fast paths that it runs by (`everyframe.fast_paths`), None
    where nobody chose and torch does as it likes; `choices` say why, of these and of those that it
    does not run by.
    """

    name: str
    title: str
    stage: str
    source: str
    num_parameters: int
    device: str
    precision: Precision
    weight_bytes: int
    working_bytes: int
    offload: bool = False
    streams: bool = False
    resident_bytes: int | None = None
    remedies: tuple[Repair, ...] = ()
    paths: tuple[str, ...] | None = None
    choices: tuple[FastPathChoice, ...] = ()
    by_turns: bool = False
    holders: int = 1

    @property
    def held_bytes(self) -> int:
        """Bytes of its parameters that are on the device at once."""
        return self.weight_bytes if self.resident_bytes is None else self.resident_bytes

    @property
    def peak_bytes(self) -> int:
        """Forecast of the device's memory that this component needs while it is loaded."""
        return self.held_bytes + self.working_bytes


def peak_of(components: Iterable[ComponentPlan], copies: Mapping[str, int] | None = None) -> int:
    """What the largest stage needs: components are loaded one stage at a time.

    Those that share a stage are in memory together unless they come by turns, and work one after
    the other. `copies` says how often a component is there, and works, where several ranks have
    their memory in common; once, those that it does not name.
    """
    weights: dict[str, int] = {}
    working: dict[str, int] = {}
    for part in components:
        always, times = 0 if part.by_turns else part.held_bytes, (copies or {}).get(part.name, 1)
        weights[part.stage] = weights.get(part.stage, 0) + always * times
        most = (part.peak_bytes - always) * times
        working[part.stage] = max(working.get(part.stage, 0), most)
    return max(weights[stage] + working[stage] for stage in weights)


@dataclass(frozen=True)
class StagePlan:
    """What the dry run of a stage found.

    `working_bytes` is the peak beside the weights, `num_operations` those of one call, `operations`
    the multiplications and additions of all calls for one video; `seconds` are forecast where rates
    are known, loading counted in.
    """

    name: str
    component: str
    working_bytes: int
    num_operations: int
    operations: float
    seconds: float | None = None


@dataclass(frozen=True)
class Switches:
    """Torch's switches of whoever called: they hold for a pipeline in memory, and nobody sets them.

    `casts` are the kinds of devices on which autocast is on, with its dtype. `float32` says by
    operation how float32 is multiplied (``ieee``, ``tf32``, ``bf16``, or ``none``: as torch
    likes). `narrow_sums` may be kept in half precision. `attention` are the kernels allowed.
    """

    num_threads: int
    casts: tuple[tuple[str, str], ...] = ()
    float32: tuple[tuple[str, str], ...] = ()
    narrow_sums: tuple[str, ...] = ()
    attention: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """Everything that will happen, in the order of the stages.

    `clashes` are places where the dry run broke the rules of precision: such a plan can't run.
    `host_bytes` is what the host needs beside the device, `rates` where seconds come from, and
    `profile` the name of the made-up machine that this is for, None for the real one. With several
    devices, `division` is how they share the work, and components and stages are those of the rank
    with the most to do. `switches` are set for a model in memory alone, whose owner has chosen
    them; the plan of any other sets its own.
    """

    model: str
    family: str
    title: str
    settings: Settings
    device: DeviceFacts
    num_threads: int
    components: tuple[ComponentPlan, ...]
    to_fetch: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    obstacle: str | None = None
    stages: tuple[StagePlan, ...] = ()
    clashes: tuple[str, ...] = ()
    host_bytes: int = 0
    rates: str = ""
    profile: str | None = None
    division: ParallelPlan | None = None
    switches: Switches | None = None

    @property
    def num_operations(self) -> int:
        """Operations that were held against the rules of precision in the dry run; 0 without."""
        return sum(stage.num_operations for stage in self.stages)

    @property
    def seconds(self) -> float | None:
        """Forecast of one video from the first stage to the last; None where no rates are known."""
        seconds = [stage.seconds for stage in self.stages if stage.seconds is not None]
        return sum(seconds) if seconds else None

    def component(self, name: str) -> ComponentPlan:
        """The component of that name."""
        return next(part for part in self.components if part.name == name)

    @property
    def peak_bytes(self) -> int:
        """The largest stage, not the sum; see `peak_of`."""
        return peak_of(self.components)

    def to_json(self) -> dict[str, Any]:
        """Plain data for printing, events and records."""
        return asdict(self) | {"peak_bytes": self.peak_bytes}
