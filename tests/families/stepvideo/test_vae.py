"""Step-Video's autoencoder: its sizes off the tensors, its pieces, and seams as they stream."""

from __future__ import annotations

import pytest
import torch

from everyframe.core.errors import CheckpointError, InputError
from everyframe.families.stepvideo.vae import Decoder, Encoder, SeamBlender, StepVAE
from everyframe.families.stepvideo.vae_config import StepVAEConfig
from everyframe.runtime.components.meta_init import build_on_meta, count_elements

TINY = StepVAEConfig(
    z_channels=2,
    encoder_widths=(32, 32, 32, 64),
    encoder_blocks=1,
    decoder_widths=(32, 32, 32, 64),
    decoder_blocks=1,
)


def tiny() -> StepVAE:
    torch.manual_seed(0)
    return StepVAE(TINY).eval().requires_grad_(False)


def shapes(vae: StepVAE) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in vae.state_dict().items()}


def test_released_sizes() -> None:
    """Counted by others in upstream's own modules: 109.9 and 388.9 million in 262 tensors."""
    config = StepVAEConfig()
    encoder, decoder = (
        count_elements(build_on_meta(lambda k=kind: k(config))) for kind in (Encoder, Decoder)
    )
    assert round(sum(encoder.values()) / 1e6, 1) == 109.9
    assert round(sum(decoder.values()) / 1e6, 1) == 388.9
    assert len(encoder) + len(decoder) == 262


@pytest.mark.parametrize("config", [StepVAEConfig(), TINY])
def test_sizes_are_read_off_the_tensors(config: StepVAEConfig) -> None:
    assert StepVAEConfig.from_shapes(shapes(build_on_meta(lambda: StepVAE(config)))) == config


def test_other_autoencoders_are_reported() -> None:
    with pytest.raises(CheckpointError, match="no autoencoder of Step-Video; wanted is version 2"):
        StepVAEConfig.from_shapes({"encoder.conv_in.weight": (128, 3, 3, 3)})
    with pytest.raises(CheckpointError, match="first autoencoder"):
        StepVAEConfig.from_shapes({"decoder.up.3.block.0.conv1.conv.weight": (1,)})
    found = shapes(build_on_meta(lambda: StepVAE(TINY)))
    del found["encoder.conv_in.conv.weight"]
    with pytest.raises(CheckpointError, match=r"lacks 'encoder\.conv_in\.conv\.weight'"):
        StepVAEConfig.from_shapes(found)


@pytest.mark.parametrize(
    ("frames", "latents", "lengths"),
    [
        (1, 1, [1]),
        (9, 2, [9]),
        (17, 3, [17]),
        (18, 4, [17, 1]),
        (26, 5, [17, 9]),
        (34, 6, [17, 17]),
        (204, 36, [17] * 12),
    ],
)
def test_pieces(frames: int, latents: int, lengths: list[int]) -> None:
    config = StepVAEConfig()
    pieces = config.pieces(frames)
    assert [piece.num_frames for piece in pieces] == lengths
    assert config.latent_frames(frames) == latents == pieces[-1].latent_stop
    assert config.decoded_frames(latents) == frames


@pytest.mark.parametrize(
    ("frames", "nearest"), [(2, "1 or 9"), (16, "9 or 17"), (20, "18 or 26"), (200, "196 or 204")]
)
def test_lengths_that_can_not_be_name_the_nearest(frames: int, nearest: str) -> None:
    with pytest.raises(InputError, match=f"got {frames}; try {nearest}$"):
        StepVAEConfig().pieces(frames)


@pytest.mark.parametrize("rest", [5, 8, 13, 16])
def test_lengths_that_can_not_be_encoded(rest: int) -> None:
    with pytest.raises(InputError, match=f"{17 + rest} frames leave {rest}"):
        tiny().encode(torch.zeros(1, 3, 17 + rest, 16, 16))


def test_seams_while_streaming_are_those_of_the_whole() -> None:
    """Against upstream's rule, written out on all frames at once."""
    torch.manual_seed(2)
    pieces = [torch.randn(1, 3, length, 2, 2, dtype=torch.float64) for length in (17, 17, 17, 1)]
    whole = torch.cat(pieces, dim=2)
    for border in (17, 34, 51):
        whole[:, :, border] = 0.6 * whole[:, :, border] + 0.4 * whole[:, :, border - 1]
        whole[:, :, border - 1] = 0.6 * whole[:, :, border - 1] + 0.4 * whole[:, :, border]
    seams = SeamBlender(dim=2)
    parts = [seams.add(piece, is_last=piece is pieces[-1]) for piece in pieces]
    assert [part.shape[2] for part in parts] == [16, 17, 17, 2]
    torch.testing.assert_close(torch.cat(parts, dim=2), whole, rtol=0, atol=1e-15)
    assert torch.equal(SeamBlender(dim=2).add(pieces[0], is_last=True), pieces[0])


def test_a_piece_knows_nothing_of_others() -> None:
    vae = tiny()
    latents = torch.randn(1, 2, 5, 2, 2)
    changed = latents.clone()
    changed[:, :, 3:] += 1
    a, b = (list(vae.decode_pieces(each)) for each in (latents, changed))
    assert torch.equal(a[0], b[0])
    assert not torch.equal(a[1], b[1])
    assert [piece.shape for piece in a] == [(1, 3, 17, 32, 32), (1, 3, 9, 32, 32)]
    with pytest.raises(InputError, match="5 latent frames are 26 frames, not 34"):
        vae.decode(latents, 34)
