"""What pipelines don't say of themselves: frame rates of training, and sizes set in their code.

By the beginning of the class's name, longest first. Frame rates are those with which diffusers'
documentation writes each one's videos, or the model's card where that says another. Data only.
Read next: `sizes.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

_Value = TypeVar("_Value")

#: Frames a second of the video that is written, where the pipeline takes no frame rate itself.
FRAME_RATES: Mapping[str, float] = {
    "Allegro": 15,
    "AnimateDiff": 8,
    "AnyFlow": 16,
    "ChronoEdit": 16,
    "CogVideoX": 8,
    "ConsisID": 8,
    "Cosmos": 16,
    "Cosmos2": 16,
    "Cosmos3": 24,
    "EasyAnimate": 8,
    "Helios": 24,
    "HunyuanVideo": 24,
    "HunyuanVideo15": 24,
    "I2VGenXL": 16,
    "Kandinsky5": 24,
    "Kandinsky6": 24,
    "LTX": 24,
    "Latte": 8,
    "LucyEdit": 24,
    "MiniMaxH3": 24,
    "Mochi": 30,
    "MotifVideo": 24,
    "PIA": 8,
    "SanaImageToVideo": 16,
    "SanaVideo": 16,
    "SkyReelsV2": 24,
    "TextToVideoSD": 8,
    "VideoToVideoSD": 8,
    "Wan": 16,
    "WanAnimate": 30,
}
FRAME_RATE = 24.0

#: (height, width) that a pipeline's code falls back to, where neither signature nor config say it.
SIZES: Mapping[str, tuple[int, int]] = {
    "Mochi": (480, 848),
    "MiniMaxH3": (768, 1344),
    "Wan": (480, 832),
}
#: Frames, likewise, or where the code makes another number of what the signature says.
LENGTHS: Mapping[str, int] = {
    "LTX2": 121,
    "MiniMaxH3": 124,
    "SkyReelsV2DiffusionForcingVideoToVideo": 121,
    "Wan": 81,
}
#: Steps that are fewer than what is asked for: a number of points, between which it steps.
STEPS_FEWER: Mapping[str, int] = {"MiniMaxH3": 1}
#: The fewest steps that its schedule can be made of, where one is too few.
FEWEST_STEPS: Mapping[str, int] = {"Mochi": 2}

#: Whose code can't do without a negative prompt: an empty one is given where there is none.
EMPTY_NEGATIVE: Mapping[str, bool] = {"EasyAnimate": True}
#: What goes on from latents that another pipeline's call left in memory, and from nothing else.
GOES_ON: Mapping[str, str] = {"LTX2DFRTemporalRefine": "LTX2DFRPipeline"}
#: Whose videos are tensors (batch, channels, frames, height, width), by diffusers' own helpers; of
#: others frames come before channels.
CHANNELS_FIRST: Mapping[str, bool] = {"EasyAnimate": True}
#: Parameters whose videos have a size of their own, which is not that of the video that is made.
OWN_SIZE: Mapping[str, tuple[str, ...]] = {"WanAnimate": ("face_video",)}


def of(table: Mapping[str, _Value], class_name: str) -> _Value | None:
    """The entry of the longest name that `class_name` begins with."""
    fitting = [name for name in table if class_name.startswith(name)]
    return table[max(fitting, key=len)] if fitting else None
