"""Read input pictures and videos as 8-bit RGB.

Colour profiles are ignored; values are taken as sRGB. `everyframe.media.pixels.fit_image` resizes a
picture to a model's size.
"""

from __future__ import annotations

import os
import sys
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

import numpy as np
import numpy.typing as npt

from everyframe.core.errors import InputError, MediaError
from everyframe.media.decode_cache import decode_once, shape_of
from everyframe.media.input_checks import check_image, check_video
from everyframe.media.limits import check_picture, open_picture
from everyframe.media.output_path import PathLike, exact_fps
from everyframe.media.pixels import Frames, check_range, fit_image, to_uint8

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

#: Colour behind transparent pixels.
Background = Literal["white", "black"]

_ANIMATED = {".gif", ".webp", ".png", ".apng"}


def read_image(
    source: PathLike | Image | npt.NDArray[Any] | Tensor, *, under: Background = "white"
) -> Frames:
    """Read a picture as uint8 RGB (H, W, 3) from a file, Pillow image, array or torch tensor.

    EXIF orientation is applied; palette, grey and CMYK become RGB; transparency is composited over
    `under`; 16 bits are rounded to 8. Arrays are (H, W) or (H, W, C) with 1, 3 or 4 channels, in
    uint8, uint16 or floats in 0..1. Tensors may also be channels-first, (C, H, W) or (1, C, H, W).
    Raises `MediaError` for input that is missing, not a picture, animated or truncated.
    """
    from PIL import Image

    if isinstance(source, np.ndarray):
        return _from_array(source, under)
    if is_tensor(source):
        return _from_array(_channels_last(source), under)
    if not isinstance(source, (str, os.PathLike, Image.Image)):
        raise MediaError(
            "an image must be a path, a Pillow image, a numpy array or a torch tensor, "
            f"got {type(source).__name__}"
        )
    if isinstance(source, Image.Image):
        try:
            return _from_pillow(source, "the image", under)
        except (MediaError, MemoryError):
            raise
        except Exception as error:  # as in `_from_file`
            raise MediaError(f"the image can't be read to its end: {error}") from error
    name = os.fspath(source)
    check_image(name)
    return decode_once(name, f"picture on {under}", lambda: _from_file(name, under))


def _from_file(name: str, under: Background) -> Frames:
    from PIL import Image, UnidentifiedImageError

    try:
        with open_picture(name) as picture:
            return _from_pillow(picture, repr(name), under)
    except (MediaError, MemoryError):
        raise
    except UnidentifiedImageError:
        raise MediaError(
            f"{name!r} is no picture that can be read; give a png, jpeg, webp, tiff, bmp or gif"
        ) from None
    except Image.DecompressionBombError as error:
        raise MediaError(f"image {name!r} is too large: {error}") from error
    except Exception as error:  # Pillow's decoders raise almost any, each of its own
        raise MediaError(f"image {name!r} can't be read to its end: {error}") from error


def picture_as_given(source: Any) -> Any:
    """Load a picture for a caller that accepts many types; other values pass through unchanged.

    Files and integer arrays become Pillow images: integers are pixel values in 0..255, while a
    float array or tensor may mean anything. A list is handled item by item. Raises `MediaError` for
    a file that is not a picture.
    """
    from PIL import Image

    if isinstance(source, (list, tuple)):
        return [picture_as_given(each) for each in source]
    if isinstance(source, (str, os.PathLike)) or is_picture_of_integers(source):
        return Image.fromarray(read_image(source))
    return source


def video_as_given(source: Any) -> Any:
    """Load a video for a caller that accepts many types: the frames (T, H, W, 3) of a file, a
    folder or a `Video`. Other values pass through unchanged.
    """
    if isinstance(source, (str, os.PathLike)):
        return read_pixels(source)
    return getattr(source, "frames", source)


def is_picture_of_integers(value: Any) -> bool:
    """Whether the value is an array or tensor of one picture with 8 or 16 bits."""
    if is_tensor(value):
        shape, dtype = tuple(value.shape), str(value.dtype).removeprefix("torch.")
    elif isinstance(value, np.ndarray):
        shape, dtype = value.shape, value.dtype.name
    else:
        return False
    if is_tensor(value) and len(shape) == 4 and shape[0] == 1:
        shape = shape[1:]
    is_one = len(shape) == 2 or (len(shape) == 3 and bool({shape[0], shape[-1]} & {1, 3, 4}))
    return is_one and dtype in ("uint8", "uint16")


def num_pictures(picture: Image) -> int:
    """Number of frames in an open Pillow image; 1 for a still picture.

    A phone's JPEG may embed further copies of itself (MPO); that counts as one picture.
    """
    return 1 if picture.format == "MPO" else int(getattr(picture, "n_frames", 1))


