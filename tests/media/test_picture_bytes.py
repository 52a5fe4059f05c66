"""Pictures in memory come back as they were given, in any mode of Pillow's."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from everyframe.core.errors import CorruptRunError, NotSerializableError
from everyframe.media.picture_bytes import decode_picture, encode_picture

#: EXIF's tag of the orientation.
_ORIENTATION = 0x0112
_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16", "CMYK", "F", "I", "RGBX", "RGBa", "HSV",
          "LAB", "YCbCr", "La", "I;16B")  # fmt: skip


def picture_of(mode: str) -> Image.Image:
    """A picture of 3x5 pixels whose bytes differ."""
    num_bytes = len(Image.new(mode, (3, 5)).tobytes())
    numbers = np.arange(num_bytes, dtype=np.uint8) * 3
    found = Image.frombytes(mode, (3, 5), numbers.tobytes())
    if mode == "P":
        found.putpalette([*range(256)] * 3)
    return found


@pytest.mark.parametrize("mode", _MODES)
def test_a_picture_comes_back(mode: str) -> None:
    given = picture_of(mode)
    given.getexif()[_ORIENTATION] = 6
    back = decode_picture(encode_picture(given))
    assert (back.mode, back.size) == (given.mode, given.size)
    assert back.tobytes() == given.tobytes()
    assert back.getexif()[_ORIENTATION] == 6
    assert back.getpalette() == given.getpalette()


def test_what_is_no_picture_is_refused() -> None:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).save(
        file, "JPEG"
    )
    cut = Image.open(io.BytesIO(file.getvalue()[:1000]))
    with pytest.raises(NotSerializableError, match=r"mode RGB can't be saved as PNG: .*truncated"):
        encode_picture(cut)
    with pytest.raises(NotSerializableError, match="mode PA can't be saved"):
        encode_picture(Image.new("PA", (2, 2)))
    with pytest.raises(CorruptRunError, match="a saved picture is no PNG"):
        decode_picture(file.getvalue())
    with pytest.raises(CorruptRunError, match="a saved picture is no PNG"):
        decode_picture(encode_picture(picture_of("CMYK"))[:-30])
