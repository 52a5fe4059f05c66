"""Execution plan: the resolved request, and device and precision of each component.

Plans are frozen and printable. Only `everyframe.planning.resolve` makes them, without loading or
fetching anything; `everyframe.engine` runs them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from everyframe.core.facts import DeviceFacts
from everyframe.core.parallel_plan import ParallelPlan
from everyframe.core.quality import QualityPlan, SamplingMethod


@dataclass(frozen=True)
class Settings:
    """Resolved request.

    Attributes:
        prompt: empty for a model without prompts.
        height: pixels; `width` likewise.
        num_frames: frames of one clip.
        nominal_size: (height, width) of a size by name, for a model that is conditioned on it and
            whose grid misses it (240p is 240x426 to Open-Sora 1.2, which makes 240x424).
        nominal_length: likewise the `num_frames` that the model is conditioned on.
        own_choices: those of height, width, num_frames and num_inference_steps that the request
            left open and that are not passed to the model.
        given_frames: names of the options that give conditioning frames.
        given_forms: by option name, the kind of conditioning frames that pass through unchanged.
        fit: how images are brought to the size (``crop``, ``pad``, ``stretch``, ``cover``); None if
            the family wants them unchanged.
        options: values of the family's own options, by flag name.
        savings: memory savings that the resolver chose, by the family's own names.
        method: lossy sampling method; None computes every step.
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
    method: SamplingMethod | None = None

    @property
    def num_denoiser_calls(self) -> float:
        """Steps in which the denoiser is computed; a share of one where a part of it is."""
        steps = self.num_inference_steps
        return steps if self.method is None else self.method.num_calls(steps)

    @property
    def conditioned_size(self) -> tuple[int, int]:
        """(height, width) that the model is conditioned on: the nominal size if there is one."""
        return self.nominal_size or (self.height, self.width)

    @property
    def conditioned_length(self) -> int:
        """Frames that the model is conditioned on: the nominal length if there is one."""
        return self.nominal_length or self.num_frames

    def option(self, name: str, *otherwise: Any) -> Any:
        """Resolved value of a family's own option, or `otherwise` if it has none."""
        values = dict(self.options)
        return values.get(name, *otherwise) if otherwise else values[name]

    def with_option(self, name: str, value: Any) -> Settings:
        """Copy of the settings with another value of one of the family's own options."""
        return replace(self, options=(*dict(self.options, **{name: value}).items(),))

    def saving(self, name: str, otherwise: int) -> int:
        """Value of a memory saving, or `otherwise` if the resolver chose none."""
        return dict(self.savings).get(name, otherwise)

    def with_saving(self, name: str, value: int) -> Settings:
        """Copy of the settings with one more memory saving."""
        return replace(self, savings=(*dict(self.savings, **{name: value}).items(),))


#: `Precision.weight_dtype` of layers whose weights stay in the blocks of a GGUF file.
PACKED = "gguf"


@dataclass(frozen=True)
class Precision:
    """Dtypes of one component, by torch's names.

    Attributes:
        parameters: storage dtype of the parameters.
        compute: dtype of the computation.
        islands: modules that stay in float32 or wider.
        weight_dtype: storage of linear layers' weights (``int8``, ``fp8``, ``gguf``), or the kind
            of their products (`core.quality.PRODUCTS`); empty for `parameters`.
    """

    parameters: str
    compute: str
    islands: tuple[str, ...] = ()
    weight_dtype: str = ""

    def __str__(self) -> str:
        return (
            f"{self.compute} with {self.weight_dtype} weights"
            if self.weight_dtype
            else self.compute
        )


#: Everything in float32.
FLOAT32 = Precision("float32", "float32")

#: Repair target of a module whose fast kernel gives wrong results.
PLAIN = "plain kernels"


@dataclass(frozen=True)
class Repair:
    """Precision repair: `module` of `component` runs in `to` instead of `dtype`.

    Attributes:
        component: name of the component.
        module: dotted name; empty for the whole component.
        to: torch's name of a dtype, or `PLAIN` for the plain kernel of a module with a fast one,
            such as attention.
        dtype: torch's name of the planned dtype.
    """

    component: str
    module: str
    to: str
    dtype: str

    @property
    def place(self) -> str:
        """Component and module as one dotted name."""
        return ".".join(each for each in (self.component, self.module) if each)


@dataclass(frozen=True)
class FastPathChoice:
    """Decision about one fast path for a component.

    Attributes:
        verdict: ``certified`` or ``refused`` by its certificate, ``untried`` without one,
            ``pinned`` or ``off`` by the user, ``avoided`` for a known issue, ``expected`` in a plan
            that is not run yet.
        error: error relative to float32.
        limit: largest accepted error.
        gain: time of the plain path over its own.
        despite: the known issue that a pinned path is used in spite of.
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
    """Source, placement and precision of one component.

    Attributes:
        weight_bytes: bytes of its parameters in that precision.
        working_bytes: forecast peak of everything else while it runs.
        block_offload: the parameters lie in host memory, or in their files if it `from_disk`.
        resident_bytes: largest number of weight bytes on the device, with `block_offload` or weight
            sharding.
        repairs: repairs that it has from the start.
        fast_paths: fast paths that it runs by (`everyframe.fast_paths`); None if torch chooses.
        choices: decisions about these and the rejected fast paths.
        model_offload: on the device only while it computes, in host memory while others of its
            stage do.
        num_weight_shards: ranks that its weights are sharded over; 1 without weight sharding.
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
    block_offload: bool = False
    from_disk: bool = False
    resident_bytes: int | None = None
    repairs: tuple[Repair, ...] = ()
    fast_paths: tuple[str, ...] | None = None
    choices: tuple[FastPathChoice, ...] = ()
    model_offload: bool = False
    num_weight_shards: int = 1

    @property
    def on_device_bytes(self) -> int:
        """Bytes of its parameters that are on the device at once."""
        return self.weight_bytes if self.resident_bytes is None else self.resident_bytes

    @property
    def peak_bytes(self) -> int:
        """Forecast of the device memory that the component needs while it is loaded."""
        return self.on_device_bytes + self.working_bytes


