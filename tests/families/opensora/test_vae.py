"""Open-Sora's autoencoders against upstream's golden vectors and diffusers called directly."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL
from safetensors.torch import load_file

from everyframe.core.errors import CheckpointError, InputError
from everyframe.families.opensora.temporal_vae import TemporalVAE
from everyframe.families.opensora.vae import ImageVAE, VideoVAE
from everyframe.families.opensora.vae_config import (
    ImageVAEConfig,
    TemporalVAEConfig,
    VideoVAEConfig,
)

GOLDEN = Path(__file__).parents[2] / "golden" / "opensora_vae_temporal_v1_2"

# Factor 4, 6 spatial channels, 5 finished ones: nothing may lean on the released 8, 4 and 4.
SPATIAL = {
    "down_block_types": ["DownEncoderBlock2D"] * 3,
    "up_block_types": ["UpDecoderBlock2D"] * 3,
    "block_out_channels": [8, 8, 16],
    "layers_per_block": 1,
    "latent_channels": 6,
    "norm_num_groups": 4,
}
PIPELINE: dict[str, Any] = {
    "model_type": "VideoAutoencoderPipeline",
    "architectures": ["VideoAutoencoderPipeline"],
    "transformers_version": "4.36.2",
    "torch_dtype": "float32",
    "freeze_vae_2d": False,
    "cal_loss": False,
    "vae_2d": {
        "type": "VideoAutoencoderKL",
        "from_pretrained": "PixArt-alpha/pixart_sigma_sdxlvae_T5_diffusers",
        "subfolder": "vae",
        "micro_batch_size": 4,
        "config": SPATIAL,
    },
    "vae_temporal": {
        "type": "VAE_Temporal_SD",
        "from_pretrained": None,
        "in_out_channels": 6,
        "latent_embed_dim": 6,
        "embed_dim": 5,
        "filters": 8,
        "num_res_blocks": 1,
        "num_groups": 4,
    },
    "shift": [0.0, 0.1, -0.2, 0.3, 0.4],
    "scale": [1, 2, 3, 0.5, 4],
    "micro_frame_size": 17,
}


@pytest.fixture(scope="module")
def vae() -> VideoVAE:
    torch.manual_seed(0)
    return VideoVAE(VideoVAEConfig.from_json(PIPELINE)).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def image_vae() -> ImageVAE:
    torch.manual_seed(1)
    return ImageVAE(ImageVAEConfig(autoencoder=SPATIAL)).eval().requires_grad_(False)


def clip(num_frames: int, height: int = 8, width: int = 12, batch: int = 2) -> torch.Tensor:
    source = torch.Generator().manual_seed(num_frames)
    return torch.rand(batch, 3, num_frames, height, width, generator=source) * 2 - 1


# Summing in another order moves the last bits (about 1e-6 here), a wrong formula 0.1 and more.
@pytest.mark.parametrize("output", ["moments", "z", "reconstruction"])
def test_temporal_vae_matches_upstream(output: str) -> None:
    config = TemporalVAEConfig.from_json(json.loads((GOLDEN / "config.json").read_text()))
    model = TemporalVAE(config)
    model.load_state_dict(load_file(GOLDEN / "weights.safetensors"), strict=True)
    golden = load_file(GOLDEN / "io.safetensors")
    with torch.no_grad():
        got = {
            "moments": lambda: torch.cat(model.moments(golden["x"]), dim=1),
            "z": lambda: model.encode(golden["x"]),
            "reconstruction": lambda: model.decode(golden["z"], golden["x"].shape[2]),
        }[output]()
    assert got.shape == golden[output].shape
    assert (got - golden[output]).abs().max() < 2e-4


def test_released_sizes() -> None:
    with torch.device("meta"):
        model = VideoVAE(VideoVAEConfig())
    temporal = model.temporal_vae.state_dict()
    assert len(temporal) == 267
    assert sum(tensor.numel() for tensor in temporal.values()) == 309_687_144
    prefixes = {name.split(".")[0] for name in model.state_dict()}
    assert prefixes == {"spatial_vae", "temporal_vae", "shift", "scale"}
    assert model.shift.shape == (1, 4, 1, 1, 1)
    assert "spatial_vae.module.decoder.conv_in.weight" in model.state_dict()


# (frames, latent frames): 5 for each 17, and a quarter, rounded up, of what is left.
SIZES = [(1, 1), (4, 1), (5, 2), (16, 4), (17, 5), (18, 6), (34, 10), (51, 15)]


@pytest.mark.parametrize(("num_frames", "latent_frames"), SIZES)
def test_sizes_there_and_back(vae: VideoVAE, num_frames: int, latent_frames: int) -> None:
    video = clip(num_frames)
    latents = vae.encode(video)
    assert vae.config.latent_size(num_frames, 8, 12) == (latent_frames, 2, 3)
    assert latents.shape == (2, 5, latent_frames, 2, 3)
    assert vae.decode(latents, num_frames).shape == video.shape


def test_released_latent_size() -> None:
    config = VideoVAEConfig()
    assert config.latent_size(51, 240, 426) == (15, 30, 53)
    assert [config.latent_frames(n) for n in (102, 204, 408)] == [30, 60, 120]
    assert ImageVAEConfig().latent_size(16, 256, 256) == (16, 32, 32)


@pytest.mark.parametrize("num_frames", [1, 17, 21, 34])
def test_pieces_make_up_the_whole(vae: VideoVAE, image_vae: ImageVAE, num_frames: int) -> None:
    for model in (vae, image_vae):
        latents = model.encode(clip(num_frames))
        pieces = model.config.pieces(num_frames)
        frames = list(model.decode_pieces(latents, num_frames))
        assert [part.shape[2] for part in frames] == [piece.num_frames for piece in pieces]
        assert pieces[0].frame_start == 0
        assert pieces[-1].frame_stop == num_frames
        assert torch.equal(torch.cat(frames, dim=2), model.decode(latents, num_frames))
        last = model.decode_piece(latents, pieces[-1])
        assert torch.equal(last, frames[-1])


def test_pieces_know_nothing_of_each_other(vae: VideoVAE) -> None:
    video = clip(34)
    latents = vae.encode(video)
    assert torch.equal(latents[:, :, 5:], vae.encode(video[:, :, 17:]))
    other = latents.clone()
    other[:, :, :5] += 1
    assert torch.equal(vae.decode(other, 34)[:, :, 17:], vae.decode(latents, 34)[:, :, 17:])


def test_spatial_stage_is_diffusers_own(image_vae: ImageVAE) -> None:
    reference = AutoencoderKL(**SPATIAL).eval().requires_grad_(False).double()
    reference.load_state_dict(image_vae.module.state_dict())
    video = clip(5)
    latents = image_vae.encode(video)
    frames = video.double().transpose(1, 2).reshape(10, 3, 8, 12)
    expected = reference.encode(frames).latent_dist.mean * 0.18215
    got = latents.transpose(1, 2).reshape(expected.shape)
    # float32 against float64; the values are of order 1.
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)
    pixels = reference.decode(expected / 0.18215).sample
    got = image_vae.decode(latents).transpose(1, 2).reshape(pixels.shape)
    torch.testing.assert_close(got.double(), pixels, atol=1e-5, rtol=1e-5)


def test_stages_and_normalisation(vae: VideoVAE) -> None:
    video = clip(17)
    spatial = vae.spatial_vae.encode(video)
    shift = torch.tensor(PIPELINE["shift"]).view(-1, 1, 1, 1)
    scale = torch.tensor(PIPELINE["scale"]).view(-1, 1, 1, 1)
    temporal = vae.temporal_vae.encode(spatial)
    torch.testing.assert_close(vae.encode(video), (temporal - shift) / scale)
    undone = vae.temporal_vae.decode(vae.encode(video) * scale + shift, 17)
    torch.testing.assert_close(vae.decode(vae.encode(video), 17), vae.spatial_vae.decode(undone))


def test_a_picture_that_stands_still_is_seen_once(
    vae: VideoVAE, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = torch.rand(1, 3, 1, 16, 24, generator=torch.Generator().manual_seed(4)) * 2 - 1
    expected = vae.encode(picture.expand(-1, -1, 17, -1, -1))
    seen = []
    encode = vae.spatial_vae.module.encode
    monkeypatch.setattr(
        vae.spatial_vae.module, "encode", lambda rows: seen.append(len(rows)) or encode(rows)
    )
    found = vae.encode_still(picture, 17)
    assert seen == [1]
    # The same sums; a convolution of one frame may add them in another order.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_gradients_flow() -> None:
    torch.manual_seed(0)
    model = VideoVAE(VideoVAEConfig.from_json(PIPELINE))
    video = clip(5, batch=1).requires_grad_()
    model.decode(model.encode(video), 5).square().mean().backward()
    assert video.grad is not None
    assert video.grad.abs().max() > 0
    without = [name for name, p in model.named_parameters() if p.grad is None]
    assert without == []


def test_wrong_number_of_latent_frames(vae: VideoVAE) -> None:
    latents = vae.encode(clip(17))
    with pytest.raises(InputError, match="18 frames has 6 latent frames, but 5"):
        vae.decode_pieces(latents, 18)  # at once, before anything is iterated
    with pytest.raises(InputError, match="1 frame or more, got 0"):
        vae.config.latent_size(0, 8, 8)
    with pytest.raises(InputError, match="4 pixels or more"):
        vae.config.latent_size(17, 3, 8)


def test_config_reads_upstreams_file() -> None:
    released = {**PIPELINE, "shift": [-0.10, 0.34, 0.27, 0.98], "scale": [3.85, 2.32, 2.33, 3.06]}
    released["vae_2d"] = {k: v for k, v in PIPELINE["vae_2d"].items() if k != "config"}
    released["vae_temporal"] = {"type": "VAE_Temporal_SD", "from_pretrained": None}
    assert VideoVAEConfig.from_json(released) == VideoVAEConfig()
    # What transformers writes along when a model is saved again, and upstream's own default.
    released |= {"_name_or_path": "hpcai-tech/OpenSora-VAE-v1.2", "auto_map": {}}
    released["vae_temporal"] |= {"activation_fn": "swish"}
    assert VideoVAEConfig.from_json(released) == VideoVAEConfig()
    small = VideoVAEConfig.from_json(PIPELINE)
    assert small.spatial.scaling_factor == 0.18215
    assert small.spatial_factor == 4
    assert math.isclose(small.scale[3], 0.5)
    assert small.latent_channels == 5


def test_one_number_shifts_and_scales_all_channels() -> None:
    """Upstream's class has 0.0 and 1.0 where its config says nothing."""
    config = VideoVAEConfig.from_json({**PIPELINE, "shift": 0.5, "scale": 2.0})
    assert (config.shift, config.scale) == ((0.5,) * 5, (2.0,) * 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"micro_frame_sise": 17}, "micro_frame_sise.*did you mean 'micro_frame_size'"),
        ({"model_type": "DC_AE"}, "model_type is 'DC_AE'; supported: 'VideoAutoencoderPipeline'"),
        ({"vae_2d": {**PIPELINE["vae_2d"], "tile": 3}}, "unknown key in vae_2d: 'tile'"),
        ({"vae_temporal": {"type": "VAE_Temporal_SD", "depth": 3}}, "in temporal: 'depth'"),
        (
            {"vae_temporal": {"activation_fn": "relu"}},
            "activation_fn is 'relu'; supported: 'swish'",
        ),
        ({"shift": [0.0]}, "shift has 1 numbers, but the latents have 5 channels"),
        ({"vae_temporal": {"type": "VAE_Temporal_SD"}}, "4 channels|takes 4"),
        ({"micro_frame_size": 0}, "micro_frame_size must be 1 or more"),
    ],
)
def test_config_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        VideoVAEConfig.from_json({**PIPELINE, **change})


def test_unknown_autoencoder_size_is_named() -> None:
    with pytest.raises(CheckpointError, match="'latent_channel'; did you mean 'latent_channels'"):
        ImageVAE(ImageVAEConfig(autoencoder={"latent_channel": 4}))


def test_image_config_reads_diffusers_file() -> None:
    data = {"_class_name": "AutoencoderKL", "_diffusers_version": "0.4", **SPATIAL}
    config = ImageVAEConfig.from_json({**data, "scaling_factor": 0.13025})
    # Upstream multiplies by 0.18215 whatever the file says.
    assert config.scaling_factor == 0.18215
    assert ImageVAE(config).module.config.latent_channels == 6
    with pytest.raises(CheckpointError, match="AsymmetricAutoencoderKL"):
        ImageVAEConfig.from_json({"_class_name": "AsymmetricAutoencoderKL"})
