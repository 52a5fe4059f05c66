"""Previews of a pipeline's call: what its scheduler's steps are given, as pictures.

The scheduler's ``step`` is listened to (`library_patches.steps_heard`), since few of them return
the clean latents that they predict. Nothing that is heard is changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from einops import rearrange
from torch import Tensor

from everyframe.core.events import Event, Note
from everyframe.core.plan import Plan, Settings
from everyframe.diffusers_pipelines.inputs.defaults import PipelineDefaults
from everyframe.diffusers_pipelines.library_patches import steps_heard
from everyframe.media.pixels import Frames
from everyframe.runtime.previews.latent_previews import Previewer
from everyframe.runtime.previews.latent_space import LatentSpace
from everyframe.runtime.previews.preview_fit import ColorFit
from everyframe.samplers.clean_prediction import predicted_clean

#: Autoencoders whose pipelines have frames before channels, which sizes alone may not tell.
_FRAMES_FIRST = ("AutoencoderKLCogVideoX", "AutoencoderKLTemporalDecoder")


def latent_space(sizes: PipelineDefaults, class_name: str, **more: Any) -> LatentSpace | None:
    """The latents of a pipeline with that autoencoder; None if its config does not say.

    `more` are further fields of `LatentSpace`.
    """
    channels = sizes.vae.get("latent_channels", sizes.vae.get("z_dim"))
    if not isinstance(channels, int):
        return None
    factor = sizes.vae.get("scaling_factor")
    scale = float(factor) if isinstance(factor, (int, float)) else None
    return LatentSpace(
        class_name, channels, scale, "c t h w", spatial_factor=sizes.spatial_factor, **more
    )


class StepPreviews:
    """Previews of one call; `preview` gives those of the step that was heard last."""

    def __init__(self, plan: Plan, space: LatentSpace) -> None:
        assert plan.preview is not None
        self._space, self._settings = space, plan.settings
        # A plan knows those colours alone whose weights were hashed before.
        self._fits = not plan.preview.source and space.colors(reads=True) is None
        self._previewer = Previewer(plan.preview, space)
        self._heard: tuple[Any, Mapping[str, Any]] | None = None
        self._is_understood = True

    @classmethod
    def of(cls, plan: Plan, space: LatentSpace | None) -> StepPreviews | None:
        """The previews of a call by that plan; None if it has none."""
        return None if plan.preview is None or space is None else cls(plan, space)

    @contextmanager
    def listening(self, scheduler: Any) -> Iterator[None]:
        """Context: the steps of that scheduler are heard, those of this thread."""
        if scheduler is None:
            yield
            return
        with steps_heard(scheduler, self._hear):
            yield

    def _hear(self, scheduler: Any, given: Mapping[str, Any]) -> None:
        self._heard = (scheduler, given)

    def preview(self, seed: int, step: int, num_steps: int) -> Sequence[Event]:
        """The preview after that step if it is due; a note once if it can't be made."""
        if not self._is_understood:
            return ()
        try:
            preview = self._previewer.preview(seed, step, num_steps, self._clean)
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            # What is heard is of code that is not ours. The video does not depend on it.
            self._is_understood = False
            return (
                Note(f"no previews: {type(error).__name__}: {str(error).partition(chr(10))[0]}"),
            )
        return () if preview is None else (preview,)

    def fit(self, frames_THWC: Frames) -> Sequence[Event]:
        """Fit the colours to the call's video where they are not known; a note about it."""
        latents = self._clean() if self._fits and self._is_understood else None
        if latents is None:
            return ()
        fit = ColorFit(self._space, latents, len(frames_THWC))
        fit.add(frames_THWC if frames_THWC.dtype != np.uint8 else frames_THWC / np.float32(255))
        return fit.finish()

    def _clean(self) -> Tensor | None:
        """Clean latents (C, T, h, w) of the step that was heard last."""
        if self._heard is None:
            return None
        scheduler, given = self._heard
        clean = predicted_clean(
            scheduler, given["model_output"], given["timestep"], given["sample"]
        )
        return None if clean is None else clean_video(clean, self._space, self._settings)


def clean_video(latents: Tensor, space: LatentSpace, settings: Settings) -> Tensor:
    """Latents of the first video, from a pipeline's own layout.

    Raises:
        ValueError: no axis is that of the channels.
    """
    shape, channels = tuple(latents.shape), space.channels
    if len(shape) == 3 and shape[2] == channels:  # tokens
        height = settings.height // space.spatial_factor
        return rearrange(
            latents[0],
            "(t h w) c -> c t h w",
            h=height,
            w=settings.width // space.spatial_factor,
        )
    if len(shape) == 4 and shape[1] == channels:
        return rearrange(latents, "t c h w -> c t h w")
    axes = [axis for axis in range(1, len(shape)) if shape[axis] == channels]
    if len(shape) != 5 or not axes:
        raise ValueError(f"latents of shape {shape} have no axis of {channels} channels")
    axis = 2 if space.autoencoder in _FRAMES_FIRST and 2 in axes else axes[0]
    return latents[0].movedim(axis - 1, 0)
