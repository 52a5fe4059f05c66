"""Written files read back right, and a failed run leaves nothing."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from everyframe.core.errors import InputError, MediaError
from everyframe.media import mp4
from everyframe.media.read import read_video
from everyframe.media.record import read_record
from everyframe.media.write import VideoWriter, write

COLOURS = [
    (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0), (128, 0, 128), (255, 165, 0),
    (255, 255, 255), (0, 255, 255), (0, 0, 0), (128, 128, 128), (0, 0, 128), (139, 69, 19),
]  # fmt: skip
KINDS = ["clip.mp4", "clip.gif", "clip.webp", "clip/"]


def flat_colours(height: int = 32, width: int = 48) -> np.ndarray:
    """A frame of each colour, (12, H, W, 3)."""
    colours = np.array(COLOURS, np.uint8)[:, None, None, :]
    return np.ascontiguousarray(np.broadcast_to(colours, (len(COLOURS), height, width, 3)))


def noise(num_frames: int = 6, side: int = 64) -> np.ndarray:
    shape = (num_frames, side, side, 3)
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("fps", [24, Fraction(24000, 1001), 7.5])
def test_frames_rate_and_colours_survive(tmp_path: Path, name: str, fps: Fraction | float) -> None:
    frames = flat_colours()
    target = f"{tmp_path}/{name}"
    write(target, [frames[:5], frames[5:6], frames[6:]], fps)
    read, rate = read_video(target)
    assert rate == Fraction(fps)
    assert read.shape == frames.shape
    # Limited range has 219 steps for 255, so a level is off by up to 1.2 and the matrix and x264
    # add to it. The BT.601 matrix read as BT.709 would be off by 20 and more.
    worst = int(np.abs(read.astype(int) - frames).max())
    assert worst <= (0 if name in ("clip/", "clip.gif") else 3)


def test_mp4_is_what_players_expect(tmp_path: Path) -> None:
    path = write(tmp_path / "clip.mp4", [flat_colours()], Fraction(24000, 1001))
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        context = stream.codec_context
        assert (context.name, context.pix_fmt) == ("h264", "yuv420p")
        assert (stream.width, stream.height, stream.frames) == (48, 32, 12)
        assert stream.average_rate == Fraction(24000, 1001)
        assert stream.duration * stream.time_base == 12 / Fraction(24000, 1001)
        assert stream.start_time == 0
        tags = (context.color_primaries, context.color_trc, context.colorspace)
        assert tags == (1, 1, 1)  # BT.709
        assert context.color_range == 1  # limited
        times = [frame.time for frame in container.decode(stream)]
    # The time base ticks 1/24000 s.
    assert np.allclose(times, np.arange(12) * 1001 / 24000, atol=1e-9)
    whole = path.read_bytes()
    assert whole.index(b"moov") < whole.index(b"mdat")  # faststart


@pytest.mark.parametrize("name", [*KINDS[:3], "clip/frame_00003.png"])
def test_same_frames_give_same_bytes(tmp_path: Path, name: str) -> None:
    target = "clip/" if "/" in name else name
    written = []
    for pieces in ([noise()], list(noise()[:, None])):  # and whatever the pieces are
        write(f"{tmp_path}/{target}", pieces, 24, {"seed": 7})
        written.append((tmp_path / name).read_bytes())
    assert written[0] == written[1]


_SMALL = """
import sys
import numpy as np
from everyframe.media.write import write
rows, columns = np.mgrid[0:64, 0:64]
disc = np.stack([(rows - 32) ** 2 + (columns - t) ** 2 < 64 for t in range(48)])[..., None]
grain = np.random.default_rng(1).integers(0, 8, (48, 64, 64, 3))
write(sys.argv[1], [(np.where(disc, (240, 20, 10), (30, 60, 200)) + grain).astype(np.uint8)], 24)
"""


def test_bytes_do_not_depend_on_what_memory_held_before(tmp_path: Path) -> None:
    """x264's AVX-512 code reads memory that nobody has written, in pictures as narrow as this.

    glibc fills memory that it hands out with whatever it is set to. Elsewhere, and on a processor
    without AVX-512, this test can't fail.
    """
    files = []
    for number, filling in enumerate(["0", "85", "170"]):
        path = tmp_path / f"{number}.mp4"
        environment = os.environ | {"MALLOC_PERTURB_": filling}
        subprocess.run([sys.executable, "-c", _SMALL, str(path)], check=True, env=environment)
        files.append(path.read_bytes())
    assert files[0] == files[1] == files[2]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("num_frames", [1, 9])
def test_still_videos_keep_their_frames(tmp_path: Path, name: str, num_frames: int) -> None:
    """gif and webp merge equal frames; the reader gives all of them back."""
    still = np.full((num_frames, 32, 32, 3), 90, np.uint8)
    write(f"{tmp_path}/{name}", [still], 12)
    read, rate = read_video(f"{tmp_path}/{name}")
    assert read.shape == still.shape
    assert rate == 12


def test_one_frame_in_one_png(tmp_path: Path) -> None:
    path = write(tmp_path / "one.png", [noise(1)], 24, {"seed": 1})
    assert np.array_equal(read_video(path)[0], noise(1))
    with pytest.raises(MediaError, match="one frame, and more came"):
        write(tmp_path / "two.png", [noise(2)], 24)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one.json", "one.png"]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows fails by itself")
def test_what_is_flushed_is_open_for_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows refuses to flush a file that is open for reading only."""
    import fcntl

    modes = []

    def flush(descriptor: int) -> None:
        modes.append(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE)

    monkeypatch.setattr(os, "fsync", flush)
    write(tmp_path / "clip.mp4", [noise(1)], 24)
    assert modes == [os.O_RDWR]


