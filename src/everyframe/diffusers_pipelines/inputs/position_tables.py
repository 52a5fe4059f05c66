"""Limits of tables of positions: lengths and sizes beyond which a denoiser fails in its first step.

The tables are in the components' configs. A caller's pipeline may stretch them (AnimateDiff's
FreeNoise), so these limits are those of files alone.
"""

from __future__ import annotations

from everyframe.core.errors import InputError
from everyframe.diffusers_pipelines.inputs.defaults import PipelineDefaults, is_number


def check_positions(sizes: PipelineDefaults, frames: int, height: int, width: int) -> None:
    """Raise `InputError` for a length or size that the denoiser has no positions for."""
    denoiser, name = sizes.denoiser, sizes.interface.class_name
    motion = [config.get("motion_max_seq_length") for config in sizes.configs.values()]
    most = min(filter(is_number, motion), default=frames)
    if frames > most:
        raise InputError(f"{name} makes at most {most} frames, got num_frames {frames}")
    latte = denoiser.get("video_length")
    if is_number(latte) and frames not in (1, latte):
        raise InputError(
            f"{name} makes {latte} frames, as its checkpoint was trained, or 1; "
            f"got num_frames {frames}"
        )
    factor = sizes.spatial_factor
    latent = denoiser.get("sample_height"), denoiser.get("sample_width")
    is_fixed = bool(denoiser.get("use_learned_positional_embeddings")) and all(
        map(is_number, latent)
    )
    if is_fixed and (height // factor, width // factor) != latent:
        only = "x".join(str(side * factor) for side in reversed(latent))
        raise InputError(f"{name} learned the positions of {only} alone, got {width}x{height}")
