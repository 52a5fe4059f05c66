"""Both autoencoders: HunyuanVideo's against diffusers' own, the DC-AE's tiles, their sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from everyframe.core.errors import CheckpointError, InputError
from everyframe.core.plan import Precision
from everyframe.families.opensora2 import vae as vaes
from everyframe.families.opensora2.vae_config import DCAEConfig, HunyuanVAEConfig, VAEConfig
from everyframe.precision.cast_hooks import add_cast_hooks
from everyframe.precision.upcast import Upcast

HUNYUAN = HunyuanVAEConfig(
    latent_channels=2, block_out_channels=(8, 8, 16, 16), layers_per_block=1, norm_num_groups=4,
    sample_size=32, sample_frames=16,
)  # fmt: skip
DCAE = DCAEConfig(
    latent_channels=4, widths=(4, 4, 8, 32), encoder_depths=(1, 1, 1, 1),
    decoder_depths=(1, 2, 1, 1), attention=(False, False, False, True),
    time=(False, True, True, False), sample_frames=16, overlap=0.25,
)  # fmt: skip


def built(config: VAEConfig) -> Any:
    torch.manual_seed(0)
    vae = vaes.build(config).double().eval().requires_grad_(False)
    for parameter in vae.parameters():
        parameter.copy_(torch.randn_like(parameter) * parameter[0].numel() ** -0.5)
    return vae


def diffusers_vae(vae: nn.Module) -> Any:
    config = HUNYUAN
    theirs: Any = AutoencoderKLHunyuanVideo(
        latent_channels=config.latent_channels, block_out_channels=config.block_out_channels,
        layers_per_block=config.layers_per_block, norm_num_groups=config.norm_num_groups,
    )  # fmt: skip
    theirs = theirs.double().eval()
    theirs.load_state_dict(vae.state_dict())
    theirs.use_framewise_encoding = theirs.use_framewise_decoding = False
    theirs.tile_sample_min_height = theirs.tile_sample_min_width = config.sample_size
    theirs.tile_sample_stride_height = theirs.tile_sample_stride_width = 24
    return theirs


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("frames", [1, 9])
def test_hunyuans_autoencoder_equals_diffusers(frames: int, tiled: bool) -> None:
    vae = built(HUNYUAN)
    config = replace(HUNYUAN, tiles_sides=tiled, tiles_frames=False)
    theirs = diffusers_vae(vae)
    theirs.use_tiling = tiled
    pixels = torch.rand(1, 3, frames, 40, 56, dtype=torch.float64) * 2 - 1
    latents = torch.randn(1, 2, (frames - 1) // 4 + 1, 5, 7, dtype=torch.float64)
    with torch.no_grad():
        mean = theirs.encode(pixels).latent_dist.mode()
        wanted = theirs.decode(latents / config.scale_factor).sample
        assert (vaes.encode(vae, config, pixels) / config.scale_factor - mean).abs().max() < 1e-9
        assert (vaes.decode(vae, config, latents) - wanted).abs().max() < 1e-9
    assert wanted.std() > 0.01


@pytest.mark.parametrize("frames", [13, 17, 21])
def test_tiles_of_frames_equal_diffusers(frames: int) -> None:
    """17 frames are a tile and its first one: upstream makes two of them, 13 are one."""
    vae = built(HUNYUAN)
    config = replace(HUNYUAN, sample_frames=16, tiles_sides=False, tiles_frames=True)
    theirs = diffusers_vae(vae)
    theirs.use_framewise_encoding = theirs.use_framewise_decoding = True
    theirs.tile_sample_min_num_frames, theirs.tile_sample_stride_num_frames = 16, 12
    pixels = torch.rand(1, 3, frames, 16, 16, dtype=torch.float64) * 2 - 1
    latents = torch.randn(1, 2, (frames - 1) // 4 + 1, 2, 2, dtype=torch.float64)
    with torch.no_grad():
        mean = theirs.encode(pixels).latent_dist.mode()
        wanted = theirs.decode(latents / config.scale_factor).sample
        assert (vaes.encode(vae, config, pixels) / config.scale_factor - mean).abs().max() < 1e-9
        assert (vaes.decode(vae, config, latents) - wanted).abs().max() < 1e-9


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The number of elements of the largest tensor that is made."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, Tensor):
                self.numel = max(self.numel, each.numel())
        return out


def test_no_mask_of_all_tokens_is_built() -> None:
    """A tile of the released sizes: 33 latent frames of 32 x 32; its mask has 1.1e9 entries."""
    with torch.device("meta"):
        vae: Any = vaes.build(HunyuanVAEConfig())
        tokens = torch.zeros(1, 512, 33, 32, 32)
        theirs = AutoencoderKLHunyuanVideo()
    with Largest() as ours, torch.no_grad():
        vae.decoder.mid_block(tokens)
    # The plain kernel stores the scores of one frame.
    assert ours.numel <= 2 * tokens.numel()
    with Largest() as upstream, torch.no_grad():
        theirs.decoder.mid_block(tokens)
    assert upstream.numel == (33 * 32 * 32) ** 2


def test_a_frame_does_not_see_later_ones() -> None:
    vae = built(HUNYUAN)
    block = vae.decoder.mid_block.attentions[0]
    x = torch.randn(1, 16, 4, 2, 3, dtype=torch.float64)
    changed = x.clone()
    # A change that the group norm's statistics don't see: two positions trade places.
    changed[:, :, 3, 0, 0], changed[:, :, 3, 1, 2] = x[:, :, 3, 1, 2], x[:, :, 3, 0, 0]
    with torch.no_grad():
        same = block(x) - x, block(changed) - changed
    assert torch.allclose(same[0][:, :, :3], same[1][:, :, :3], atol=1e-12)
    # Of its own frame a token sees all, in any order.
    assert torch.allclose(same[0][:, :, 3, 0, 1], same[1][:, :, 3, 0, 1], atol=1e-12)
    changed = x.clone()
    changed[:, :, 0, 0, 0], changed[:, :, 3, 0, 0] = x[:, :, 3, 0, 0], x[:, :, 0, 0, 0]
    with torch.no_grad():
        other = block(changed) - changed
    assert not torch.allclose(same[0][:, :, 1], other[:, :, 1], atol=1e-3)


@pytest.mark.parametrize(
    "frames",
    [
        8,
        *(
            pytest.param(n, marks=[pytest.mark.slow] * (n % 12 != 0 and n < 68))
            for n in range(12, 72, 4)
        ),
    ],
)
def test_every_frame_comes_out_of_the_tiles(frames: int) -> None:
    """Upstream loses three frames where the last tile is one latent frame."""
    config = replace(DCAE, tiles_sides=False)
    vae = built(config)
    latents = torch.randn(1, 4, config.latent_frames(frames), 1, 1, dtype=torch.float64)
    tiles = config.decode_tiles()
    assert tiles.frames is not None
    with torch.no_grad():
        pixels = vaes.decode(vae, config, latents)
        video = torch.rand(1, 3, frames, 32, 32, dtype=torch.float64)
        # `DCAE` has four levels, so a latent is eight pixels wide here.
        latent_frames = vaes.encode(vae, replace(config, tiles_frames=False), video).shape[2]
    assert pixels.shape[2] == frames
    assert latent_frames == latents.shape[2]
    if latents.shape[2] > tiles.frames.size:
        upstream = replace(tiles, frames=replace(tiles.frames, least=1))
        lost = vaes.apply_in_tiles(lambda z: vaes.decode_tile(vae, config, z), latents, upstream)
        is_short = latents.shape[2] % tiles.frames.step == 1
        assert (lost.shape[2] == frames) == (not is_short)


def test_a_repaired_block_of_the_dcae_fits_the_layers_around_it() -> None:
    """Its result is float32, and the next convolution's weights are bfloat16."""
    vae = built(DCAE).float()
    add_cast_hooks(vae, Precision("bfloat16", "bfloat16"), ("encoder", "decoder"))
    pixels = torch.rand(1, 3, 8, 32, 32) * 2 - 1
    with torch.no_grad():
        plain = vae.encoder(pixels)
        for stage in list(vae.encoder.stages)[:-1]:
            repair = Upcast(stage.op_list[0], torch.float32)
            repaired = vae.encoder(pixels)
            repair.undo()
            assert 0 < (repaired - plain).norm() < 0.1 * plain.norm()


