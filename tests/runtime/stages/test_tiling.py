"""Tiles that overlap and fade into each other: exact where a decoder is local, else near seams."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from everyframe.runtime.stages import tiling
from everyframe.runtime.stages.tiling import (
    decode_in_tiles,
    encode_in_tiles,
    fewer_frames,
    num_repeats,
    num_tiles,
    tile_savings,
)
from helpers import config_only_models

FACTOR = 2


def local(latents: Tensor) -> Tensor:
    """Each pixel of one latent alone."""
    return latents.repeat_interleave(FACTOR, -1).repeat_interleave(FACTOR, -2) ** 3


def reaching(latents: Tensor) -> Tensor:
    """Each pixel of the latents around it, zeros beyond the edge, as convolutions have it."""
    kernel = torch.full((1, 1, 3, 3), 1 / 9, dtype=latents.dtype)
    return local(F.conv2d(latents, kernel, padding=1))


@pytest.mark.parametrize("size", [(8, 8), (9, 13), (16, 7), (31, 8)])
def test_a_decoder_of_single_latents_gives_the_same(size: tuple[int, int]) -> None:
    latents = torch.randn(2, 3, *size, dtype=torch.float64)
    # The sum of the weights is divided out again: rounding of float64.
    assert torch.allclose(decode_in_tiles(local, latents, 8), local(latents), rtol=1e-12)


def test_what_fits_into_one_tile_is_decoded_as_it_is() -> None:
    latents = torch.randn(1, 1, 6, 8)
    for side in (0, 8, 64):
        assert torch.equal(decode_in_tiles(reaching, latents, side), reaching(latents))


def test_only_what_is_near_an_edge_of_a_tile_is_another() -> None:
    latents = torch.randn(1, 1, 8, 14, dtype=torch.float64)
    whole, tiled = reaching(latents), decode_in_tiles(reaching, latents, 8)
    # Two tiles, of the columns 0 to 7 and 6 to 13: their zeros are seen in columns 7 and 6 alone.
    differs = ((tiled - whole).abs() > 1e-12).any(dim=2)[0, 0]
    assert differs.nonzero().flatten().tolist() == [12, 13, 14, 15]


def mean_of_each(pixels: Tensor) -> Tensor:
    """A latent of its own pixels alone."""
    return F.avg_pool2d(pixels, FACTOR) ** 3


@pytest.mark.parametrize("size", [(16, 16), (18, 27), (33, 14)])
def test_an_encoder_of_single_places_gives_the_same(size: tuple[int, int]) -> None:
    """Also where rows or columns are over at the end, which no latent stands for."""
    pixels = torch.randn(2, 3, *size, dtype=torch.float64)
    whole = mean_of_each(pixels)
    tiled = encode_in_tiles(mean_of_each, pixels, FACTOR, 8)
    assert torch.allclose(tiled, whole, rtol=1e-12)
    assert torch.equal(encode_in_tiles(mean_of_each, pixels, FACTOR, 0), whole)


def test_no_more_than_a_tile_is_encoded_at_once() -> None:
    sizes: list[tuple[int, ...]] = []

    def watched(pixels: Tensor) -> Tensor:
        sizes.append(tuple(pixels.shape[-2:]))
        return mean_of_each(pixels)

    encode_in_tiles(watched, torch.zeros(1, 3, 144, 256), FACTOR, 32)
    assert set(sizes) == {(64, 64)}
    assert len(sizes) == num_tiles(72, 128, 32)
    sizes.clear()
    encode_in_tiles(watched, torch.zeros(1, 3, 144, 256), FACTOR, 32, most=2)
    assert len(sizes) == 2


def test_it_fades_from_one_tile_into_the_next() -> None:
    """Two tiles of different brightness give a ramp, with no step larger than its slope."""
    seen: list[int] = []

    def brighter(latents: Tensor) -> Tensor:
        seen.append(1)
        return torch.full((1, 1, 64, 64), float(len(seen)))

    row = decode_in_tiles(brighter, torch.zeros(1, 1, 32, 56), 32)[0, 0, 10]
    assert (row[0], row[-1]) == (1, 2)
    steps = row.diff()
    assert steps.min() >= -1e-6
    assert steps.max() < 1.01 / 16  # the overlap is 16 pixels wide


def test_no_more_than_a_tile_is_decoded_at_once() -> None:
    sizes: list[tuple[int, ...]] = []

    def watched(latents: Tensor) -> Tensor:
        sizes.append(tuple(latents.shape[-2:]))
        return local(latents)

    decode_in_tiles(watched, torch.zeros(1, 4, 72, 128), 32)
    assert set(sizes) == {(32, 32)}
    assert len(sizes) == num_tiles(72, 128, 32) == 15
    assert num_repeats(72, 128, 32) == 7.5
    assert num_repeats(8, 8, 32) == 1
    sizes.clear()
    decode_in_tiles(watched, torch.zeros(1, 4, 72, 128), 32, most=2)
    assert len(sizes) == 2


def test_savings_are_those_that_cut() -> None:
    settings = config_only_models.settings()
    assert not list(tile_savings(settings, 8, 16))
    found = list(tile_savings(settings, 40, 40))
    assert [saving.settings.saving(tiling.DECODE, 0) for saving in found] == [32, 16]
    assert all(saving.is_lossy and "lossy" in saving.message for saving in found)


def test_savings_of_encoding_are_for_its_stage_and_leave_decoding_alone() -> None:
    settings = config_only_models.settings()
    found = list(tile_savings(settings, 40, 40, tiling.ENCODE))
    assert [saving.settings.saving(tiling.ENCODE, 0) for saving in found] == [32, 16]
    assert {saving.stage for saving in found} == {"given frames"}
    assert not any(saving.settings.saving(tiling.DECODE, 0) for saving in found)
    assert {saving.stage for saving in tile_savings(settings, 40, 40)} == {"decode"}


def test_fewer_frames_come_by_halves_and_show_nowhere() -> None:
    found = list(fewer_frames(config_only_models.settings(), 5))
    assert [saving.settings.saving(tiling.FRAMES, 0) for saving in found] == [3, 2, 1]
    assert not any(saving.is_lossy or saving.stage for saving in found)