def test_frames_reach_the_disk_as_they_come(tmp_path: Path) -> None:
    sizes = []

    def pieces() -> Iterator[np.ndarray]:
        for piece in noise(150)[:, None]:
            yield piece
            sizes.append(sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file()))

    write(tmp_path / "clip.mp4", pieces(), 24)
    # x264 itself looks some 40 frames ahead, and the file is written in blocks.
    assert sizes[0] < sizes[90] < sizes[-1]


# --- planted faults ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*KINDS, "clip.png"])
@pytest.mark.parametrize("fault", [ValueError, KeyboardInterrupt, GeneratorExit, MemoryError])
@pytest.mark.parametrize("existing", [False, True])
def test_a_broken_run_leaves_what_was_there(
    tmp_path: Path, name: str, fault: type[BaseException], existing: bool
) -> None:
    target = f"{tmp_path}/{name}"
    if existing:
        write(target, [noise(1)], 24, {"seed": 1})
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}

    def pieces() -> Iterator[np.ndarray]:
        yield noise(1)
        raise fault("planted")

    with pytest.raises(fault, match="planted"):
        write(target, pieces(), 24, {"seed": 2})
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    assert not list(tmp_path.glob(".*"))
    assert bool(before) is existing


def test_an_old_file_or_folder_is_replaced_whole(tmp_path: Path) -> None:
    for name in KINDS:
        write(f"{tmp_path}/{name}", [noise(6)], 24, {"seed": 1})
        write(f"{tmp_path}/{name}", [noise(2)], 24, {"seed": 2})
        assert len(read_video(f"{tmp_path}/{name}")[0]) == 2
        assert read_record(f"{tmp_path}/{name}")["seed"] == 2
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("where", ["add", "finish", "_copy_with_comment"])
def test_full_disk_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, number: int
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, "planted")

    owner = mp4 if where.startswith("_") else mp4.Mp4Encoder
    monkeypatch.setattr(owner, where, fail)
    with pytest.raises(MediaError) as caught:
        write(tmp_path / "clip.mp4", [noise()], 24, {"seed": 1})
    assert ("the disk is full" in str(caught.value)) is (number == errno.ENOSPC)
    assert "unfinished file was removed" in str(caught.value)
    assert not list(tmp_path.iterdir())


