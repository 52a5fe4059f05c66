"""The shipped parts loaded through the product's own code, to measure them."""

from __future__ import annotations

from everyframe.checkpoints.folder import read_json
from everyframe.checkpoints.places import package_folder
from everyframe.checkpoints.strict import load_strictly
from everyframe.checkpoints.tensors import open_checkpoint
from everyframe.families.opensora.vae import VideoVAE
from everyframe.families.opensora.vae_config import VideoVAEConfig
from everyframe.families.opensora.weights import VIDEO_VAE_KEYS

FOLDER = package_folder("checkpoints/shapes")


def autoencoder() -> VideoVAE:
    """The shipped autoencoder in float32."""
    vae = VideoVAE(VideoVAEConfig.from_json(read_json(FOLDER / "vae" / "config.json")))
    load_strictly(vae, open_checkpoint(FOLDER / "vae"), keys=VIDEO_VAE_KEYS)
    return vae.eval()
