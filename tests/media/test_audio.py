"""Sound in an mp4, read back by FFmpeg: there, as long, as loud, at the same pitch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from everyframe.core.errors import InputError, MediaError, NumericsError
from everyframe.media.audio import Audio
from everyframe.media.mp4 import read_audio
from everyframe.media.video import Video
from everyframe.media.write import VideoWriter

FRAMES = np.zeros((24, 16, 16, 3), np.uint8)


def tone(rate: int, channels: int, pitch: float = 440.0, seconds: float = 1.0) -> Audio:
    time = np.arange(int(rate * seconds)) / rate
    wave = 0.5 * np.sin(2 * np.pi * pitch * time)
    return Audio(np.stack([wave] * channels).astype(np.float32), rate)


def heard(path: Path) -> tuple[np.ndarray[Any, Any], int]:
    with av.open(str(path)) as container:
        stream = container.streams.audio[0]
        pieces = [frame.to_ndarray() for frame in container.decode(stream)]
        return np.concatenate(pieces, axis=1), int(stream.rate)


@pytest.mark.parametrize(("rate", "channels"), [(16000, 2), (24000, 1), (48000, 2), (160, 2)])
def test_sound_comes_back_from_the_file(tmp_path: Path, rate: int, channels: int) -> None:
    sound = tone(rate, channels, pitch=rate / 40)
    video = Video(FRAMES, 24, {"a": 1}, sound)
    assert video.sound is video.audio, "its earlier name"
    path = video.save(tmp_path / "clip.mp4")
    samples, found_rate = heard(path)
    # 160 a second is none of AAC's rates: it is resampled to the lowest.
    assert found_rate == (rate if rate > 160 else 8000)
    assert len(samples) == channels
    # AAC works in blocks of 1024 samples and begins with one of silence.
    assert abs(samples.shape[1] / found_rate - 1.0) < 3 * 1024 / found_rate
    spectrum = np.abs(np.fft.rfft(samples[0]))
    pitch = spectrum.argmax() * found_rate / samples.shape[1]
    assert pitch == pytest.approx(rate / 40, abs=2 * found_rate / samples.shape[1])
    # A lossy code at its default bit rate: a tone's level within a tenth.
    middle = samples[0, samples.shape[1] // 4 : -samples.shape[1] // 4]
    assert middle.std() == pytest.approx(0.5 / 2**0.5, rel=0.1)


def test_frames_and_record_are_as_without_sound(tmp_path: Path) -> None:
    video = Video(FRAMES, 24, {"a": 1}, tone(16000, 2))
    loaded = Video.load(video.save(tmp_path / "clip.mp4"))
    assert loaded.frames.shape == FRAMES.shape
    assert loaded.record["a"] == 1


@pytest.mark.parametrize("name", ["clip.gif", "clip.webp", "frames/"])
def test_other_files_have_no_room_for_it(tmp_path: Path, name: str) -> None:
    path = f"{tmp_path}/{name}"
    Video(FRAMES, 24, {}, tone(16000, 2)).save(path)  # as the docstring of Video says
    with VideoWriter(path, 24) as writer:
        writer.add(FRAMES)
        assert not writer.holds_audio
        with pytest.raises(MediaError, match=r"can't hold sound; an \.mp4 can"):
            writer.add_audio(tone(16000, 2))


def test_sound_of_an_unknown_codec_is_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    Video(FRAMES, 24, {}, tone(16000, 2)).save(path, sidecar=False)
    path.write_bytes(path.read_bytes().replace(b"mp4a", b"xxxx").replace(b"esds", b"xxxx"))
    with pytest.raises(MediaError, match=r"sound of .*clip.mp4' can't be decoded \(its codec"):
        read_audio(path, 1.0)


def test_what_is_no_sound() -> None:
    with pytest.raises(InputError, match="one channel or two"):
        Audio(np.zeros((6, 10), np.float32), 16000)
    with pytest.raises(InputError, match="float32"):
        Audio(np.zeros((2, 10), np.int16), 16000)
    with pytest.raises(NumericsError, match="not finite"):
        Audio(np.full((1, 10), np.nan, np.float32), 16000)
    with pytest.raises(InputError, match="rate"):
        Audio(np.zeros((1, 10), np.float32), 0)
