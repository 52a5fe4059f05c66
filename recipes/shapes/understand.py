"""Stage 3: the text encoder (T5) learns the meaning of captions, before the denoiser is trained.

Real text-to-video models use a text encoder that was trained on text. A T5 with random weights
would have to learn words through the denoiser, which would take most of the denoiser's training.
Here every token's state learns to predict the four attributes of its scene, with one fixed axis
for each value. With a trained classification layer instead, states of some values stayed close
together, and the denoiser confused them: growing and shrinking, for example, so half of such clips
went the wrong way. The denoiser's training does not change the encoder.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from everyframe.checkpoints.shapes_prompts import BACKGROUNDS, COLOURS, MOTIONS, SHAPES, Scene
from recipes.shapes import text, world
from recipes.shapes.loop import Task

ATTRIBUTES = {
    "shape": tuple(SHAPES), "colour": tuple(COLOURS),
    "background": tuple(BACKGROUNDS), "motion": tuple(MOTIONS),
}  # fmt: skip
#: How far a state lies along the axis of a value that is named; a state is about 11 long.
SAID = 3.0
#: Logits by which one head prefers the word before, whatever it is: what follows "to" is where it
#: goes. The encoder's attention becomes all but a choice of one word, and position biases that
#: start near 0 never get a gradient: "from right to left" was then as "from left to right" is.
LOOK_BACK = 60.0


def build() -> nn.ModuleDict:
    """The encoder, one of its heads turned to the word before."""
    encoder = text.encoder()
    # All layers share the first one's biases, (buckets, heads), where bucket 1 is one word back.
    first = encoder.encoder.block[0].layer[0].SelfAttention
    with torch.no_grad():
        first.relative_attention_bias.weight[1, -1] += LOOK_BACK
    return nn.ModuleDict({"text": encoder})


def axes() -> Tensor:
    """(values, channels): orthonormal, one for each value of each attribute, fixed."""
    count = sum(len(names) for names in ATTRIBUTES.values())
    size = text.T5_SIZES["d_model"]
    drawn = torch.randn(size, count, generator=torch.Generator().manual_seed(50))
    return torch.linalg.qr(drawn).Q.T.contiguous()


def encode_scenes(scenes: list[Scene]) -> Tensor:
    """(B, values): 1 at the values of each scene."""
    rows = [
        [float(getattr(scene, name) == value) for name in ATTRIBUTES for value in ATTRIBUTES[name]]
        for scene in scenes
    ]
    return torch.tensor(rows)


def task(num_steps: int = 2000, batch: int = 256, device: str = "cpu") -> Task:
    """The stage for `loop.train`; the score is the share of captions of never-trained scenes
    in which every token has all values right."""
    modules = build().to(device)
    encoder: Any = modules["text"]
    along_VC = axes().to(device)
    scenes, unseen = world.train_scenes(), list(world.held_out_scenes())
    words, others = text.Wordings(scenes, 100, 51, device), text.Wordings(unseen, 8, 52, device)
    targets, answers = encode_scenes(list(scenes)).to(device), encode_scenes(unseen).to(device)

    def along(ids: Tensor, mask: Tensor) -> Tensor:
        """(B, L, values): how far each token's state lies along each axis."""
        states = encoder(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        return torch.as_tensor(states) @ along_VC.T

    def draw(step: int) -> tuple[Tensor, ...]:
        rng = np.random.default_rng([53, step])
        rows = world.sent(torch.from_numpy(rng.integers(len(scenes), size=batch)), device)
        return (*words.draw(rows, rng), targets[rows])

    def loss(ids: Tensor, mask: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        error = (along(ids, mask) - SAID * target[:, None]).square().sum(-1)
        return (error * mask).sum() / mask.sum(), {}

    def validate(_: nn.ModuleDict) -> dict[str, float]:
        rows = torch.arange(len(unseen), device=device).repeat_interleave(8)
        ids = others.ids_SKL.flatten(0, 1)
        found, mask = along(ids, ids != 0), ids != 0
        right = torch.ones_like(mask)
        sizes = [len(names) for names in ATTRIBUTES.values()]
        for part, answer in zip(
            found.split(sizes, -1), answers[rows].split(sizes, -1), strict=True
        ):
            right &= part.argmax(-1) == answer.argmax(-1)[:, None]
        return {"score": float((right | ~mask).all(dim=1).float().mean())}

    return Task(
        modules, draw, loss, validate, clips_per_step=batch, num_steps=num_steps,
        learning_rate=2e-3, num_validations=8, print_every=250,
    )  # fmt: skip
