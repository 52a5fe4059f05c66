"""Tiny random checkpoints of every video pipeline of diffusers, by class name in `CASES`."""

from helpers.tiny_checkpoints.diffusers import (
    cosmos,
    diffusions,
    hunyuan,
    ltx,
    modular,
    others,
    wan,
)
from helpers.tiny_checkpoints.diffusers.cases import CASES

__all__ = ["CASES", "cosmos", "diffusions", "hunyuan", "ltx", "modular", "others", "wan"]
