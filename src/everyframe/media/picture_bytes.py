"""A Pillow picture as bytes and back, for saved runs and for messages between processes.

The bytes are a PNG file with the pixels, palette and EXIF. A mode that PNG lacks, such as CMYK,
lies in it as pixels of as many bytes, and is named in its text.
"""

from __future__ import annotations

import io

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from everyframe.core.errors import CorruptRunError, NotSerializableError

#: For each mode that PNG lacks or would narrow, one whose pixels have as many bytes.
_CARRIERS = {
    "CMYK": "RGBA", "F": "RGBA", "I": "RGBA", "RGBX": "RGBA", "RGBa": "RGBA",
    "HSV": "RGB", "LAB": "RGB", "YCbCr": "RGB", "La": "LA", "I;16B": "LA",
}  # fmt: skip
#: Key of the mode in the text of a file.
_MODE = "everyframe mode"
#: What Pillow raises for files that are damaged, and for pictures that it can't write.
_ERRORS = (OSError, SyntaxError, ValueError, EOFError, SystemError)


def encode_picture(picture: Image.Image) -> bytes:
    """The picture as bytes.

    Raises:
        NotSerializableError: its file is damaged, or PNG can't hold it.
    """
    file, text, shown = io.BytesIO(), PngInfo(), picture
    try:
        if picture.mode in _CARRIERS:
            text.add_text(_MODE, picture.mode)
            carrier = _CARRIERS[picture.mode]
            shown = Image.frombytes(carrier, picture.size, picture.tobytes())
        shown.save(file, "PNG", exif=picture.getexif(), pnginfo=text)
    except _ERRORS as error:
        raise NotSerializableError(
            f"a picture of mode {picture.mode} can't be saved as PNG: {error}"
        ) from error
    return file.getvalue()


def decode_picture(data: bytes) -> Image.Image:
    """The picture that `encode_picture` was given.

    Of other formats Pillow would start programs (EPS: gs), so none is read.

    Raises:
        CorruptRunError: the bytes are no such picture.
    """
    try:
        opened = Image.open(io.BytesIO(data), formats=("PNG",))
        mode = opened.info.get(_MODE)
        if mode not in _CARRIERS:
            return opened
        found = Image.frombytes(mode, opened.size, opened.tobytes())
    except (*_ERRORS, Image.DecompressionBombError) as error:
        raise CorruptRunError(f"a saved picture is no PNG that can be read: {error}") from None
    found.info |= {name: value for name, value in opened.info.items() if name == "exif"}
    return found