def is_tensor(value: Any) -> TypeGuard[Tensor]:
    """Whether the value is a torch tensor; does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _channels_last(tensor: Tensor) -> npt.NDArray[Any]:
    """Convert a tensor to an array (H, W) or (H, W, C)."""
    values = tensor.detach().cpu()
    if values.is_floating_point():
        values = values.float()  # NumPy has no bfloat16
    array: npt.NDArray[Any] = values.numpy()
    if array.ndim == 4 and len(array) == 1:
        array = array[0]
    return np.moveaxis(array, 0, -1) if array.ndim == 3 and len(array) in (1, 3, 4) else array


def _from_pillow(picture: Image, name: str, under: Background) -> Frames:
    from PIL import Image, ImageOps

    check_picture(*picture.size, name)
    if num_pictures(picture) > 1:
        raise MediaError(
            f"{name} is an animated picture of {num_pictures(picture)} frames, where one picture "
            "is wanted; save the frame that is meant"
        )
    upright = ImageOps.exif_transpose(picture)
    if upright.mode == "F":
        raise MediaError(f"{name} holds bare floats without a range; save it with 8 or 16 bits")
    if upright.mode.startswith("I"):  # 16-bit grey, in whichever of Pillow's integer modes
        grey = np.asarray(upright)
        if grey.min() < 0 or grey.max() > 65535:
            raise MediaError(f"{name} has 32-bit values; save it with 8 or 16 bits")
        return _from_array(grey.astype(np.uint16), under)
    if upright.has_transparency_data:
        clear = upright.convert("RGBA")
        ground = Image.new("RGBA", clear.size, under)
        upright = Image.alpha_composite(ground, clear)
    return np.array(upright.convert("RGB"))


def _from_array(array: npt.NDArray[Any], under: Background) -> Frames:
    shaped = array[..., None] if array.ndim == 2 else array
    if shaped.ndim != 3 or shaped.shape[-1] not in (1, 3, 4) or 0 in shaped.shape:
        raise MediaError(f"an image array must be (H, W) or (H, W, 1, 3 or 4), got {array.shape}")
    if shaped.dtype == np.uint16:
        pixels = ((shaped.astype(np.uint32) * 255 + 32767) // 65535).astype(np.uint8)
    elif shaped.dtype == np.uint8 or np.issubdtype(shaped.dtype, np.floating):
        check_range(shaped, "an image array")
        pixels = to_uint8(shaped)
    else:
        raise MediaError(
            f"an image array must be uint8, uint16 or floats in 0..1, got {array.dtype}"
        )
    if pixels.shape[-1] == 4:
        # The ground g under what is transparent, rounded: (c a + g (255 - a)) / 255.
        alpha = pixels[..., 3:].astype(np.uint32)
        over = pixels[..., :3] * alpha + (255 if under == "white" else 0) * (255 - alpha)
        return ((over + 127) // 255).astype(np.uint8)
    return np.array(np.broadcast_to(pixels, (*pixels.shape[:2], 3)))


def read_video(
    path: PathLike,
    *,
    fps: Fraction | float | str | None = None,
    size: tuple[int, int] | None = None,
) -> tuple[Frames, Fraction]:
    """Read frames, uint8 (T, H, W, 3), and frame rate of a video, gif, webp or folder of png files.

    With `size` (height, width) frames are resized (see `fit_image`); those of a video file one by
    one, as a long video in its own size may exceed memory. `fps` gives the rate of a folder without
    our ``record.json``, and sets the sampling rate of a gif or webp. A video file has its own rate;
    another `fps` raises `InputError`. Raises `MediaError` for input that is missing, not a video or
    truncated.
    """
    check_video(path)
    place = Path(path)
    rate = None if fps is None else exact_fps(fps)
    # Loaded here: pictures need no FFmpeg, and videos no Pillow.
    if place.is_dir() or place.suffix.lower() in _ANIMATED:
        from everyframe.media.images import read_animation, read_folder

        frames, found = (read_folder if place.is_dir() else read_animation)(place, rate)
        return frames if size is None else fit_image(frames, *size), found
    from everyframe.media.mp4 import read_frames

    frames, found = read_frames(place, size)
    if rate is not None and rate != found:
        raise InputError(f"{os.fspath(path)!r} has {found} frames a second; fps={fps} can't hold")
    return frames, found


def read_pixels(path: PathLike) -> Frames:
    """Read frames, uint8 (T, H, W, 3), as `read_video`, for which a folder needs no rate."""
    fps = 1 if Path(path).is_dir() else None
    return decode_once(path, "video", lambda: read_video(path, fps=fps)[0])


def count_frames(given: Any, most: int, *, what: str) -> int:
    """Number of frames that `given` (a path, an array or a `Video`) has, at most `most`.

    Of a video file no more are decoded. Raises `InputError` for anything else, and `MediaError` as
    `read_video` does.
    """
    if isinstance(given, (str, os.PathLike)):
        check_video(given)
        place = Path(given)
        if place.is_dir() or place.suffix.lower() in _ANIMATED:
            return min(len(read_pixels(given)), most)
        from everyframe.media.mp4 import iter_frames

        return sum(1 for _ in islice(iter_frames(place), most))
    frames = getattr(given, "frames", given)
    if not hasattr(frames, "__len__"):
        raise InputError(
            f"{what} must be a path, an array of frames or a Video, got {type(given).__name__}"
        )
    return min(len(frames), most)


def video_shape(path: PathLike) -> tuple[int, int, int]:
    """(T, H, W) of what `read_pixels` reads; more than 128 MiB of frames are not held for it."""
    check_video(path)
    place = Path(path)
    if place.is_dir() or place.suffix.lower() in _ANIMATED:
        num_frames, height, width, _ = read_pixels(path).shape
        return num_frames, height, width
    from everyframe.media.mp4 import iter_bounded_frames

    return shape_of(path, "video", lambda: iter_bounded_frames(place))
