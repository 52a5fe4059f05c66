"""The shipped autoencoder, loaded by everyframe's own code, to measure and to train further."""

from __future__ import annotations

import json
from pathlib import Path

from everyframe.checkpoints.folder import package_folder, read_json
from everyframe.checkpoints.strict_load import load_strictly
from everyframe.checkpoints.tensor_file import open_checkpoint
from everyframe.families.opensora.checkpoint import VIDEO_VAE_KEYS
from everyframe.families.opensora.vae import VideoVAE
from everyframe.families.opensora.vae_config import VideoVAEConfig
from recipes.shapes.loop import save

FOLDER = package_folder("checkpoints/shapes")


def autoencoder() -> VideoVAE:
    """The shipped autoencoder in float32."""
    vae = VideoVAE(VideoVAEConfig.from_json(read_json(FOLDER / "vae" / "config.json")))
    load_strictly(vae, open_checkpoint(FOLDER / "vae"), keys=VIDEO_VAE_KEYS)
    return vae.eval()


def unpack(work: Path) -> None:
    """Writes the shipped autoencoder as what stage 2 left in `work`, if nothing lies there."""
    folder = work / "temporal"
    if (folder / "best.pt").exists():
        return
    vae = autoencoder()
    folder.mkdir(parents=True, exist_ok=True)
    scaling = {"scaling_factor": vae.config.spatial.scaling_factor}
    (folder / "scaling.json").write_text(json.dumps(scaling))
    modules = {f"vae.{name}": value for name, value in vae.state_dict().items()}
    save({"modules": modules, "step": 0, "measured": {}}, folder / "best.pt")
