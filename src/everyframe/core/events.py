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
    """The plan is settled; nothing was fetched or loaded yet."""

    type: ClassVar[str] = "planned"
    plan: Plan


@dataclass(frozen=True)
class WeightsReady(Event):
    """All files are on this disk and known by their hash: `record` is what makes it again."""

    type: ClassVar[str] = "ready"
    record: dict[str, Any] = field(repr=False, metadata={"bulky": True})


@dataclass(frozen=True)
class RunSaved(Event):
    """The run is saved in the folder `path`: ``everyframe resume RUN`` continues it."""

    type: ClassVar[str] = "kept"
    run: str
    path: str


@dataclass(frozen=True)
class StageStarted(Event):
    """A stage begins, for clip `clip` of `num_clips`; it has `num_steps` steps to do."""

    type: ClassVar[str] = "stage_started"
    stage: str
    num_steps: int
    clip: int = 0
    num_clips: int = 1


@dataclass(frozen=True)
class ComponentLoaded(Event):
    """A component's weights are in memory, `seconds` after the stage asked for them."""

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
    """A stage is over and what it had loaded is freed."""

    type: ClassVar[str] = "stage_done"
    stage: str
    seconds: float


@dataclass(frozen=True)
class Note(Event):
    """Something that the person should read, though the run continues.

    With `in_record` it is of the video with this seed, or of all of them where that is None, and
    stands in its record too, under ``notes``.
    """

    type: ClassVar[str] = "note"
    text: str
    in_record: bool = False
    seed: int | None = None


@dataclass(frozen=True)
class Repaired(Event):
    """A value that was not finite was caught, and a module raised in precision so that none is.

    In step `step` of `stage`, `operation` in `module` of `component` made it in `dtype`; `cause` is
    ``range``, ``kernel``, ``formula``, ``unclear``, ``compiled`` for a graph that is wrong where
    its block as it is written is right, or ``blank`` for frames of one colour. `raised` is what
    runs in `to` from now on: the module, or what is around it where its parts must agree.
    With the cause ``memory`` there was too little of it, and `to` is what was done so that less is
    needed.
    `seed` is that of the video that it was needed for, None where it was for all of them.
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
    """Finished frames of the video with this seed, float32 in 0..1, (T, H, W, 3), in order.

    `index` says which it is where one call of a pipeline makes several with one seed.
    """

    type: ClassVar[str] = "frames"
    seed: int
    num_frames: int
    frames: Any = field(repr=False, metadata={"bulky": True})
    index: int | None = None


@dataclass(frozen=True)
class AudioDecoded(Event):
    """The sound of the video with this seed, float32 in -1..1, (channels, n), `rate` a second.

    Comes before the frames that it belongs to.
    """

    type: ClassVar[str] = "sound"
    seed: int
    rate: int
    seconds: float
    samples: Any = field(repr=False, metadata={"bulky": True})
    index: int | None = None


@dataclass(frozen=True)
class Output(Event):
    """What a pipeline in memory gave for this seed, as it is: asked for by ``output_type``.

    Comes after the frames; of latents there are none.
    """

    type: ClassVar[str] = "output"
    seed: int
    output: Any = field(repr=False, metadata={"bulky": True})


@dataclass(frozen=True)
class VideoDone(Event):
    """All frames of the video with this seed came; `record` is what it takes to make it again."""

    type: ClassVar[str] = "video_done"
    seed: int
    num_frames: int
    record: dict[str, Any] = field(repr=False)
    index: int | None = None


@dataclass(frozen=True)
class VideoWritten(Event):
    """A file or folder is on disk, whole."""

    type: ClassVar[str] = "written"
    path: str
    seed: int
