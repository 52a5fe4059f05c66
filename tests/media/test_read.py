"""Pictures and videos of others."""

from __future__ import annotations

import re
import struct
import tracemalloc
from fractions import Fraction
from functools import partial
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image, features

from everyframe.core.errors import InputError, MediaError
from everyframe.media.frame_source import open_frames, survey
from everyframe.media.pixels import fit_image
from everyframe.media.read import count_frames, read_image, read_video, video_shape
from everyframe.media.record import read_record
from everyframe.media.video import Video
from everyframe.media.write import write

CORNERS = np.array([[[255, 0, 0], [0, 255, 0], [9, 9, 9]], [[0, 0, 255], [255, 255, 0], [8, 8, 8]]],
                   np.uint8)  # fmt: skip


def test_plain_files_and_values_agree(tmp_path: Path) -> None:
    Image.fromarray(CORNERS).save(tmp_path / "a.png")
    arrays = (CORNERS, (CORNERS / 255).astype(np.float32), CORNERS.astype(np.uint16) * 257)
    for source in (tmp_path / "a.png", str(tmp_path / "a.png"), Image.fromarray(CORNERS), *arrays):
        read = read_image(source)
        assert read.dtype == np.uint8
        assert np.array_equal(read, CORNERS)


@pytest.mark.parametrize(
    ("orientation", "turned"),
    [(1, CORNERS), (2, CORNERS[:, ::-1]), (3, CORNERS[::-1, ::-1]), (4, CORNERS[::-1]),
     (6, np.rot90(CORNERS, -1)), (8, np.rot90(CORNERS))],
)  # fmt: skip
def test_camera_orientation_is_applied(
    tmp_path: Path, orientation: int, turned: np.ndarray
) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(CORNERS).save(tmp_path / "a.png", exif=exif)
    assert np.array_equal(read_image(tmp_path / "a.png"), turned)


def test_modes(tmp_path: Path) -> None:
    grey = CORNERS[..., 1]
    grey_rgb = np.repeat(grey[..., None], 3, axis=-1)
    Image.fromarray(grey).save(tmp_path / "grey.png")
    Image.fromarray(grey.astype(np.uint16) * 257).save(tmp_path / "grey16.png")
    Image.fromarray(CORNERS).quantize(8).save(tmp_path / "palette.png")
    for name, wanted in (("grey", grey_rgb), ("grey16", grey_rgb), ("palette", CORNERS)):
        assert np.array_equal(read_image(tmp_path / f"{name}.png"), wanted), name
    assert np.array_equal(read_image(grey), grey_rgb)


def test_torch_tensors_with_channels_first_or_last() -> None:
    tensor = torch.from_numpy(CORNERS)
    first = tensor.permute(2, 0, 1)
    for source in (tensor, first, first[None], first.float() / 255, first.double() / 255):
        assert np.array_equal(read_image(source), CORNERS)
    # bfloat16 keeps 8 bits, which is a level or two at the upper end.
    near = read_image((first.float() / 255).bfloat16())
    assert np.abs(near.astype(int) - CORNERS).max() <= 1
    assert np.array_equal(read_image(tensor[..., 0])[..., 0], CORNERS[..., 0])


@pytest.mark.parametrize("mode", ["RGBA", "L", "LA", "P", "CMYK", "1", "YCbCr", "HSV", "I;16"])
def test_every_mode_becomes_rgb(tmp_path: Path, mode: str) -> None:
    picture = Image.fromarray(np.full((4, 6, 3), 255, np.uint8))
    if mode == "I;16":
        picture = Image.fromarray(np.full((4, 6), 65535, np.uint16))
    elif mode == "HSV":
        picture = picture.convert("HSV")
    else:
        picture = picture.convert(mode)
    read = read_image(picture)
    assert read.shape == (4, 6, 3)
    assert read.min() == 255  # white in any of them
    if mode == "CMYK":
        picture.save(tmp_path / "print.jpg", quality=100)
        assert read_image(tmp_path / "print.jpg").min() >= 254


def test_what_is_no_picture_at_all_is_one_line() -> None:
    with pytest.raises(MediaError, match=r"must be a path, a Pillow image.*got int"):
        read_image(7)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["moves.gif", "moves.webp", "moves.png"])
def test_an_animated_picture_is_not_one_picture(tmp_path: Path, name: str) -> None:
    frames = [Image.fromarray(CORNERS * shade) for shade in (0, 1, 0)]
    frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:])
    with pytest.raises(MediaError, match=r"is an animated picture of 3 frames, where one picture"):
        read_image(tmp_path / name)
    with Image.open(tmp_path / name) as opened, pytest.raises(MediaError, match="animated"):
        read_image(opened)
    frames[1].save(tmp_path / f"still-{name}")
    assert read_image(tmp_path / f"still-{name}").shape == CORNERS.shape


