"""Files of a finished job: videos with their records, a thumbnail and a spritesheet.

They are written to a temporary folder, which is renamed when all of them are on disk; see
`DataFolder.publish`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from everyframe.core.events import AudioDecoded, Event, FramesDecoded, VideoDone
from everyframe.core.plan import Plan
from everyframe.engine.output_files import OutputFiles
from everyframe.media.pixels import to_uint8
from everyframe.server.data_folder import DataFolder

#: File names in the folder of a finished job. Videos after the first are ``video-2.mp4``, ….
VIDEO, THUMBNAIL, SPRITESHEET = "video.mp4", "thumbnail.webp", "spritesheet.webp"
#: Longest side of the thumbnail, and of each picture of the spritesheet, in pixels.
_THUMBNAIL_SIDE, _SPRITE_SIDE = 512, 192
#: Pictures of the spritesheet, in rows of `_COLUMNS`.
_NUM_SPRITES, _COLUMNS = 16, 4
_QUALITY = 80


class JobOutputs:
    """Files of one attempt of a job; a context manager that deletes them unless published."""

    def __init__(self, folder: DataFolder, id: str, plan: Plan) -> None:  # noqa: A002
        self._folder = folder
        self._id = id
        place, settings = folder.new_video(id), plan.settings
        seeds = range(settings.seed, settings.seed + settings.num_videos)
        names = [VIDEO, *(f"video-{number}.mp4" for number in range(2, len(seeds) + 1))]
        self.files = dict(zip(seeds, names, strict=True))
        self._place = place
        paths = {seed: str(place / name) for seed, name in self.files.items()}
        self._output = OutputFiles(paths, settings.fps)
        self._pictures = _Pictures(settings.seed, settings.num_frames * settings.chain)
        self._left = set(seeds)
        self._num_expected = settings.num_frames * settings.chain * settings.num_videos
        self.num_frames = 0

    def __enter__(self) -> JobOutputs:
        self._output.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # Published files are gone from there; of others nothing is wanted, as the run is kept.
        self._output.__exit__(kind, error, trace)
        self._folder.discard(self._id)

    def take(self, event: Event) -> str | None:
        """Write the frames or audio of an event; returns a note if the audio can't be stored."""
        if isinstance(event, FramesDecoded):
            self._output.add(event)
            self._pictures.add(event)
            self.num_frames += event.num_frames
        elif isinstance(event, AudioDecoded):
            return self._output.add_audio(event)
        elif isinstance(event, VideoDone):
            self._output.finish(event)
            self._left.discard(event.seed)
        return None

    def has_all_with(self, event: FramesDecoded) -> bool:
        """Whether the job has all of its frames with this event."""
        return self.num_frames + event.num_frames >= self._num_expected

    def is_last(self, event: VideoDone) -> bool:
        """Whether this video completes the job."""
        return self._left == {event.seed}

    def publish(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Publish the files with these fields of the job; returns all fields of the finished job.

        Raises `OSError`.
        """
        assert not self._left
        self._pictures.write(self._place)
        report = {**fields.get("report", {}), "files": list(self.files.values())}
        file = self._folder.video(self._id) / VIDEO
        fields = {**fields, "report": report, "file": str(file.relative_to(self._folder.path))}
        self._folder.publish(self._id, fields)
        return fields


class _Pictures:
    """Thumbnail and spritesheet of the first video, from its frames as they arrive."""

    def __init__(self, seed: int, num_frames: int) -> None:
        self._seed = seed
        number = min(num_frames, _NUM_SPRITES)
        self._wanted = {round(at) for at in np.linspace(0, max(num_frames - 1, 0), number)}
        self._middle = num_frames // 2
        self._next = 0
        self._sprites: list[Image.Image] = []
        self._thumbnail: Image.Image | None = None

    def add(self, event: FramesDecoded) -> None:
        if event.seed != self._seed or event.index:
            return
        for number, frame in enumerate(event.frames, start=self._next):
            if number in self._wanted:
                self._sprites.append(_scale(frame, _SPRITE_SIDE))
            if number == self._middle or self._thumbnail is None:
                self._thumbnail = _scale(frame, _THUMBNAIL_SIDE)
        self._next += event.num_frames

    def write(self, place: Path) -> None:
        assert self._thumbnail is not None, "frames came"
        self._thumbnail.save(place / THUMBNAIL, quality=_QUALITY)
        width, height = self._sprites[0].size
        columns = min(_COLUMNS, len(self._sprites))
        rows = -(-len(self._sprites) // columns)
        sheet = Image.new("RGB", (columns * width, rows * height))
        for number, sprite in enumerate(self._sprites):
            sheet.paste(sprite, (number % columns * width, number // columns * height))
        sheet.save(place / SPRITESHEET, quality=_QUALITY)


def _scale(frame: Any, side: int) -> Image.Image:
    picture = Image.fromarray(to_uint8(np.asarray(frame)[None])[0])
    picture.thumbnail((side, side))
    return picture
