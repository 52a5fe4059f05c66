"""Files of several videos whose clips alternate: whole, right, and one encoder at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from everyframe.core.errors import MediaError
from everyframe.core.events import FramesDecoded, VideoDone
from everyframe.engine.output_files import OutputFiles
from everyframe.media import write
from everyframe.media.read import read_video
from everyframe.media.write import VideoWriter

SEEDS = (5, 6, 7)


def clip(seed: int, number: int) -> np.ndarray:
    shape = (3, 16, 16, 3)
    return np.random.default_rng([seed, number]).integers(0, 256, shape).astype(np.float32) / 255


def events(num_clips: int) -> Iterator[FramesDecoded | VideoDone]:
    """As the engine has them: clip after clip, in each all seeds, and the ends with the last."""
    for number in range(num_clips):
        for seed in SEEDS:
            for piece in np.split(clip(seed, number), [1]):
                yield FramesDecoded(seed, len(piece), piece)
            if number == num_clips - 1:
                yield VideoDone(seed, 3 * num_clips, {"seed": seed})


@pytest.mark.parametrize("num_clips", [1, 2, 3])
def test_one_file_is_open_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_clips: int
) -> None:
    most = 0
    enter = VideoWriter.__enter__

    def counted(self: VideoWriter) -> VideoWriter:
        nonlocal most
        most = max(most, 1 + len(sink._open))
        return enter(self)

    monkeypatch.setattr(VideoWriter, "__enter__", counted)
    paths = {seed: f"{tmp_path}/{seed}/" for seed in SEEDS}
    with OutputFiles(paths, 8) as sink:
        for event in events(num_clips):
            if isinstance(event, FramesDecoded):
                sink.add(event)
            else:
                sink.finish(event)
    assert most == 1
    for seed, path in paths.items():
        whole = np.concatenate([clip(seed, number) for number in range(num_clips)])
        assert np.array_equal(read_video(path)[0], np.rint(whole * 255))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["5", "6", "7"]


def test_a_broken_run_leaves_nothing(tmp_path: Path) -> None:
    paths = {seed: f"{tmp_path}/{seed}.mp4" for seed in SEEDS}

    def run() -> None:
        with OutputFiles(paths, 8) as sink:
            for event in list(events(2))[:8]:
                assert isinstance(event, FramesDecoded)
                sink.add(event)
            raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        run()
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(write.tempfile, "TemporaryFile", full)
    waiting = write.FrameSpool(tmp_path / "clip.mp4")
    with pytest.raises(MediaError, match=r"can't be stored in .* No space left on device; free"):
        waiting.put(1, np.zeros((1, 2, 2, 3), np.uint8))
