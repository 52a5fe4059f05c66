"""Frames, audio and videos between ComfyUI's types and files."""

from __future__ import annotations

import base64
import io
import json
import mimetypes
import uuid
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import folder_paths
import numpy as np
from comfy_api.latest import InputImpl, Types
from PIL import Image

#: What has a record is MP4. FFmpeg would read playlists too, which name other files and addresses.
_FFMPEG_OPTIONS = {
    "protocol_whitelist": "file",
    "format_whitelist": "mov,mp4,m4a,3gp,3g2,mj2",
}


@dataclass(frozen=True)
class GeneratedVideo:
    """What a job makes.

    Attributes:
        frames: float32 in 0..1, (T, H, W, 3), a torch tensor on the CPU.
        audio: ``{"waveform": (1, C, N), "sample_rate"}``, or None if the model makes none.
        fps: frames per second.
        file: the MP4 file, which holds the record.
        record: the record as JSON text.
    """

    frames: Any
    audio: dict[str, Any] | None
    fps: float
    file: Path
    record: str


def new_file(ending: str = "mp4") -> Path:
    """A new path in ComfyUI's temporary folder."""
    folder = Path(folder_paths.get_temp_directory())
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"everyframe-{uuid.uuid4().hex}.{ending}"


def load_generated(file: Path, record: str) -> GeneratedVideo:
    """A video that a server made, decoded by ComfyUI."""
    parts = InputImpl.VideoFromFile(str(file)).get_components()
    return GeneratedVideo(parts.images, parts.audio, float(parts.frame_rate), file, record)


def picture_of(images: Any) -> Any:
    """The first picture of an IMAGE (B, H, W, C) as uint8 (H, W, 3)."""
    values = images[0, ..., :3].detach().cpu().float().clamp(0, 1).numpy()
    return np.rint(values * 255).astype(np.uint8)


def file_of(video: Any, fps: float) -> Path:
    """A file with a VIDEO, or with the frames of an IMAGE at `fps` frames per second."""
    if not hasattr(video, "save_to"):
        rate = Fraction(fps or 24).limit_denominator(1001)
        video = InputImpl.VideoFromComponents(
            Types.VideoComponents(images=video, audio=None, frame_rate=rate)
        )
    file = new_file()
    video.save_to(str(file))
    return file


def data_url(value: Any) -> str:
    """A picture (H, W, 3) or a file as the text that a server takes."""
    if isinstance(value, Path):
        kind, data = mimetypes.guess_type(value.name)[0], value.read_bytes()
    else:
        memory = io.BytesIO()
        Image.fromarray(value).save(memory, "PNG")
        kind, data = "image/png", memory.getvalue()
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def record_of(file: Path) -> dict[str, Any]:
    """The record in a video of Everyframe.

    Raises:
        ValueError: it is no video, or holds no record.
    """
    import av

    # PyAV 19 takes any tag, and has no such option.
    is_lenient = int(av.__version__.partition(".")[0]) >= 19
    any_tag: dict[str, Any] = {} if is_lenient else {"metadata_errors": "replace"}
    try:
        with av.open(str(file), container_options=_FFMPEG_OPTIONS, **any_tag) as container:
            tags = {name.lower(): text for name, text in container.metadata.items()}
    except (av.FFmpegError, OSError) as error:
        raise ValueError(f"{file.name} can't be read as a video: {error}") from None
    try:
        found = json.loads(tags.get("comment", ""))
    except (ValueError, RecursionError):
        found = None
    record: dict[str, Any] = found if isinstance(found, dict) else {}
    if not all(isinstance(record.get(name), dict) for name in ("request", "settings")):
        raise ValueError(
            f"{file.name} holds no record of Everyframe; give a video that Everyframe made, as "
            "Save Video writes it with format and codec auto"
        )
    return record
