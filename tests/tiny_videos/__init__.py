"""Tiny random checkpoints of every video pipeline of diffusers, by class name in `CASES`."""

from tiny_videos import cosmos, diffusions, hunyuan, ltx, modular, others, wan
from tiny_videos.cases import CASES

__all__ = ["CASES", "cosmos", "diffusions", "hunyuan", "ltx", "modular", "others", "wan"]
