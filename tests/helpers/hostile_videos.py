"""Small video files that FFmpeg unpacks to much more than their headers say."""

from __future__ import annotations

import struct
import zlib
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

_RATE = 48_000


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def _png(side: int) -> bytes:
    head = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    rows = zlib.compress(bytes(side * (side + 1)), 9)
    marks = (_chunk(b"IHDR", head), _chunk(b"IDAT", rows), _chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(marks)


def larger_than_its_header(path: Path, side: int) -> Path:
    """A video of 64x64 pixels by its header, whose frames are pictures of that side."""
    with av.open(str(path), "w", format="avi") as container:
        stream = container.add_stream("png", rate=8)
        stream.width = stream.height = 64
        stream.pix_fmt = "rgb24"
        for number in range(2):
            packet = av.Packet(_png(side))
            packet.stream, packet.time_base = stream, Fraction(1, 8)
            packet.pts = packet.dts = number
            container.mux(packet)
    return path


def with_sound(path: Path, *, num_packets: int = 1) -> Path:
    """Two seconds of frames; each packet of sound is 4608 silent samples of second 0."""
    with av.open(str(path), "w", format="matroska") as container:
        video = container.add_stream("mpeg4", rate=8)
        video.width = video.height = 64
        video.pix_fmt = "yuv420p"
        sound = container.add_stream("flac", rate=_RATE)
        sound.layout = "stereo"
        sound.codec_context.format = "s16"
        frame = av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8), format="rgb24")
        pictures = [video.encode(frame) for _ in range(16)] + [video.encode(None)]
        silence = np.zeros((1, 2 * 4608), np.int16)
        samples = av.AudioFrame.from_ndarray(silence, format="s16", layout="stereo")
        samples.sample_rate = _RATE
        data = bytes(sound.encode(samples)[0])
        for packet in (each for packets in pictures for each in packets):
            container.mux(packet)
        for _ in range(num_packets):
            packet = av.Packet(data)
            packet.stream, packet.time_base = sound, Fraction(1, _RATE)
            packet.pts = packet.dts = 0
            container.mux(packet)
    return path
