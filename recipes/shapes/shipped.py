"""The shipped parts loaded through the product's own code: to measure them, or to train them on.

`unpack` lays them out as if the stages had just been trained, so that any stage can go on from
them where the folder of the runs is lost: ``python -m recipes.shapes.train --from-shipped``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from everyframe.checkpoints.folder import read_json
from everyframe.checkpoints.places import package_folder
from everyframe.checkpoints.strict import load_strictly
from everyframe.checkpoints.tensors import open_checkpoint
from everyframe.families.opensora.vae import VideoVAE
from everyframe.families.opensora.vae_config import VideoVAEConfig
from everyframe.families.opensora.weights import STDIT3_KEYS, T5_KEYS, VIDEO_VAE_KEYS

FOLDER = package_folder("checkpoints/shapes")


def autoencoder() -> VideoVAE:
    """The shipped autoencoder in float32."""
    vae = VideoVAE(VideoVAEConfig.from_json(read_json(FOLDER / "vae" / "config.json")))
    load_strictly(vae, open_checkpoint(FOLDER / "vae"), keys=VIDEO_VAE_KEYS)
    return vae.eval()


def denoiser() -> nn.ModuleDict:
    """The shipped denoiser and text encoder in float32, as the denoiser's stage trains them."""
    from recipes.shapes import denoiser as stage

    modules: Any = stage.build()
    load_strictly(modules["denoiser"], open_checkpoint(FOLDER), keys=STDIT3_KEYS)
    load_strictly(modules["text"], open_checkpoint(FOLDER / "text_encoder"), keys=T5_KEYS)
    return modules


def unpack(work: Path) -> None:
    """The shipped weights as the best of the temporal and the denoiser's stage in `work`.

    Raises `SystemExit` where these stages have been run there: nothing trained is overwritten.
    """
    vae = autoencoder()
    for stage, modules in (("temporal", nn.ModuleDict({"vae": vae})), ("denoiser", denoiser())):
        folder = work / stage
        if (folder / "best.pt").exists():
            raise SystemExit(f"{folder} holds trained weights; name another folder with --work")
        folder.mkdir(parents=True, exist_ok=True)
        kept = {"modules": modules.state_dict(), "step": 0, "measured": {}}
        torch.save(kept, folder / "best.pt")
    factor = vae.config.spatial.scaling_factor
    (work / "temporal" / "scaling.json").write_text(json.dumps({"scaling_factor": factor}))