def test_a_phones_picture_with_copies_of_itself_is_one_picture(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "phone.jpg", format="MPO", save_all=True, append_images=frames[1:])
    red = read_image(tmp_path / "phone.jpg")
    assert (red[..., 0].min() > 250, red[..., 2].max() < 5) == (True, True)


def test_transparency_is_laid_over_white(tmp_path: Path) -> None:
    rgba = np.zeros((1, 3, 4), np.uint8)
    rgba[0, :, 0] = 255  # red: hidden, half and full
    rgba[0, :, 3] = (0, 128, 255)
    Image.fromarray(rgba).save(tmp_path / "a.png")
    for source in (tmp_path / "a.png", rgba):
        assert read_image(source)[0].tolist() == [[255] * 3, [255, 127, 127], [255, 0, 0]]


def test_broken_pictures_are_one_clear_line(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    for ending in ("png", "jpg", "webp", "gif"):
        path = tmp_path / f"cut.{ending}"
        Image.fromarray(noise).save(path)
        assert read_image(path).shape == noise.shape
        path.write_bytes(path.read_bytes()[:-1000])
    (tmp_path / "text.png").write_text("hello")
    (tmp_path / "empty.png").touch()
    Image.fromarray(np.zeros((2, 2), np.float32)).save(tmp_path / "float.tiff")
    for name, message in {
        "cut.png": "to its end", "cut.jpg": "to its end", "cut.gif": "to its end",
        "cut.webp": "no picture|to its end", "text.png": "no picture", "empty.png": "no picture",
        "missing.png": "does not exist", ".": "is a folder", "float.tiff": "8 or 16 bits",
    }.items():  # fmt: skip
        with pytest.raises(MediaError, match=message) as caught:
            read_image(tmp_path / name)
        assert "\n" not in str(caught.value)
    for bad in (np.zeros((2, 2, 2)), np.zeros(3), np.zeros((0, 2, 3)), np.zeros((2, 2), np.int64)):
        with pytest.raises(MediaError, match="an image array must be"):
            read_image(bad)


def test_errors_of_every_decoder_are_one_clear_line(tmp_path: Path) -> None:
    """Pillow's decoders raise errors of any type; those of AVIF and of pages are examples."""
    pages = [Image.new("RGB", (4, 4))] * 2
    pages[0].save(tmp_path / "pages.tif", save_all=True, append_images=pages[1:])
    data = bytearray((tmp_path / "pages.tif").read_bytes())
    width = max(data.rfind(struct.pack("<HH", 256, kind)) for kind in (3, 4))
    data[width + 1] = 9  # the second page has no width
    (tmp_path / "pages.tif").write_bytes(data)
    names = ["pages.tif"]
    if features.check("avif"):
        Image.new("RGB", (64, 64), "red").save(tmp_path / "broken.avif")
        whole = (tmp_path / "broken.avif").read_bytes()
        (tmp_path / "broken.avif").write_bytes(whole.replace(b"pitm", b"none"))
        names.append("broken.avif")
    for name in names:
        with pytest.raises(MediaError, match="to its end") as caught:
            read_image(tmp_path / name)
        assert "\n" not in str(caught.value)
        with pytest.raises(MediaError, match="can't be read"):
            survey(open_frames(tmp_path / name, what="source"), "source")


def test_pages_of_several_sizes_are_no_video(tmp_path: Path) -> None:
    """Of which the first has the size that was checked."""
    pages = [Image.new("RGB", size) for size in ((4, 4), (8, 4))]
    pages[0].save(tmp_path / "pages.tif", save_all=True, append_images=pages[1:])
    with pytest.raises(MediaError, match=r"picture 0 is 4x4, picture 1 is 8x4"):
        open_frames(tmp_path / "pages.tif", what="source")


def test_an_unknown_codec_is_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    Video(moving(3), 8, {"prompt": "a"}).save(path, sidecar=False)
    path.write_bytes(path.read_bytes().replace(b"avc1", b"none"))
    for read in (read_video, video_shape, partial(count_frames, most=2, what="source")):
        with pytest.raises(MediaError, match=r"clip.mp4' is in a codec that can't be read"):
            read(path)
    assert read_record(path)["prompt"] == "a", "which needs no frame"


def moving(num_frames: int = 30) -> np.ndarray:
    """Noise, so that packets are large and a cut falls among them."""
    shape = (num_frames, 64, 64, 3)
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def test_a_picture_too_large_for_pillow_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "huge.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 4)
    for read in (read_image, read_video, read_record):
        with pytest.raises(MediaError, match=r"huge\.png.*64 pixels"):
            read(tmp_path / "huge.png")


def test_frames_are_fitted_as_they_are_read(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (30, 128, 192, 3), np.uint8)
    for name, frames in (("clip.mp4", noise), ("clip.gif", noise[:4])):
        write(tmp_path / name, [frames], 24)
        whole, _ = read_video(tmp_path / name)
        tracemalloc.start()
        fitted, _ = read_video(tmp_path / name, size=(16, 24))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert np.array_equal(fitted, fit_image(whole, 16, 24))
        if name == "clip.mp4":
            # A few frames of 74 kB, and never all thirty.
            assert peak < whole.nbytes / 3


def test_a_cut_video_is_refused(tmp_path: Path) -> None:
    for name in ("clip.mp4", "clip.gif", "clip.webp"):
        whole = write(tmp_path / name, [moving()], 24).read_bytes()
        for part in (0.02, 0.3, 0.6, 0.95):
            (tmp_path / f"cut-{name}").write_bytes(whole[: int(len(whole) * part)])
            with pytest.raises(MediaError, match="cut-") as caught:
                read_video(tmp_path / f"cut-{name}")
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize("place", [0.3, 0.6])
def test_the_frame_that_can_not_be_decoded_is_named(tmp_path: Path, place: float) -> None:
    """A third of the file is overwritten: frames before that place come, the next one is named."""
    whole = bytearray(write(tmp_path / "whole.mp4", [moving()], 24).read_bytes())
    data = whole.find(b"mdat")
    start = data + int((len(whole) - data) * place)
    whole[start : start + len(whole) // 3] = bytes(len(whole) // 3)
    (tmp_path / "broken.mp4").write_bytes(whole)
    with pytest.raises(MediaError, match=r"broken.mp4' .* frame \d+ can't be decoded") as caught:
        read_video(tmp_path / "broken.mp4")
    named = re.search(r"frame (\d+)", str(caught.value))
    # Frames differ in size, and some wait in the decoder for the one after them.
    assert named is not None
    assert abs(int(named[1]) - 30 * place) <= 4


def test_missing_and_foreign_files(tmp_path: Path) -> None:
    (tmp_path / "text.mp4").write_text("hello")
    (tmp_path / "text.gif").write_text("hello")
    (tmp_path / "empty").mkdir()
    for name in ("missing.mp4", "text.mp4", "text.gif", "empty"):
        with pytest.raises(MediaError, match=name):
            read_video(tmp_path / name)


@pytest.mark.skipif(
    int(av.__version__.split(".")[0]) < 18, reason="PyAV before 18 can't write a turned video"
)
def test_a_phones_rotation_is_applied(tmp_path: Path) -> None:
    frame = np.zeros((32, 64, 3), np.uint8)
    frame[:, :32, 0] = 255  # left half red
    for degrees in (90, -90, 180):
        path = tmp_path / f"turned{degrees}.mp4"
        with av.open(str(path), "w") as container:
            stream = container.add_stream("libx264", rate=24)
            stream.width, stream.height = 64, 32
            stream.set_display_rotation(degrees)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame)))
            container.mux(stream.encode())
        read = read_video(path)[0][0].astype(int)
        wanted = np.rot90(frame, degrees // 90)
        assert read.shape == wanted.shape
        assert np.abs(read - wanted)[4:-4, 4:-4].mean() < 8  # blurred only where the halves meet


def test_folders_of_pictures(tmp_path: Path) -> None:
    for index in range(3):
        Image.fromarray(CORNERS + index).save(tmp_path / f"{index}.png")
    with pytest.raises(MediaError, match="give fps"):
        read_video(tmp_path)
    frames, fps = read_video(tmp_path, fps=12.5)
    assert fps == Fraction(25, 2)
    assert np.array_equal(frames, np.stack([CORNERS, CORNERS + 1, CORNERS + 2]))
    Image.fromarray(CORNERS[:1]).save(tmp_path / "9.png")
    with pytest.raises(MediaError, match=r"'9\.png' is 3x1"):
        read_video(tmp_path, fps=24)


def test_a_video_keeps_its_own_rate(tmp_path: Path) -> None:
    write(tmp_path / "clip.mp4", [moving(3)], 24)
    with pytest.raises(InputError, match="24 frames a second"):
        read_video(tmp_path / "clip.mp4", fps=12)


def test_a_foreign_gif_is_sampled_evenly(tmp_path: Path) -> None:
    images = [Image.new("RGB", (4, 4), colour) for colour in ("red", "lime", "blue")]
    images[0].save(tmp_path / "a.gif", save_all=True, append_images=images[1:],
                   duration=[100, 200, 100])  # fmt: skip
    frames, fps = read_video(tmp_path / "a.gif")
    assert fps == 10
    assert frames[:, 0, 0].argmax(axis=-1).tolist() == [0, 1, 1, 2]
