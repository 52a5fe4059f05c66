"""The shipped checkpoint: complete, small, strictly loaded, and it draws what it is asked for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from recipes.shapes import evaluate, reader, shipped, temporal, text, world

import everyframe
from everyframe.checkpoints.shapes_prompts import Scene, read_prompt
from everyframe.families.t5_tokenizer import load_tokenizer

PROMPTS = (
    "a red circle moves to the right on a blue background",
    "a green square on a grey background",
    "a yellow star moves up on a navy background",
    "a purple triangle turns on a black background",
    "a white square grows on a brown background",
    "an orange circle shrinks on a blue background",
    "a cyan star moves to the left on a black background",
    "a blue triangle moves down on a grey background",
)


def test_it_is_data_alone_and_under_16_megabytes() -> None:
    files = [file for file in shipped.FOLDER.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 16_000_000
    assert {file.suffix for file in files} <= {".json", ".safetensors", ".md"}
    assert (shipped.FOLDER / "MODEL_CARD.md").is_file()


def test_the_autoencoder_keeps_frames_and_the_object() -> None:
    whole, on_object = (row.value for row in evaluate.measure_autoencoder(6))
    # A broken weight or a wrong scale is worth tens of dB. The bar, 30 dB on both, is measured by
    # evaluate.py; the recipe's README says what is reached.
    assert whole > 30
    assert on_object > 25


def test_an_image_is_encoded_as_the_first_latent_frame_of_its_clip() -> None:
    vae = shipped.autoencoder()
    rng = np.random.default_rng(6)
    clips = world.random_clips(world.random_scenes(world.held_out_scenes(), 4, rng), rng)
    pixels = temporal.clip_frames(clips, world.SMALL)
    whole, alone = vae.encode(pixels), vae.encode(pixels[:, :, :1])
    # Latents have unit variance. Group norms see other frames beside the first one in each case,
    # so equality is trained and not built in; 0.1 is far below what a denoiser leaves.
    assert (whole[:, :, :1] - alone).detach().square().mean() ** 0.5 < 0.1


def test_the_tokenizer_takes_upper_case_and_unknown_words() -> None:
    tokenizer = load_tokenizer(shipped.FOLDER / "tokenizer")
    plain = tokenizer("a red circle moves up")["input_ids"]
    assert tokenizer("A RED circle, moves UP!")["input_ids"] == plain
    unknown = tokenizer("a zebra moves up")["input_ids"]
    assert tokenizer.decode([unknown[1]], skip_special_tokens=False) == "<unk>"
    assert tokenizer.decode([plain[-1]], skip_special_tokens=False) == "</s>"


def test_the_tokenizer_is_read_by_every_transformers_that_is_allowed(tmp_path: Path) -> None:
    """transformers 5 writes ``TokenizersBackend``, by which 4.57 made no video of `shapes`."""
    text.save_tokenizer(tmp_path)
    for folder in (tmp_path, shipped.FOLDER / "tokenizer"):
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        assert config["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_its_own_defaults_are_those_it_was_made_for() -> None:
    defaults = json.loads((shipped.FOLDER / "everyframe.json").read_text())
    assert (defaults["height"], defaults["width"]) == (world.SMALL.side, world.SMALL.side)
    assert (defaults["num_frames"], defaults["fps"]) == (world.SMALL.num_frames, world.FPS)
    assert defaults["num_inference_steps"] <= 30


@pytest.mark.slow
def test_it_draws_large_videos_too() -> None:
    prompt = "an orange circle moves down on a black background"
    video = everyframe.generate(
        prompt, model="shapes", seed=7, size="128x128", num_frames=34, num_inference_steps=12
    )
    assert not isinstance(video, list)
    read = reader.read(video.frames)
    assert read == reader.Reading("orange", "black", "circle", "down")


@pytest.mark.parametrize(
    ("prompts", "most"),
    [(PROMPTS[:3], 0), pytest.param(PROMPTS, 1, marks=pytest.mark.slow)],
    ids=["three", "eight"],
)
def test_it_draws_what_prompts_say(prompts: Sequence[str], most: int) -> None:
    """Seven of eight, one try each. The bars on 200 are measured by evaluate.py, and the model card
    says how far they are met: 95 % of clips are right in all four. All but the first have 12 steps
    in place of the 30 of its defaults: that is harder, and quicker. The first three are right."""
    wrong = []
    for prompt in prompts:
        fewer = {} if prompt is PROMPTS[0] else {"num_inference_steps": 12}
        scene = read_prompt(prompt)
        assert isinstance(scene, Scene)
        video = everyframe.generate(prompt, model="shapes", seed=7, **fewer)
        assert not isinstance(video, list)
        assert video.frames.shape == (17, 64, 64, 3)
        read = reader.read(video.frames)
        if not all(read.right(scene).values()):
            wrong.append((prompt, read))
    assert len(wrong) <= most, wrong
