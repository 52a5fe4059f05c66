"""What the denoiser is trained on: noise levels, given frames, texts, and weights of cells."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from recipes.shapes import denoiser, latents, temporal, text, world
from recipes.shapes.world import FORMATS, LARGE, SMALL, Format

from everyframe.samplers import rectified_flow


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_noise_is_mostly_high_and_higher_where_there_is_more_to_a_video(form: Format) -> None:
    levels = denoiser.noise_levels(form, 4000, np.random.default_rng(0))
    assert 0 < levels.min() < 0.2
    assert levels.max() < 1
    # Half of four fifths are above the mean of the logits; the rest is even.
    ratio = float(rectified_flow.size_ratio(form.side, form.side, form.num_frames))
    middle = ratio * np.exp(denoiser.NOISE_MEAN) / (1 + ratio * np.exp(denoiser.NOISE_MEAN))
    above = float((levels > middle).float().mean())
    assert abs(above - (0.4 + 0.2 * (1 - middle))) < 0.03


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_frames_are_given_by_their_odds(form: Format) -> None:
    num_latents = form.num_frames // 17 * 5
    mask = denoiser.to_denoise(form, num_latents, 20_000, np.random.default_rng(0))
    found = {tuple(row.nonzero()[:, 0].tolist()) for row in ~mask.unique(dim=0)}
    expected = {
        (*range(first), *range(num_latents - last, num_latents))
        for first, last, _ in denoiser.GIVEN[form]
    }
    assert found == {(), *expected}
    share = float((~mask).any(dim=1).float().mean())
    assert abs(share - sum(odds for *_, odds in denoiser.GIVEN[form])) < 0.01


def _material(form: Format, count: int) -> tuple[denoiser.Material, text.Wordings]:
    scenes = list(world.train_scenes()[:count])
    generator = torch.Generator().manual_seed(0)
    shape = 12, form.num_frames // 17 * 5, form.side // 8, form.side // 8
    clips = torch.randn(count, *shape, generator=generator)
    kept, words = latents.Latents(clips, clips[:, :, :1] + 1, scenes), text.Wordings(scenes, 2, 1)
    reached = np.arange(1, count + 1) / count
    none = torch.zeros(count, dtype=torch.long)
    empty = torch.zeros(1, *shape)
    return denoiser.Material(form, kept, words.rows_of(scenes), empty, none, reached), words


def test_an_image_that_is_given_is_encoded_alone() -> None:
    material, words = _material(LARGE, 200)
    rows = torch.arange(200)
    batch = denoiser.draw_batch(material, rows, words, np.random.default_rng(0))
    alone = ~batch.mask[:, 0] & batch.mask[:, 1]
    several = ~batch.mask[:, 0] & ~batch.mask[:, 1]
    assert alone.any()
    assert several.any()
    # What is given has no noise on it, and weighs nothing.
    assert torch.equal(batch.x_t[alone, :, :1], material.latents.first[alone])
    assert torch.equal(batch.x_t[several, :, :1], material.latents.clips[several, :, :1])
    assert not batch.weight[alone, :, :1].any()
    assert batch.weight[alone, :, 1:-1].all()  # the last one may be given as well


def test_cells_that_hold_or_change_weigh_more() -> None:
    material, words = _material(SMALL, 4)
    material.latents.clips.zero_()
    material.latents.clips[0, 0, :, 1, 1] = 2.0  # an object that rests
    material.latents.clips[1, 0, 2, 3, 3] = 2.0  # one that is there for a moment
    batch = denoiser.draw_batch(material, torch.arange(4), words, np.random.default_rng(0))
    assert batch.mask[:2].all()
    still, moment = batch.weight[0, 0, 4], batch.weight[1, 0]
    assert still[1, 1] == 1 + denoiser.OBJECT_WEIGHT
    assert still[0, 0] == 1
    assert moment[2, 3, 3] == 1 + denoiser.OBJECT_WEIGHT + denoiser.CHANGE_WEIGHT
    assert moment[4, 3, 3] == 1 + denoiser.CHANGE_WEIGHT


def test_texts_are_those_of_the_product_and_some_are_left_out() -> None:
    """The recipe never cuts a batch of texts, the product does: what is answered is the same."""
    modules = denoiser.build()
    for parameter in modules.parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(1))
    scenes = list(world.held_out_scenes()[:4])
    ids, mask = text.Wordings(scenes, 1, 1).ids_SKL[:, 0], None
    ids = torch.nn.functional.pad(ids, (0, 3))
    mask = ids != 0
    drop = torch.tensor([True, False, False, True])
    context = denoiser.contexts(modules, ids, mask, drop)
    hidden = modules["text"](input_ids=ids, attention_mask=mask.long()).last_hidden_state
    hidden[drop] = modules["denoiser"].null_text()[: ids.shape[1]]  # type: ignore[operator]
    theirs = modules["denoiser"].context(hidden, mask)  # type: ignore[operator]
    assert theirs.blocks[0].keys.shape[2] < context.blocks[0].keys.shape[2]
    x, s = torch.randn(4, 12, 5, 8, 8), torch.rand(4)
    answers = [denoiser.velocity(modules, x, s, SMALL, each, None) for each in (context, theirs)]
    # Sums in another order: some millionths of values of about ten.
    assert (answers[0] - answers[1]).abs().max() < 1e-4


def test_latents_are_cached_for_the_autoencoder_that_made_them(tmp_path: Path) -> None:
    """Those of an autoencoder that was trained on since are other ones."""
    torch.manual_seed(0)
    vaes = [temporal.build().eval() for _ in range(2)]
    first, other = (latents.cached_latents(tmp_path, vae, SMALL, 2) for vae in vaes)
    assert not torch.equal(first.clips, other.clips)
    again = latents.cached_latents(tmp_path, vaes[0], SMALL, 2)
    assert torch.equal(again.clips, first.clips)
    assert again.scenes == first.scenes
    files = sorted(tmp_path.iterdir())
    assert len(files) == 2
    vaes[0].spatial_vae.module.decoder.conv_in.weight.data.zero_()  # polished
    latents.cached_latents(tmp_path, vaes[0], SMALL, 2)
    assert sorted(tmp_path.iterdir()) == files


def test_latents_that_were_half_written_are_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(kept: object, file: Path) -> None:
        Path(file).write_bytes(b"PK")
        raise KeyboardInterrupt

    vae = temporal.build().eval()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            latents.cached_latents(tmp_path, vae, SMALL, 2)
    assert len(latents.cached_latents(tmp_path, vae, SMALL, 2).scenes) >= 2
