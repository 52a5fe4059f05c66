"""Sampling settings that a step-distilled model or LoRA was made for. Plain data, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True)
class SamplingPreset:
    """Settings of a step-distilled model; those that the person sets win.

    Attributes:
        title: what it is.
        classes: classes of the denoisers that it is for.
        file: regular expression found in the name of its file, in lower case.
        num_inference_steps: steps of the sampler.
        guidance_scale: guidance; None for the model's own.
        shift: shift of a uniform schedule, sampled by flow-matching Euler; None for the model's own
            sampler.
        sigmas: the schedule itself, if it is not uniform; for this number of steps alone.
        source: where its makers say so.
    """

    title: str
    classes: tuple[str, ...]
    file: str
    num_inference_steps: int
    guidance_scale: float | None
    source: str
    shift: float | None = None
    sigmas: tuple[float, ...] = ()

    @property
    def has_schedule(self) -> bool:
        """Whether it replaces the model's sampler."""
        return self.shift is not None or bool(self.sigmas)

    def unshifted_sigmas(self, num_steps: int) -> list[float]:
        """Noise levels of so many steps, before `shift`; 0 at the end is left out."""
        if len(self.sigmas) == num_steps:
            return list(self.sigmas)
        return [1 - step / num_steps for step in range(num_steps)]

    @property
    def note(self) -> str:
        """What it is and sets, for the user."""
        return f"known as {self.title}, so it is sampled with {self} ({self.source})"

    def __str__(self) -> str:
        parts = [f"{self.num_inference_steps} steps"]
        if self.guidance_scale is not None:
            parts.append(f"guidance {self.guidance_scale:g}")
        if self.shift is not None:
            parts.append(f"shift {self.shift:g}")
        if self.sigmas:
            parts.append(f"sigmas {', '.join(f'{each:g}' for each in self.sigmas)}")
        return ", ".join(parts)


@runtime_checkable
class PresetSpec(Protocol):
    """A model whose sampling settings can have other defaults."""

    @property
    def denoiser_classes(self) -> Sequence[str]:
        """Class of each denoiser."""
        ...

    def with_preset(self: Any, preset: SamplingPreset, file: str) -> Any:
        """The same model with the preset's defaults; `file` is what it was recognised by."""
        ...