_LIMITED = """
import resource, sys
import numpy as np
from everyframe.core.errors import MediaError
from everyframe.media.write import write
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
frames = np.random.default_rng(0).integers(0, 256, (12, 96, 96, 3), dtype=np.uint8)
try:
    write(sys.argv[1], iter(frames[:, None]), 24, {"seed": 1})
except MediaError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="resource limits are POSIX")
@pytest.mark.parametrize("name", KINDS)
def test_a_write_that_really_fails(tmp_path: Path, name: str) -> None:
    """The system itself refuses bytes over 20 kB a file, as it does on a full disk."""
    run = subprocess.run(
        [sys.executable, "-c", _LIMITED, f"{tmp_path}/{name}"], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("can't write"), run.stdout + run.stderr
    assert "raise the limit of ulimit -f" in run.stdout
    assert len(run.stdout.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_file_that_lost_frames_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = mp4._copy_with_comment

    def lose_one(source: Path, target: Path, comment: str, audio: object) -> None:
        short = source.with_name("short.mp4")
        encoder = mp4.Mp4Encoder(short, 64, 64, Fraction(24))
        for frame in noise(5):
            encoder.add(frame)
        encoder._container.mux(encoder._stream.encode())
        encoder._container.close()
        whole(encoder._encoded, target, comment, audio)

    monkeypatch.setattr(mp4, "_copy_with_comment", lose_one)
    with pytest.raises(MediaError, match="holds 5 frames of 64x64 and not 6"):
        write(tmp_path / "clip.mp4", [noise(6)], 24)
    assert not list(tmp_path.iterdir())


def test_wrong_pieces_are_refused(tmp_path: Path) -> None:
    target = tmp_path / "clip.mp4"
    for bad, message in [
        (noise().astype(np.float32), "float32"),
        (noise()[0], "must be uint8"),
        (noise()[..., :1], "must be uint8"),
        (noise()[:, :63], "even sizes, got 64x63"),
    ]:
        with pytest.raises(InputError, match=message):
            write(target, [bad], 24)
    with pytest.raises(InputError, match="must all be"):
        write(target, [noise(), noise(side=32)], 24)
    with pytest.raises(MediaError, match="no frames came"):
        write(target, [], 24)
    with pytest.raises(TypeError):  # before the first frame, not after the last
        VideoWriter(target, 24, {"seed": object()})
    assert not list(tmp_path.iterdir())


def test_a_foreign_json_beside_it_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "clip.json").write_text(json.dumps({"mine": True}))
    with pytest.raises(MediaError, match=r"'clip\.json'"):
        write(tmp_path / "clip.mp4", [noise()], 24, {"seed": 1})
    assert json.loads((tmp_path / "clip.json").read_text()) == {"mine": True}


def test_what_is_put_into_a_folder_of_frames_meanwhile_stays(tmp_path: Path) -> None:
    write(f"{tmp_path}/frames/", [noise(6)], 8, {})
    with VideoWriter(f"{tmp_path}/frames/", 8, {}) as writer:
        writer.add(noise(1))
        (tmp_path / "frames" / "notes.txt").write_text("mine")
        (tmp_path / "frames" / "more").mkdir()
        (tmp_path / "frames" / "more" / "file").write_text("mine, too")
    assert sorted(path.name for path in (tmp_path / "frames").iterdir()) == [
        "frame_00000.png", "more", "notes.txt", "record.json",
    ]  # fmt: skip
    assert (tmp_path / "frames" / "more" / "file").read_text() == "mine, too"
    writer = VideoWriter(f"{tmp_path}/other/", 8, {}).__enter__()
    writer.add(noise(1))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "record.json").write_text("mine")
    with pytest.raises(MediaError, match=r"record.json was put there meanwhile"):
        writer.__exit__(None, None, None)
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["record.json"]
    assert (tmp_path / "other" / "record.json").read_text() == "mine"
    assert not list(tmp_path.glob(".everyframe*"))


@pytest.mark.parametrize("name", ["clip.mp4", "frames/"])
@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_stays_one_and_what_it_leads_to_is_written(
    tmp_path: Path, name: str, is_there: bool
) -> None:
    """On that file's disk, whatever it is called."""
    (tmp_path / "far").mkdir()
    link, target = tmp_path / name.rstrip("/"), tmp_path / "far" / "video"
    if is_there and name.endswith("/"):
        write(f"{target}/", [noise(6)], 8, {})
    elif is_there:
        target.write_bytes(b"before")
    link.symlink_to(target)
    written = write(f"{tmp_path}/{name}", [noise(2)], 8, {})
    assert link.is_symlink()
    assert target.exists()
    frames, _ = read_video(written)
    assert len(frames) == 2
    assert not list(tmp_path.rglob(".everyframe*"))