def test_tiles_of_the_released_sizes() -> None:
    video = HunyuanVAEConfig().decode_tiles().spans((33, 72, 128))
    assert [len(each) for each in video] == [1, 3, 6]
    assert [len(each) for each in HunyuanVAEConfig().decode_tiles().spans((33, 24, 42))] == [
        1,
        1,
        2,
    ]
    # Upstream tiles both sides as soon as one is longer than a tile.
    assert [len(each) for each in HunyuanVAEConfig().decode_tiles().spans((1, 32, 40))] == [1, 2, 2]
    assert [len(each) for each in HunyuanVAEConfig().decode_tiles().spans((1, 32, 32))] == [1, 1, 1]
    deep = DCAEConfig().decode_tiles().spans((32, 18, 32))
    assert deep[0] == (
        range(8), range(6, 14), range(12, 20), range(18, 26), range(24, 32), range(30, 32)
    )  # fmt: skip
    assert DCAEConfig().decode_tiles().spans((31, 8, 8))[0][-1] == range(24, 31)
    assert DCAEConfig().encode_tiles().spans((64, 8, 8))[0] == (
        range(32), range(24, 56), range(48, 64)
    )  # fmt: skip


@pytest.mark.parametrize(
    ("config", "parameters", "tensors"),
    [(HunyuanVAEConfig(), 246_478_803, 248), (DCAEConfig(), 459_462_147, 339)],
)
def test_sizes_follow_from_shapes(config: Any, parameters: int, tensors: int) -> None:
    with torch.device("meta"):
        state = vaes.build(config).state_dict()
    assert (sum(each.numel() for each in state.values()), len(state)) == (parameters, tensors)
    shapes = {name: tuple(each.shape) for name, each in state.items()}
    assert type(config).from_shapes(shapes) == config


@pytest.mark.parametrize("config", [HunyuanVAEConfig, DCAEConfig])
def test_foreign_tensors_are_refused(config: Any) -> None:
    with pytest.raises(CheckpointError, match=r"no autoencoder of Open-Sora 2\.0"):
        config.from_shapes({"blocks.0.weight": (2, 2)})


@pytest.mark.parametrize(
    ("config", "frames", "near"),
    [
        (HUNYUAN, 128, "125 or 129"), (HUNYUAN, 2, "1 or 5"), (DCAE, 4, "1 or 8"),
        (DCAE, 129, "128 or 132"),
    ],
)  # fmt: skip
def test_lengths_that_cannot_be_are_refused(config: VAEConfig, frames: int, near: str) -> None:
    with pytest.raises(InputError, match=near):
        config.latent_frames(frames)
