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


#: A running plan, as its consumer sees it: closing the generator ends the run.
Events: TypeAlias = Generator[Event, None, None]


@dataclass(frozen=True)
class Planned(Event):
    """The plan is made. Nothing is downloaded or loaded yet."""

    type: ClassVar[str] = "planned"
    plan: Plan


@dataclass(frozen=True)
class WeightsReady(Event):
    """All weights are on this disk and hashed. `record` reproduces the video."""

    type: ClassVar[str] = "ready"
    record: dict[str, Any] = field(repr=False, metadata={"bulky": True})


@dataclass(frozen=True)
class RunSaved(Event):
    """The run is saved in the folder `path`; ``everyframe resume RUN`` continues it."""

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
class StageDone(Event):
    """A stage is done and its components are freed."""

    type: ClassVar[str] = "stage_done"
    stage: str
    seconds: float


@dataclass(frozen=True)
class Note(Event):
    """Message for the user; the run continues.

    With `in_record` it is also in the record, under ``notes``, of the video with this `seed`, or of
    all videos if `seed` is None.
    """

    type: ClassVar[str] = "note"
    text: str
    in_record: bool = False
    seed: int | None = None


@dataclass(frozen=True)
class Repaired(Event):
    """The guard repaired a fault, or a memory fallback was applied.

    Attributes:
        stage: stage of the fault.
        step: step of that stage.
        component: component of the fault.
        module: module of the fault, by dotted name.
        operation: first operation whose result is not finite.
        cause: ``range`` (beyond the dtype's range), ``kernel`` (wrong kernel), ``formula`` (not
            finite in float32 either), ``unclear``, ``compiled`` (compiled code is wrong),
            ``blank`` (frames of one colour) or ``memory`` (out of memory).
        dtype: dtype of the operation.
        raised: module that runs in `to` from now on: `module`, or a parent whose parts must agree.
        to: its new dtype or path; with the cause ``memory``, the memory fallback.
        text: message for the user.
        seed: video that needed it; None for all videos.
    """

    type: ClassVar[str] = "repaired"
    stage: str
    step: int
    component: str
    module: str
    operation: str
    cause: str
    dtype: str
    raised: str
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

    `index` distinguishes the videos that one pipeline call makes with one seed.
    """

    type: ClassVar[str] = "frames"
    seed: int
    num_frames: int
    frames: Any = field(repr=False, metadata={"bulky": True})
    index: int | None = None


@dataclass(frozen=True)
class AudioDecoded(Event):
    """Audio of the video with this seed: float32 in -1..1, (channels, n), `rate` samples a second.

    It comes before the frames of its video.
    """

    type: ClassVar[str] = "sound"
    seed: int
    rate: int
    seconds: float
    samples: Any = field(repr=False, metadata={"bulky": True})
    index: int | None = None


@dataclass(frozen=True)
class Output(Event):
    """Output of an in-memory pipeline for this seed, in the format of ``output_type``.

    It comes after the frames; there are no frames for ``output_type="latent"``.
    """

    type: ClassVar[str] = "output"
    seed: int
    output: Any = field(repr=False, metadata={"bulky": True})


@dataclass(frozen=True)
class VideoDone(Event):
    """All frames of the video with this seed are decoded. `record` reproduces the video."""

    type: ClassVar[str] = "video_done"
    seed: int
    num_frames: int
    record: dict[str, Any] = field(repr=False)
    index: int | None = None


@dataclass(frozen=True)
class VideoWritten(Event):
    """The video's file or folder is complete on disk."""

    type: ClassVar[str] = "written"
    path: str
    seed: int
