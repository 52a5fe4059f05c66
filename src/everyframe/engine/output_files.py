"""Write frames to files as they arrive, one file per video, complete files only.

`everyframe.media.write` encodes files.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from everyframe.core.events import AudioDecoded, FramesDecoded, Preview, VideoDone
from everyframe.core.paths import replace_file
from everyframe.core.plan import Plan
from everyframe.media.audio import Audio
from everyframe.media.output_path import (
    OutputFormat,
    default_output,
    kind_of,
    number_path,
)
from everyframe.media.pixels import to_uint8
from everyframe.media.preview_picture import is_preview
from everyframe.media.write import FrameSpool, VideoWriter
from everyframe.planning.input_checks import check_output_of


def paths_for(plan: Plan, output: str | None) -> dict[int, str]:
    """Checked output path for each seed; ``clip-7.mp4``, ``clip-8.mp4`` for several.

    Raises:
        MediaError: the path or the size can't be written.
    """
    settings = plan.settings
    seeds = range(settings.seed, settings.seed + settings.num_videos)
    if output is None:
        ending = ".png" if settings.num_frames * settings.chain == 1 else ".mp4"
        paths = {
            seed: str(default_output(".", plan.model, settings.prompt, seed, ending=ending))
            for seed in seeds
        }
    elif settings.num_videos == 1:
        paths = {settings.seed: output}
    else:
        paths = {seed: number_path(output, seed) for seed in seeds}
    for path in paths.values():
        check_output_of(settings, path)
    return paths


def preview_path(output: str) -> Path:
    """The file of the previews of a video: ``clip.preview.jpg`` for ``clip.mp4`` or ``clip/``."""
    bare = output.rstrip("/" + os.sep)
    is_folder = kind_of(output) is OutputFormat.FRAMES
    stem = bare if is_folder else os.path.splitext(bare)[0]
    return Path(f"{stem}.preview.jpg")


class OutputFiles:
    """Output files of a run; as a context manager it leaves no unfinished file behind.

    One file is open at a time. With chained clips of several videos, clips alternate; frames of the
    other videos wait on disk.
    """

    def __init__(self, paths: Mapping[int, str], fps: float) -> None:
        self._paths = paths
        self._fps = fps
        self._open: dict[int, VideoWriter] = {}
        self._num_frames = dict.fromkeys(paths, 0)
        self._records: dict[int, Mapping[str, Any]] = {}
        self._audio: dict[int, Audio] = {}
        self._previews: set[Path] = set()
        self._has_previews = True
        self._waiting = FrameSpool(next(iter(paths.values())))

    def __enter__(self) -> OutputFiles:
        return self

    def show_preview(self, event: Preview) -> str | None:
        """Write the preview next to the video that it is of, over the one before.

        A full disk must not end the run, and somebody else's file of that name stays: previews
        then end, and a note is returned.
        """
        path = preview_path(self._paths[event.seed])
        if not self._has_previews:
            return None
        try:
            if path not in self._previews and path.exists() and not is_preview(path):
                raise FileExistsError(errno.EEXIST, "a file of that name is no preview")
            replace_file(path, event.image)
        except OSError as error:
            self._has_previews = False
            return f"no preview is written to {path} ({error.strerror}); the run continues"
        self._previews.add(path)
        return None

    def add(self, event: FramesDecoded) -> None:
        """Append finished frames to the video of their seed. Raises `NumericsError` for NaN."""
        seed = event.seed
        piece = to_uint8(event.frames, first_index=self._num_frames[seed])
        self._num_frames[seed] += event.num_frames
        if self._open and seed not in self._open:
            self._waiting.put(seed, piece)
        else:
            self._writer(seed).add(piece)

    def _writer(self, seed: int) -> VideoWriter:
        """The open file of that seed, after writing frames that waited for it."""
        if seed not in self._open:
            # The record is read after the last frame, once `finish` has set it.
            writer = VideoWriter(self._paths[seed], self._fps, lambda: self._records[seed])
            self._open[seed] = writer.__enter__()
            for piece in self._waiting.take(seed):
                writer.add(piece)
        return self._open[seed]

    def add_audio(self, event: AudioDecoded) -> str | None:
        """Store the audio of a seed's video; return a note if its file format has no audio."""
        path = self._paths[event.seed]
        if kind_of(path) is not OutputFormat.MP4:
            return f"there is sound, and {path} can't hold it; an .mp4 can"
        self._audio[event.seed] = Audio(event.samples, event.rate)
        return None

    def finish(self, event: VideoDone) -> str:
        """Complete the video of this seed with its record; return its path as given."""
        self._records[event.seed] = event.record
        writer = self._writer(event.seed)
        if event.seed in self._audio:
            writer.add_audio(self._audio.pop(event.seed))
        self._open.pop(event.seed).__exit__(None, None, None)
        self._remove_preview(preview_path(self._paths[event.seed]))
        return self._paths[event.seed]

    def _remove_preview(self, path: Path) -> None:
        """Remove a preview of ours: the video is there, or never comes."""
        if path in self._previews:
            self._previews.remove(path)
            path.unlink(missing_ok=True)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # A stream without its last event is a bug; its file is removed too.
        broken = error or AssertionError("frames came without the end of their video")
        unfinished = list(self._open.values())
        self._open.clear()
        self._waiting.close()
        for path in [*self._previews]:
            self._remove_preview(path)
        for writer in unfinished:
            writer.__exit__(type(broken), broken, trace)
        if unfinished and error is None:
            raise broken