def peak_of(components: Iterable[ComponentPlan], copies: Mapping[str, int] | None = None) -> int:
    """Forecast device memory of the largest stage; components are loaded one stage at a time.

    Components of one stage are in memory together unless they take turns, and compute one after
    the other. `copies` counts the instances of a component where several ranks share one memory;
    unlisted components count once.
    """
    weights: dict[str, int] = {}
    working: dict[str, int] = {}
    for part in components:
        always, times = (
            0 if part.model_offload else part.on_device_bytes,
            (copies or {}).get(part.name, 1),
        )
        weights[part.stage] = weights.get(part.stage, 0) + always * times
        most = (part.peak_bytes - always) * times
        working[part.stage] = max(working.get(part.stage, 0), most)
    return max(weights[stage] + working[stage] for stage in weights)


@dataclass(frozen=True)
class StagePlan:
    """Dry-run result of one stage.

    Attributes:
        working_bytes: peak without the weights.
        num_operations: operations of one call.
        operations: multiplications and additions of all calls for one video.
        seconds: forecast, loading included; None without known rates.
    """

    name: str
    component: str
    working_bytes: int
    num_operations: int
    operations: float
    seconds: float | None = None


@dataclass(frozen=True)
class Switches:
    """Torch switches of the caller: an in-memory pipeline runs with them unchanged.

    Attributes:
        num_threads: CPU threads.
        casts: (device type, dtype) for each device type with autocast on.
        float32: (operation, precision of float32 products): ``ieee``, ``tf32``, ``bf16``, or
            ``none`` for torch's choice.
        narrow_sums: operations that may accumulate in half precision.
        attention: allowed attention kernels.
    """

    num_threads: int
    casts: tuple[tuple[str, str], ...] = ()
    float32: tuple[tuple[str, str], ...] = ()
    narrow_sums: tuple[str, ...] = ()
    attention: tuple[str, ...] = ()


@dataclass(frozen=True)
class LoraPlan:
    """One LoRA of a plan.

    Attributes:
        file: name of its file, without folders.
        strength: factor of the whole change.
        components: (name of a component, number of its parameters that change).
    """

    file: str
    strength: float
    components: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        where = ", ".join(f"{number} tensors of {name}" for name, number in self.components)
        return f"{self.file}, strength {self.strength:g}: {where or 'no tensors'}"


@dataclass(frozen=True)
class PreviewPlan:
    """Previews of a run.

    Attributes:
        interval: steps from one to the next.
        source: what turns latents into pictures.
        decoder: file or folder of a tiny autoencoder; None for a linear map.
    """

    interval: int
    source: str
    decoder: str | None = None


@dataclass(frozen=True)
class BatchPlan:
    """Videos of several requests that a server computes in one step.

    Attributes:
        num_videos: most at once; 1 where it does not pay.
        why: what was measured, or what is against it.
        gain: videos a second over one by one, measured; None before the first batch.
    """

    num_videos: int
    why: str
    gain: float | None = None


@dataclass(frozen=True)
class Plan:
    """Everything that a run does, in the order of the stages.

    Attributes:
        components: with several devices, those of the rank with the most to do; `stages` likewise.
        dtype_errors: places where the dry run broke the precision rules; such a plan cannot run.
        host_bytes: host memory needed beside the device's.
        rates: source of the throughput behind `seconds`.
        profile: name of the machine profile; None for the real machine.
        parallel: parallel layout; None on one device.
        switches: torch switches of an in-memory model, chosen by its owner; other plans set their
            own.
        loras: LoRAs merged into the weights as they are loaded, in order.
        quality: choice for a quality budget; None for exact.
        preview: how previews are made; None without them.
        batch: what a server may do with several requests of this plan; None if it has no batches.
    """

    model: str
    family: str
    title: str
    settings: Settings
    device: DeviceFacts
    num_threads: int
    components: tuple[ComponentPlan, ...]
    downloads: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    infeasible: str | None = None
    stages: tuple[StagePlan, ...] = ()
    dtype_errors: tuple[str, ...] = ()
    host_bytes: int = 0
    rates: str = ""
    profile: str | None = None
    parallel: ParallelPlan | None = None
    switches: Switches | None = None
    loras: tuple[LoraPlan, ...] = ()
    quality: QualityPlan | None = None
    preview: PreviewPlan | None = None
    batch: BatchPlan | None = None

    @property
    def num_operations(self) -> int:
        """Operations that the dry run checked against the precision rules; 0 without a dry run."""
        return sum(stage.num_operations for stage in self.stages)

    @property
    def seconds(self) -> float | None:
        """Forecast time of one video, first stage to last; None without known rates."""
        seconds = [stage.seconds for stage in self.stages if stage.seconds is not None]
        return sum(seconds) if seconds else None

    def component(self, name: str) -> ComponentPlan:
        """Component of that name."""
        return next(each for each in self.components if each.name == name)

    @property
    def peak_bytes(self) -> int:
        """Forecast device memory of the largest stage, not the sum; see `peak_of`."""
        return peak_of(self.components)

    def to_json(self) -> dict[str, Any]:
        """Plain data for printing, events and records."""
        return asdict(self) | {"peak_bytes": self.peak_bytes}
