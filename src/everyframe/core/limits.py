"""Largest and smallest numbers that any request may have."""

from __future__ import annotations

#: Longest clip in frames, also if the length is given in seconds.
MAX_FRAMES = 100_000

#: Longest side in pixels.
MAX_SIDE = 16384

#: Seeds must survive JSON and additions.
MAX_SEED = 2**53 - 1

#: Lowest frame rate: 100 seconds a frame, which all our output formats can hold.
MIN_FPS = 0.01
