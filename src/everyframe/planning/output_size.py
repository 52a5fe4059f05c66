"""Correct the planned video size if a dry run shows that the pipeline makes another.

A diffusers pipeline may round a length or make whole chunks without saying so.
"""

from __future__ import annotations

from dataclasses import replace

from everyframe.core.errors import InputError
from everyframe.planning.memory.memory_fit import FitResult


def with_output_size(fitted: FitResult) -> FitResult:
    """The fit with the actual length and size, and a note if they differ from the request.

    The arguments of the model are unchanged.

    Raises:
        InputError: it makes no frames, as HunyuanVideo of a picture where one is asked for.
    """
    settings = fitted.settings
    made = next((run.made for run in fitted.runs if run.made is not None), None)
    asked = (settings.num_frames, settings.height, settings.width)
    if made is None or made == asked:
        return fitted
    frames, height, width = made
    if not frames:
        raise InputError(f"the pipeline makes no frames of num_frames={asked[0]}; ask for more")
    note = (
        f"the pipeline makes {frames} frames of {width}x{height}, "
        f"not {asked[0]} of {asked[2]}x{asked[1]}"
    )
    changed = replace(
        settings,
        num_frames=frames,
        height=height,
        width=width,
        nominal_length=None
        if frames == settings.conditioned_length
        else settings.conditioned_length,
        nominal_size=None
        if (height, width) == settings.conditioned_size
        else settings.conditioned_size,
    )
    return replace(fitted, settings=changed, notes=(*fitted.notes, note))
