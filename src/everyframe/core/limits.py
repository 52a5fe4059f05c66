"""Largest and smallest numbers that any request may have; a seed within them."""

from __future__ import annotations

import os

#: Longest clip in frames, also if the length is given in seconds.
MAX_FRAMES = 100_000

#: Longest side in pixels.
MAX_SIDE = 16384

#: Seeds must survive JSON and additions.
MAX_SEED = 2**53 - 1

#: Lowest frame rate: 100 seconds a frame, which all our output formats can hold.
MIN_FPS = 0.01


def random_seed() -> int:
    """Random seed: 31 bits from the operating system."""
    return int.from_bytes(os.urandom(4), "little") >> 1
