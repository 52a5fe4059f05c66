"""The text encoder's stage: captions are drawn and distinguished, also by the order of words."""

from __future__ import annotations

import numpy as np
import torch
from recipes.shapes import shipped, text, understand, world

from everyframe.checkpoints.shapes_prompts import SHAPES, Scene
from everyframe.checkpoints.strict_load import load_strictly
from everyframe.checkpoints.tensor_file import open_checkpoint
from everyframe.families.t5_tokenizer import T5_KEYS


def test_a_value_has_an_axis_of_its_own() -> None:
    axes = understand.axes()
    torch.testing.assert_close(axes @ axes.T, torch.eye(len(axes)), atol=1e-5, rtol=0)
    targets = understand.encode_scenes(
        [Scene("star", "cyan", "navy", "up"), Scene("star", "red", "navy", "up")]
    )
    assert targets.sum(1).tolist() == [4, 4]
    assert (targets[0] != targets[1]).sum() == 2


def test_wordings_are_many_and_of_their_own_scene() -> None:
    scenes = list(world.train_scenes()[:6])
    words, known = text.Wordings(scenes, 20, 3), text.tokenizer()
    assert words.rows_of([scenes[4], scenes[1]]).tolist() == [4, 1]
    for scene, ids_KL in zip(scenes, words.ids_SKL, strict=True):
        decoded = {known.decode(ids, skip_special_tokens=True) for ids in ids_KL}
        assert len(decoded) > 10
        assert all(any(word in one for word in SHAPES[scene.shape]) for one in decoded)
    ids, mask = words.draw(words.rows_of(scenes), np.random.default_rng(0))
    assert torch.equal(mask, ids != 0)


def test_the_shipped_encoder_tells_motions_by_the_order_of_words() -> None:
    encoder = text.encoder()
    load_strictly(encoder, open_checkpoint(shipped.FOLDER / "text_encoder"), keys=T5_KEYS)
    prompts = [
        "a red square moves from left to right on a black background",
        "a red square moves from right to left on a black background",
        "a red square moves from top to bottom on a black background",
        "a red square moves from bottom to top on a black background",
        "a red square grows on a black background",
        "a red square shrinks on a black background",
    ]
    ids, mask = text.tokenize(prompts, text.tokenizer())
    states = encoder(input_ids=ids, attention_mask=mask.long()).last_hidden_state
    first = sum(len(understand.ATTRIBUTES[name]) for name in ("shape", "colour", "background"))
    decoded = (states @ understand.axes().T)[..., first:].argmax(-1)
    meant = ["right", "left", "down", "up", "growing", "shrinking"]
    for row, keeps, motion in zip(decoded, mask, meant, strict=True):
        names = {understand.ATTRIBUTES["motion"][i] for i in row[keeps]}
        assert names == {motion}
