"""Components of a pipeline for the plan: weight sizes, preferred precision, working memory.

Sizes come from the headers of the weight files; no module is built. All components are in memory
while a pipeline's `__call__` runs, so all belong to one stage. `working_bytes` is a rough estimate
(the widest tensors of one block, and the frames) for pipelines that have no dry run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from everyframe.checkpoints.tensor_file import TensorFile
from everyframe.core.plan import Settings
from everyframe.diffusers_pipelines.files.checkpoint import ComponentFolder, PipelineFiles
from everyframe.diffusers_pipelines.files.component_classes import component_class
from everyframe.diffusers_pipelines.files.component_tensors import tensor_files
from everyframe.diffusers_pipelines.inputs.defaults import PipelineDefaults, denoisers
from everyframe.precision.dtypes import dtype_name
from everyframe.precision.islands import outside_of, present
from everyframe.precision.policy import ComponentNeeds
from everyframe.runtime.interface import Component

STAGE = "pipeline"

#: Direct children of denoisers that modulate every block or end the stream: at least float32.
_STEERING = (
    "time_embed", "time_embedding", "time_embedder", "time_text_embed", "adaln_single",
    "norm_out.linear", "proj_out", "conv_norm_out", "conv_out",
)  # fmt: skip
_LAST, _LAST_NORM = "norm_out", ("norm_out.norm", "norm_out.weight")
#: Feed-forward layers of T5 whose values exceed float16's range.
_T5_RANGE = ("*.wo",)
#: Approximate pixels of one VAE tile in diffusers.
_TILE = 256 * 256
_DTYPES = ("bfloat16", "float16")


@dataclass(frozen=True)
class ComponentWeights:
    """A component's weights by its file headers: elements of each tensor, precision needs.

    `packed_bytes` are those of matrices that a GGUF file stores in blocks.
    """

    name: str
    source: str
    num_elements: Mapping[str, int]
    needs: ComponentNeeds
    packed_bytes: Mapping[str, int] = field(default_factory=dict)


def held(files: PipelineFiles) -> tuple[ComponentWeights, ...]:
    """Every component with weights, in the order of the index; reads all of their headers."""
    return tuple(_weights_of(part, files) for part in files.models)


def _weights_of(part: ComponentFolder, files: PipelineFiles) -> ComponentWeights:
    opened = tensor_files(part)
    source = f"{files.where}/{part.name}" if part.tensors is None else part.weights[0].name
    packed = {
        name: size
        for file in opened
        for name in file
        if name not in part.patches and (size := file.packed_bytes(name)) is not None
    }
    return ComponentWeights(part.name, source, _count(opened), needs_of(part, opened), packed)


def needs_of(part: ComponentFolder, opened: Sequence[TensorFile]) -> ComponentNeeds:
    """Precision that a component needs, by its class, its config and its `tensor_files`."""
    count = _count(opened)
    return ComponentNeeds(
        part.name,
        sum(count.values()),
        islands=islands_of(part.name, component_class(part), count),
        range_islands=present(_T5_RANGE, count) if "T5" in part.class_name else (),
        prefers=prefers(part.name, _main_dtype(opened)),
        force_upcast=bool(part.config().get("force_upcast")),
        decoder_islands=outside_of("decoder", count) if has_frames(part.name) else (),
    )


def _count(opened: Sequence[TensorFile]) -> dict[str, int]:
    """Elements of each tensor."""
    return {name: math.prod(file.shape(name)) for file in opened for name in file}


def components(
    parts: Sequence[ComponentWeights], sizes: PipelineDefaults, settings: Settings
) -> tuple[Component, ...]:
    """The same components in the plan's form, for a video of these settings."""
    return tuple(
        Component(
            name=part.name,
            title=part.name.replace("_", " "),
            stage=STAGE,
            source=part.source,
            num_elements=part.num_elements,
            needs=part.needs,
            working_bytes=partial(working_bytes, part.name, sizes, settings),
            packed_bytes=part.packed_bytes,
        )
        for part in parts
    )


