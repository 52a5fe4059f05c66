"""A small file is not read as a large one: sizes are asked before pixels."""

from __future__ import annotations

import struct
import tracemalloc
import zlib
from fractions import Fraction
from io import BytesIO
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from everyframe.core.errors import InputError, MediaError
from everyframe.engine.records.recorded_request import record_in
from everyframe.media import limits
from everyframe.media.frame_source import open_frames
from everyframe.media.images import read_animation, read_folder
from everyframe.media.mp4 import iter_frames, read_audio, read_frames
from everyframe.media.read import read_image, read_video
from everyframe.media.record import embedded_record, read_record
from everyframe.media.write import write
from helpers.hostile_videos import larger_than_its_header, with_sound

FEW = 50_000_000  # bytes that a refusal may take


def chunk(name: bytes, data: bytes) -> bytes:
    body = name + data
    return len(data).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")


def png(path: Path, width: int, height: int, *more: bytes) -> Path:
    """A png of that size with a line of pixels, as far as its header goes."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    data = chunk(b"IDAT", zlib.compress(bytes(3 * width + 1)))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + head + b"".join(more) + data + chunk(b"IEND", b""))
    return path


def long_gif(path: Path) -> Path:
    """Three frames of a megapixel, the last for eleven minutes."""
    frames = [Image.new("P", (1000, 1000), number) for number in range(3)]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=[20, 20, 655_350])
    assert path.stat().st_size < 20_000
    return path


@pytest.mark.parametrize("size", [(30_000, 30_000), (2**31 - 1, 1), (200_000_000, 1)])
def test_a_picture_of_too_many_pixels(tmp_path: Path, size: tuple[int, int]) -> None:
    path = png(tmp_path / "a.png", *size) if size[0] < 10**6 else tmp_path / "a.png"
    if size[0] >= 10**6:
        head = chunk(b"IHDR", struct.pack(">IIBBBBB", *size, 8, 2, 0, 0, 0))
        path.write_bytes(b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", b"") + chunk(b"IEND", b""))
    tracemalloc.start()
    for read in (read_image, read_video, lambda name: open_frames(name, what="mask")):
        with pytest.raises(MediaError, match=r"too large|exceeds limit"):
            read(path)
    assert tracemalloc.get_traced_memory()[1] < FEW
    tracemalloc.stop()


def test_limits_do_not_hang_on_pillows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many programs turn Pillow's own off."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    path = png(tmp_path / "a.png", 30_000, 30_000)
    for read in (read_image, read_animation, lambda name: open_frames(name, what="mask")):
        with pytest.raises(MediaError, match="30000x30000 pixels; at most"):
            read(path)


def test_a_frame_that_is_shown_for_long(tmp_path: Path) -> None:
    path = long_gif(tmp_path / "a.gif")
    tracemalloc.start()
    with pytest.raises(MediaError, match="too long for its size: 327"):
        read_video(path)
    assert tracemalloc.get_traced_memory()[1] < FEW
    tracemalloc.stop()


def test_a_record_that_promises_many_frames(tmp_path: Path) -> None:
    path = tmp_path / "a.gif"
    record = b'{"schema": "everyframe.record/1", "fps": "24", "num_frames": 999999}'
    frames = [Image.new("P", (200, 200), number) for number in range(2)]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=20, comment=record)
    with pytest.raises(MediaError, match="too long for its size: 999999 frames of 200x200"):
        read_video(path)


def test_a_folder_and_a_video_of_too_many_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MOST_BYTES", 5 * 64 * 64 * 3)
    folder = tmp_path / "frames"
    folder.mkdir()
    for number in range(6):
        Image.new("RGB", (64, 64)).save(folder / f"frame_{number:05d}.png")
    with pytest.raises(MediaError, match="6 frames of 64x64"):
        read_folder(folder, Fraction(8))
    path = tmp_path / "a.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=8)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        for _ in range(6):
            frame = av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    with pytest.raises(MediaError, match="6 frames of 64x64"):
        read_frames(path)
    assert len(read_frames(path, (32, 32))[0]) == 6
    monkeypatch.setattr(limits, "MOST_PIXELS", 64 * 63)
    with pytest.raises(MediaError, match="64x64 pixels"):
        next(iter_frames(path))


@pytest.mark.parametrize("source", ["a file", "bytes"])
def test_a_frame_that_is_larger_than_its_header_says_is_not_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """FFmpeg decodes it when it opens the file, to find the size: 0x0 where it could not."""
    path = larger_than_its_header(tmp_path / "a.avi", 256)
    opened = path if source == "a file" else BytesIO(path.read_bytes())
    with limits.open_video(opened, 256 * 255) as container:
        stream = container.streams.video[0]
        assert (stream.width, stream.height) == (0, 0)
        with pytest.raises(av.FFmpegError):
            next(container.decode(stream))
    monkeypatch.setattr(limits, "MOST_PIXELS", 256 * 255)
    with pytest.raises(MediaError, match=r"frame 0 can't be decoded \(.*larger than 65,280 pixels"):
        next(iter_frames(path))
    monkeypatch.setattr(limits, "MOST_PIXELS", 256 * 256)
    assert next(iter_frames(path)).shape == (256, 256, 3)


def test_sound_of_hours_in_no_time_is_not_held(tmp_path: Path) -> None:
    """92 seconds of it in 20 kB, all of second 0; a longer one had gigabytes."""
    path = with_sound(tmp_path / "a.mkv", num_packets=960)
    assert path.stat().st_size < 30_000
    tracemalloc.start()
    sound = read_audio(path, 2.0)
    assert tracemalloc.get_traced_memory()[1] < 2_000_000
    tracemalloc.stop()
    assert sound is not None
    assert sound.samples.shape == (2, 96_000)


@pytest.mark.parametrize(("most", "seconds"), [(48_000, 1e6), (47_999, 2.0)])
def test_sound_of_too_many_samples_is_not_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, seconds: float
) -> None:
    path = with_sound(tmp_path / "a.mkv")
    monkeypatch.setattr("everyframe.media.audio.MOST_RATE", most)
    with pytest.raises(MediaError, match=r"the sound of .* too long for its rate"):
        read_audio(path, seconds)


def test_a_text_in_a_picture_that_unpacks_to_much(tmp_path: Path) -> None:
    packed = zlib.compress(bytes(200_000_000), 9)
    text = chunk(b"zTXt", b"everyframe\0\0" + packed)
    path = png(tmp_path / "a.png", 4, 4, text)
    with pytest.raises(MediaError):
        embedded_record(path)
    with pytest.raises(MediaError):
        read_image(path)


def test_a_record_of_too_many_bytes_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.json"
    path.write_text('{"schema": "everyframe.record/1", "a": "%s"}' % ("a" * 1000), "utf-8")
    assert record_in(path)["a"] == "a" * 1000
    monkeypatch.setattr("everyframe.media.record.MOST_RECORD_BYTES", 1000)
    with pytest.raises(MediaError, match="holds no record"):
        read_record(path)


@pytest.mark.parametrize(
    ("values", "text"),
    [((2, 255), "got 2 to 255"), ((-1, 1), "got -1 to 1"), ((0, np.nan), "not finite"),
     ((0, np.inf), "not finite")],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["array", "tensor"])
def test_floats_that_are_no_colours(values: tuple[float, float], text: str, kind: str) -> None:
    import torch

    picture = np.full((4, 4, 3), values[0], np.float32)
    picture[0, 0, 0] = values[1]
    with pytest.raises(MediaError, match=text):
        read_image(picture if kind == "array" else torch.from_numpy(picture).movedim(-1, 0))


def test_what_resampling_leaves_is_a_colour() -> None:
    picture = np.array([-0.005, 0.5, 1.005], np.float32).reshape(1, 1, 3)
    assert read_image(picture).tolist() == [[[0, 128, 255]]]


@pytest.mark.parametrize("kind", ["hls", "concat", "dash"])
def test_a_playlist_is_no_video(tmp_path: Path, kind: str) -> None:
    """FFmpeg would read the files and addresses that it names, whatever its own name ends in."""
    other = Path(write(tmp_path / "other.mp4", [np.zeros((2, 64, 64, 3), np.uint8)], 8, {}))
    texts = {
        "hls": "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nother.mp4\n#EXT-X-ENDLIST\n",
        "concat": "ffconcat version 1.0\nfile other.mp4\n",
        "dash": '<?xml version="1.0"?>\n<MPD xmlns="urn:mpeg:dash:schema:mpd:2011"></MPD>\n',
    }
    path = tmp_path / "a.mp4"
    path.write_text(texts[kind], encoding="utf-8")
    assert len(read_frames(other)[0]) == 2
    for read in (read_frames, read_video, read_record):
        with pytest.raises(MediaError):
            read(path)


def test_a_picture_that_is_a_program_is_none(tmp_path: Path) -> None:
    """Pillow would start Ghostscript for what begins so."""
    path = tmp_path / "a.png"
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n")
    with pytest.raises(MediaError, match="no picture that can be read"):
        read_image(path)
    with pytest.raises(MediaError):
        read_record(path)


@pytest.mark.parametrize("fps", ["nan", "1/0", "1e400", "1e-400", "-1", "", "0"])
def test_a_rate_that_no_video_has(tmp_path: Path, fps: str) -> None:
    path = tmp_path / "a.gif"
    record = f'{{"schema": "everyframe.record/1", "fps": "{fps}", "num_frames": 2}}'.encode()
    frames = [Image.new("P", (16, 16), number) for number in range(2)]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=20, comment=record)
    with pytest.raises(InputError):
        read_video(path)
