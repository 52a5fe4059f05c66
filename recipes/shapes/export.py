"""Write the shipped folder from the trained stages: ``python -m recipes.shapes.export``.

The layout is that of real checkpoints: config.json and model.safetensors of the denoiser, the
autoencoder in ``vae/``, T5 in ``text_encoder/``, its vocabulary in ``tokenizer/``, and the
checkpoint's defaults in everyframe.json. Matrices are stored in float16, vectors in float32;
loading casts both to the plan's dtypes. The model card is written by hand and not changed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from everyframe.families.opensora.vae import VideoVAE
from recipes.shapes import autoencoder, denoiser, latents, temporal, text, world
from recipes.shapes.train import WORK

TARGET = Path(__file__).parents[2] / "src" / "everyframe" / "checkpoints" / "shapes"
DEFAULTS: dict[str, Any] = {
    "height": world.SMALL.side,
    "width": world.SMALL.side,
    "num_frames": world.SMALL.num_frames,
    "fps": world.FPS,
    "num_inference_steps": denoiser.NUM_STEPS,
    "guidance_scale": denoiser.GUIDANCE,
    "use_timestep_transform": True,
    "timestep_shift": denoiser.SHIFT,
    "max_length": text.MAX_LENGTH,
    "dtype": "float32",
}
LARGEST_BYTES = 16_000_000


def denoiser_config() -> dict[str, Any]:
    sizes = denoiser.SIZES
    return {
        "architectures": ["STDiT3"],
        "model_type": "STDiT3",
        "input_size": [None, None, None],
        "input_sq_size": sizes.input_sq_size,
        "in_channels": sizes.in_channels,
        "patch_size": list(sizes.patch_size),
        "hidden_size": sizes.hidden_size,
        "depth": sizes.depth,
        "num_heads": sizes.num_heads,
        "mlp_ratio": sizes.mlp_ratio,
        "caption_channels": sizes.caption_channels,
        "model_max_length": sizes.model_max_length,
        "qk_norm": sizes.qk_norm,
        "pred_sigma": sizes.pred_sigma,
    }


def vae_config(vae: VideoVAE) -> dict[str, Any]:
    sizes = temporal.TEMPORAL
    return {
        "architectures": ["VideoAutoencoderPipeline"],
        "model_type": "VideoAutoencoderPipeline",
        "vae_2d": {
            "type": "VideoAutoencoderKL",
            "config": autoencoder.SIZES,
            "scaling_factor": vae.config.spatial.scaling_factor,
            "micro_batch_size": temporal.PIECE,
        },
        "vae_temporal": {
            "type": "VAE_Temporal_SD",
            "in_out_channels": sizes.in_out_channels,
            "latent_embed_dim": sizes.latent_embed_dim,
            "embed_dim": sizes.embed_dim,
            "filters": sizes.filters,
            "num_res_blocks": sizes.num_res_blocks,
            "channel_multipliers": list(sizes.channel_multipliers),
            "temporal_downsample": list(sizes.temporal_downsample),
            "num_groups": sizes.num_groups,
        },
        "micro_frame_size": temporal.PIECE,
        "shift": vae.shift.flatten().tolist(),
        "scale": vae.scale.flatten().tolist(),
    }


def stored(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Matrices in float16, the rest in float32. Raises `ValueError` where float16 overflows."""
    small: dict[str, Tensor] = {}
    for name, value in state.items():
        dtype = torch.float16 if value.ndim > 1 and value.numel() > 64 else torch.float32
        small[name] = value.detach().to(dtype).contiguous().clone()
        if not bool(small[name].isfinite().all()):
            raise ValueError(f"{name} does not fit into {dtype}")
    return small


def write(target: Path, work: Path) -> int:
    """Writes what was trained in `work`, and never the card; returns the size in bytes of all that
    lies in `target`."""
    vae = latents.trained_vae(work)
    _part(target / "vae", vae_config(vae), vae.state_dict())
    if (work / "denoiser" / "best.pt").exists():
        _write_denoiser(target, work)
    return sum(file.stat().st_size for file in target.rglob("*") if file.is_file())


def _write_denoiser(target: Path, work: Path) -> None:
    """The denoiser, the text encoder that it was trained with, and the defaults of both."""
    modules: Any = denoiser.trained_in(work / "denoiser")
    t5 = modules["text"]
    _part(target, denoiser_config(), _without(modules["denoiser"], "rope."))
    config = t5.config.to_dict() | {"architectures": ["T5EncoderModel"]}
    config = {name: value for name, value in config.items() if value is not None}
    state = t5.state_dict()
    state.pop("encoder.embed_tokens.weight", None)  # one matrix under two names
    _part(target / "text_encoder", config, state)
    text.save_tokenizer(target / "tokenizer")
    (target / "everyframe.json").write_text(json.dumps(DEFAULTS, indent=2) + "\n")


def _without(module: nn.Module, prefix: str) -> dict[str, Tensor]:
    return {k: v for k, v in module.state_dict().items() if not k.startswith(prefix)}


def _part(folder: Path, config: dict[str, Any], state: dict[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    file = folder / "model.safetensors"
    save_file(stored(state), file, metadata={"format": "pt"})
    file.chmod(0o644)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=WORK, help="folder of the runs")
    parser.add_argument("--to", type=Path, default=TARGET, help="folder to write")
    given = parser.parse_args()
    size = write(given.to, given.work)
    print(f"{given.to}: {size / 1e6:.2f} MB")
    if size > LARGEST_BYTES:
        raise SystemExit(f"larger than {LARGEST_BYTES / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
