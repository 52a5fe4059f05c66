"""What the denoiser is trained on: noise levels, given frames, and words that lie too close."""

from __future__ import annotations

import numpy as np
import torch
from recipes.shapes import apart, captions, denoiser, latents, text, world

from everyframe.checkpoints.shapes_prompts import Scene


def _latents(count: int) -> latents.Latents:
    generator = torch.Generator().manual_seed(0)
    clips = torch.randn(count, 12, 5, 8, 8, generator=generator)
    return latents.Latents(clips, clips[:, :, :1] + 1, list(world.train_scenes()[:count]))


def test_early_clips_are_noised_highly_and_nothing_of_them_is_given() -> None:
    early = torch.arange(200) % 2 == 0
    rows, rng = np.arange(200), np.random.default_rng(0)
    drawn = denoiser.noised(_latents(200), rows, rng, early)
    assert drawn.mask[early].all()
    assert drawn.s[early].min() > denoiser.EARLY[0]
    assert drawn.s[~early].min() < 0.5
    assert 0.1 < 1 - drawn.mask[~early, 0].float().mean() < 0.4


def test_an_image_that_is_given_is_encoded_alone() -> None:
    kept = _latents(200)
    drawn = denoiser.noised(
        kept, np.arange(200), np.random.default_rng(0), torch.zeros(200, dtype=torch.bool)
    )
    alone = ~drawn.mask[:, 0] & drawn.mask[:, 1]
    assert alone.any()
    assert torch.equal(drawn.x0[alone, :, :1], kept.first[alone])
    assert torch.equal(drawn.x0[~alone], kept.clips[~alone])


class _Plain(text.Captions):
    """Says each scene in the words in which a teacher is asked."""

    def __call__(
        self, scenes: list[Scene], rng: np.random.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return text.tokenize([captions.plain_caption(scene) for scene in scenes], self.tokenizer)


def test_what_is_right_already_is_learned_from_the_denoiser_that_has_it_right() -> None:
    """Followed in every motion, a copy of the teacher has nothing to learn; another one has."""
    torch.manual_seed(0)
    teacher, other = denoiser.build().eval(), denoiser.build().eval()
    for modules in (teacher, other):
        for parameter in modules.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
    some, words = _latents(4), _Plain()
    empty = {scene.background: torch.zeros(12, 5, 8, 8) for scene in some.scenes}
    kept = denoiser.Draws({}, kept=tuple({scene.motion for scene in some.scenes}))

    def loss(modules: torch.nn.Module, draws: denoiser.Draws) -> float:
        arguments = (some, np.arange(4), words, [1], empty, draws, teacher)
        return float(denoiser.batch_loss(modules, *arguments).detach())

    assert loss(teacher, kept) == 0
    assert loss(other, kept) > 0.01
    assert loss(teacher, denoiser.Draws({})) > 0.01


def test_values_that_lie_close_get_directions_of_their_own() -> None:
    means = dict(zip([("motion", name) for name in "abc"], torch.eye(16)[:3] * 3, strict=True))
    means["shape", "d"] = means["motion", "a"]  # of another attribute: may lie anywhere
    assert apart.codes_apart(means) == {}
    means["motion", "c"] = means["motion", "b"] + 0.1
    codes = apart.codes_apart(means)
    assert set(codes) == {("motion", "b"), ("motion", "c")}
    pushed = torch.stack(list(codes.values()))
    torch.testing.assert_close(pushed @ pushed.T, apart.PUSH**2 * torch.eye(2))
    # Across everything that values differ in so far: other captions stay what they are.
    assert (pushed @ torch.stack(list(means.values())).T).abs().max() < 1e-5