def prefers(name: str, stored: str) -> str:
    """Preferred dtype of a component: float32 for decoders of frames and sound.

    Their output is the product. All others prefer the dtype they are stored in; stored float32
    counts as "anything" (bfloat16).
    """
    if "vae" in name or "vocoder" in name:
        return "float32"
    return stored if stored in _DTYPES else "bfloat16"


def has_frames(name: str) -> bool:
    """Whether a component of that name codes frames."""
    return "vae" in name and "audio" not in name


def _main_dtype(opened: Sequence[TensorFile]) -> str:
    """The dtype of most bytes, by torch's name."""
    totals: dict[str, int] = {}
    for file in opened:
        for name in file:
            dtype = dtype_name(file.dtype(name))
            totals[dtype] = totals.get(dtype, 0) + file.entry(name).num_bytes
    return max(totals, key=lambda dtype: totals[dtype]) if totals else "float32"


def islands_of(name: str, cls: Any, parameters: Mapping[str, int]) -> tuple[str, ...]:
    """Submodules that stay in float32: the class' own list, and what modulates a denoiser.

    The class lists names that may occur anywhere. Only those with parameters become islands: a norm
    without parameters gets its input's dtype and computes in it.
    """
    own = getattr(cls, "_keep_in_fp32_modules", None) or ()
    patterns = [part for word in own for part in dict.fromkeys(_parts(word, parameters))]
    if denoisers((name,)):
        patterns += _STEERING
        # A norm without parameters has nothing to be kept in float32: it takes what it is given.
        if present(_LAST_NORM, parameters):
            patterns.append(_LAST)
    return present(patterns, parameters)


def _parts(word: str, parameters: Mapping[str, int]) -> Iterator[str]:
    """Paths with that name that have parameters; numbered blocks become ``*``."""
    for name in parameters:
        before, found, _ = f".{name}.".partition(f".{word}.")
        if found:
            path = f"{before}.{word}".lstrip(".").split(".")
            yield ".".join("*" if step.isdigit() else step for step in path)


def working_bytes(name: str, sizes: PipelineDefaults, settings: Settings, element: int) -> int:
    """Estimated bytes a component needs beside its weights while it runs; 0 for text encoders."""
    pixels = settings.height * settings.width * settings.num_frames
    if denoisers((name,)):
        return _of_denoiser(sizes, pixels, element, 1 if settings.guidance_scale <= 1 else 2)
    if name in ("vae", "diffusion_decoder"):
        return _of_decoder(sizes, settings, pixels, element)
    return 0


def _of_denoiser(sizes: PipelineDefaults, pixels: int, element: int, branches: int) -> int:
    """Stream, its normed copy, queries, keys, values and a feed-forward four times as wide."""
    config = sizes.denoiser
    patch = config.get("patch_size", 1)
    side = int(patch[-1] if isinstance(patch, (list, tuple)) else patch or 1)
    per_token = (sizes.spatial_factor * side) ** 2 * (sizes.temporal_factor or 1)
    heads, width = config.get("num_attention_heads", 16), config.get("attention_head_dim", 64)
    channels = config.get("block_out_channels")
    if isinstance(channels, (list, tuple)):
        hidden = int(max(channels))
    else:
        hidden = int(_first(heads) * _first(width))
    return branches * (pixels // per_token) * hidden * (4 * 4 + 10 * element)


def _of_decoder(sizes: PipelineDefaults, settings: Settings, pixels: int, element: int) -> int:
    """Two copies of the last level's widest tensor for one latent frame, and all frames."""
    channels = sizes.vae.get("block_out_channels") or [sizes.vae.get("base_dim") or 128]
    area = settings.height * settings.width
    if settings.option("vae_tiling", False):
        area = min(area, _TILE)
    at_once = area * max(sizes.temporal_factor or 1, 1)
    return 2 * at_once * int(_first(channels)) * 2 * element + pixels * 3 * 4 * 2


def _first(value: Any) -> int:
    return int(value[0] if isinstance(value, (list, tuple)) else value)
