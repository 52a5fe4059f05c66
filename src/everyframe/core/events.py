"""Events of a run: frozen values, yielded in the order in which they happen.

`everyframe.stream` yields them. The command line draws its progress bar from them and, with
``--json``, prints each as one line. Arrays never go into the JSON.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeAlias

from everyframe.core.plan import Plan


@dataclass(frozen=True)
class Event:
    """Base of all events."""

    type: ClassVar[str] = "event"

    def to_json(self) -> dict[str, Any]:
        """Plain data of the event: its type, and every field that is not marked as bulky."""
        shown = [part.name for part in fields(self) if not part.metadata.get("bulky")]
        values = {name: getattr(self, name) for name in shown}
        plain = {k: v.to_json() if hasattr(v, "to_json") else v for k, v in values.items()}
        return {"type": self.type, **plain}


#: Stages whose steps are those of a sampler; a pipeline of diffusers is one stage.
DENOISING_STAGES = ("denoise", "first picture", "pipeline")

#: A running plan, as its consumer sees it: closing the generator ends the run.
Events: TypeAlias = Generator[Event, None, None]


@dataclass(frozen=True)
class Planned(Event):
    """The plan is made; nothing is fetched or loaded yet."""

    type: ClassVar[str] = "planned"
    plan: Plan


@dataclass(frozen=True)
class WeightsReady(Event):
    """All weight files are on this disk; `record` has their hashes and repeats the run."""

    type: ClassVar[str] = "ready"
    record: dict[str, Any] = field(repr=False, metadata={"bulky": True})


@dataclass(frozen=True)
class RunSaved(Event):
    """Progress is saved in the folder `path`; ``everyframe resume RUN`` continues it."""

    type: ClassVar[str] = "kept"
    run: str
    path: str


@dataclass(frozen=True)
class StageStarted(Event):
    """A stage of `num_steps` steps begins, for clip `clip` (from 0) of `num_clips`."""

    type: ClassVar[str] = "stage_started"
    stage: str
    num_steps: int
    clip: int = 0
    num_clips: int = 1


@dataclass(frozen=True)
class ComponentLoaded(Event):
    """The weights of a component are in memory. Loading took `seconds`."""

    type: ClassVar[str] = "loaded"
    component: str
    seconds: float


@dataclass(frozen=True)
class Step(Event):
    """Step `step` (from 1) of `num_steps` of a stage is done, for the video with this seed."""

    type: ClassVar[str] = "step"
    stage: str
    step: int
    num_steps: int
    seed: int
    seconds: float


@dataclass(frozen=True)
class Preview(Event):
    """A small picture of the video with this seed, as the model predicts it after a step.

    `preview` asks for it; it follows the `Step` of every few steps.

    Attributes:
        step: finished steps of this video, of `num_steps`.
        width, height: size in pixels; the longer side has 256.
        image: one frame, from the middle of the clip, as a JPEG file of at most 20,000 bytes.
    """

    type: ClassVar[str] = "preview"
    seed: int
    step: int
    num_steps: int
    width: int
    height: int
    image: bytes = field(repr=False, metadata={"bulky": True})


@dataclass(frozen=True)
class StageDone(Event):
    """A stage is done and its components are freed.

    `peak_bytes` is the peak memory of its process on the device so far; None where it is unknown.
    """

    type: ClassVar[str] = "stage_done"
    stage: str
    seconds: float
    peak_bytes: int | None = None


@dataclass(frozen=True)
class Note(Event):
    """A message for the user; the run continues.

    With `in_record` it is also under ``notes`` in the record of the video with this seed, or of all
    videos if `seed` is None.
    """

    type: ClassVar[str] = "note"
    text: str
    in_record: bool = False
    seed: int | None = None


@dataclass(frozen=True)
class ErrorEstimated(Event):
    """A lossy method's own error estimate for the video with this seed, relative to its latents.

    Attributes:
        error: sum over the computed steps.
        limit: largest one for the quality budget; None if nothing was calibrated.
        is_over: whether it passed the limit, so that later steps were exact.
    """

    type: ClassVar[str] = "error_estimated"
    seed: int
    error: float
    limit: float | None = None
    is_over: bool = False


@dataclass(frozen=True)
class Repaired(Event):
    """A repair: a value was not finite, and a module runs in a wider dtype from now on.

    Attributes:
        step: step of `stage` in which it happened.
        module: module of `component` whose `operation` made the value, in `dtype`.
        cause: ``range``, ``kernel``, ``formula``, ``unclear``, ``compiled`` (a compiled graph is
            wrong and its eager block is right), ``blank`` (frames of one colour), ``coarse`` (a
            decoder in bfloat16 is too far from float32), or ``memory`` (out of memory).
        target: the repaired module, or the one around it if its parts must have one dtype.
        to: what `target` runs in; with the cause ``memory`` the memory fallback.
        seed: seed of the video that needed it; None if all of them do.
    """

    type: ClassVar[str] = "repaired"
    stage: str
    step: int
    component: str
    module: str
    operation: str
    cause: str
    dtype: str
    target: str
    to: str
    text: str
    seed: int | None = None


def event_of(data: Mapping[str, Any]) -> Event:
    """Rebuild a `Note` or `Repaired` from its `to_json`, as one rank sends it to another."""
    kind = next(each for each in (Note, Repaired) if each.type == data["type"])
    return kind(**{name: value for name, value in data.items() if name != "type"})


@dataclass(frozen=True)
class FramesDecoded(Event):
    """Next frames of the video with this seed: float32 in 0..1, (T, H, W, 3).

    `index` numbers the videos if one pipeline call makes several with one seed.
    """

    type: ClassVar[str] = "frames"
    seed: int
    num_frames: int
    frames: Any = field(repr=False, metadata={"bulky": True})
    index: int | None = None


@dataclass(frozen=True)
class AudioDecoded(Event):
    """Sound of the video with this seed, float32 in -1..1, (channels, n), `rate` values a second.

    It comes before its frames.
    """

    type: ClassVar[str] = "audio"
    seed: int
    rate: int
    seconds: float
    samples: Any = field(repr=False, metadata={"bulky": True})
    index: int | None = None


@dataclass(frozen=True)
class Output(Event):
    """Output of a pipeline in memory for this seed, unchanged; ``output_type`` asks for it.

    It comes after the frames; latents have none.
    """

    type: ClassVar[str] = "output"
    seed: int
    output: Any = field(repr=False, metadata={"bulky": True})


@dataclass(frozen=True)
class VideoDone(Event):
    """All frames of the video with this seed were yielded; its `record` repeats it."""

    type: ClassVar[str] = "video_done"
    seed: int
    num_frames: int
    record: dict[str, Any] = field(repr=False)
    index: int | None = None


@dataclass(frozen=True)
class VideoWritten(Event):
    """A file or folder is complete on disk."""

    type: ClassVar[str] = "written"
    path: str
    seed: int
