"""Fewer frames decoded at once, by the pipeline's own parameter for it, where it has one.

AnimateDiff, I2VGenXL and Latte split their latents before they decode them. Not here: tiles, which
are the autoencoder's (`loading.set_tiling`). Read next: `reliefs.py`, `arguments.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from math import ceil

from everyframe.core.plan import Settings
from everyframe.families.family import Saving
from everyframe.families.pipeline.interface import Interface

#: The parameter, and the name of the saving in settings.
NAME = "decode_chunk_size"


def chunk_savings(
    interface: Interface, given: Collection[str], settings: Settings, vae: str
) -> Iterator[Saving]:
    """Half as many frames at once, and half of those, down to one.

    `given` are the parameters that the person who asked has set, `vae` the autoencoder's class:
    one of pictures decodes each frame by itself, one with a decoder over time sees neighbours.
    """
    parameter = interface.parameters.get(NAME)
    if parameter is None or NAME in given:
        return
    own = parameter.default if isinstance(parameter.default, int) else settings.num_frames
    chunk = min(settings.saving(NAME, own), settings.num_frames)
    is_lossy = "Temporal" in vae
    why = (
        "which changes the picture a little: the decoder sees a frame's neighbours only inside of "
        "these"
        if is_lossy
        else "each by itself"
    )
    while chunk > 1:
        chunk = ceil(chunk / 2)
        settings = settings.with_saving(NAME, chunk)
        yield Saving(settings, f"frames are decoded {chunk} at once ({NAME}), {why}", is_lossy)
