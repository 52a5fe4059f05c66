"""Read the layout of Stability's single files (``svd.safetensors``, ``svd_xt.safetensors``).

Such a file holds all components and no config, so sizes are read from tensor shapes. What shapes
do not determine is taken from the release and reported. Layout:
Stability-AI/generative-models (``VideoUNet``, ``AutoencodingEngine``, ``GeneralConditioner``).
Only the header is read here. `weights.py` maps the tensor names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from everyframe.checkpoints.refuse_pickles import refuse_pickled_file
from everyframe.checkpoints.safetensors_header import SafetensorsHeader, read_header
from everyframe.core.errors import CheckpointError
from everyframe.families.svd.config import IMAGE_VAE, TEMPORAL_VAE, released

DENOISER = "model.diffusion_model."
DECODER = "first_stage_model."
PICTURE_ENCODER = "conditioner.embedders.3.encoder."
CLIP = "conditioner.embedders.0.open_clip.model.visual."

#: Channels per attention head of the released models; shapes do not determine them.
_HEAD, _CLIP_HEAD = 64, 80
#: Number of added conditions besides the timestep: frame rate, motion, image noise.
_NUM_CONDITIONS = 3
_DOWN = {True: "CrossAttnDownBlockSpatioTemporal", False: "DownBlockSpatioTemporal"}
_UP = {True: "CrossAttnUpBlockSpatioTemporal", False: "UpBlockSpatioTemporal"}


def is_single_file(path: Path) -> bool:
    """Whether `path` is a Stable Video Diffusion in one file, by the names in its header."""
    return path.suffix == ".safetensors" and _are_ours(read_header(path).tensors)


def refuse_pickled(path: Path) -> None:
    """Raise `CheckpointError` for a pickled single file, with how to convert it."""
    if path.suffix != ".ckpt":
        return
    from everyframe.checkpoints.torch_file import pickle_entries

    if _are_ours(pickle_entries(path)):
        refuse_pickled_file(path)


def _are_ours(names: Iterable[str]) -> bool:
    mixes = re.compile(re.escape(DENOISER) + r".*time_mixer\.mix_factor")
    return any(mixes.match(name) for name in names)


def frames_by_name(file_name: str) -> int:
    """Training frames of a file by its name: 25 for XT, 14 for the others.

    The weights of both have the same shapes, so only the name distinguishes them.
    """
    return 25 if "xt" in re.split(r"[^a-z0-9]+", file_name.lower()) else 14


def read_configs(path: Path) -> Mapping[str, Mapping[str, Any]]:
    """Configs of the components, in the form of a diffusers folder.

    Raises:
        CheckpointError: a tensor that determines the sizes is missing, or the denoiser is another
            model's (SV3D, which has the same names).
    """
    shapes = _Shapes(read_header(path))
    return {
        **released(),
        "unet": {**_unet(shapes), "num_frames": frames_by_name(path.stem)},
        "vae": _vae(shapes),
        "image_encoder": _image_encoder(shapes),
    }


class _Shapes:
    """Tensor shapes by name; a missing name raises an error that names it."""

    def __init__(self, header: SafetensorsHeader) -> None:
        self.header = header

    def __getitem__(self, name: str) -> tuple[int, ...]:
        fact = self.header.tensors.get(name)
        if fact is None:
            raise CheckpointError(
                f"{self.header.path} is a Stable Video Diffusion in one file, and lacks {name!r}; "
                "get the whole file"
            )
        return fact.shape

    def __contains__(self, name: str) -> bool:
        return name in self.header.tensors

    def count(self, pattern: str) -> int:
        """How many numbers ``0, 1, …`` replace ``#`` in `pattern` among the names."""
        expression = re.compile(re.escape(pattern).replace(r"\#", r"(\d+)") + r"\.")
        matches = (expression.match(name) for name in self.header.tensors)
        return 1 + max((int(match[1]) for match in matches if match), default=-1)


def _unet(shapes: _Shapes) -> dict[str, Any]:
    widths, layers, attends, context = _levels(shapes)
    conditions = shapes[f"{DENOISER}label_emb.0.0.weight"][1]
    if conditions % _NUM_CONDITIONS:
        raise CheckpointError(
            f"{shapes.header.path}: its denoiser is conditioned on {conditions} channels, "
            "which are not those of frame rate, motion and noise; it is another model of the same "
            "make (SV3D?), and only Stable Video Diffusion can be run here"
        )
    return {
        **released()["unet"],
        "in_channels": shapes[f"{DENOISER}input_blocks.0.0.weight"][1],
        "out_channels": shapes[f"{DENOISER}out.2.weight"][0],
        "block_out_channels": widths,
        "layers_per_block": layers,
        "down_block_types": [_DOWN[each] for each in attends],
        "up_block_types": [_UP[each] for each in reversed(attends)],
        "num_attention_heads": [max(1, each // _HEAD) for each in widths],
        "cross_attention_dim": context,
        "addition_time_embed_dim": conditions // _NUM_CONDITIONS,
        "projection_class_embeddings_input_dim": conditions,
        "sample_size": None,
    }


def _levels(shapes: _Shapes) -> tuple[list[int], list[int], list[bool], int]:
    """Width, number of layers and attention of each level; and channels of the image."""
    widths: list[int] = []
    layers: list[int] = []
    attends: list[bool] = []
    context = 0
    begins = True
    for number in range(1, shapes.count(f"{DENOISER}input_blocks.#")):
        block = f"{DENOISER}input_blocks.{number}"
        if f"{block}.0.op.weight" in shapes:
            begins = True
            continue
        if begins:
            widths.append(shapes[f"{block}.0.out_layers.3.weight"][0])
            layers.append(0)
            attends.append(f"{block}.1.norm.weight" in shapes)
            begins = False
        layers[-1] += 1
        if attends[-1]:
            context = shapes[f"{block}.1.transformer_blocks.0.attn2.to_k.weight"][1]
    return widths, layers, attends, context


def _vae(shapes: _Shapes) -> dict[str, Any]:
    decoder = f"{DECODER}decoder"
    num_levels = shapes.count(f"{decoder}.up.#")
    together = f"{decoder}.conv_out.time_mix_conv.weight" in shapes
    config = {
        **released()["vae"],
        "_class_name": TEMPORAL_VAE if together else IMAGE_VAE,
        "block_out_channels": [
            shapes[f"{decoder}.up.{level}.block.0.conv1.weight"][0] for level in range(num_levels)
        ],
        "down_block_types": ["DownEncoderBlock2D"] * num_levels,
        "layers_per_block": shapes.count(f"{decoder}.up.0.block.#") - 1,
        "latent_channels": shapes[f"{decoder}.conv_in.weight"][1],
    }
    return config if together else {**config, "up_block_types": ["UpDecoderBlock2D"] * num_levels}


def _image_encoder(shapes: _Shapes) -> dict[str, Any]:
    hidden, _, patch, _ = shapes[f"{CLIP}conv1.weight"]
    num_positions = shapes[f"{CLIP}positional_embedding"][0]
    return {
        **released()["image_encoder"],
        "hidden_size": hidden,
        "intermediate_size": shapes[f"{CLIP}transformer.resblocks.0.mlp.c_fc.weight"][0],
        "num_hidden_layers": shapes.count(f"{CLIP}transformer.resblocks.#"),
        "num_attention_heads": max(1, hidden // _CLIP_HEAD),
        "patch_size": patch,
        "image_size": round((num_positions - 1) ** 0.5) * patch,
        "projection_dim": shapes[f"{CLIP}proj"][1],
    }
