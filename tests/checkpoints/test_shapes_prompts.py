"""Which prompts `shapes` takes; the recipe's own captions must all be among them."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from everyframe.checkpoints import shapes_prompts
from everyframe.checkpoints.shapes_prompts import Refusal, Scene, read_prompt

sys.path.insert(0, str(Path(__file__).parents[2]))


@pytest.mark.parametrize(
    ("prompt", "scene"),
    [
        (
            "a red circle moves to the right on a blue background",
            Scene("circle", "red", "blue", "right"),
        ),
        ("A BLUE STAR SPINS OVER GRAY!", Scene("star", "blue", "grey", "turning")),
        ("a red star turns clockwise", Scene("star", "red", "black", "turning")),
        (
            "blue square, navy blue background, shrinking",
            Scene("square", "blue", "navy", "shrinking"),
        ),
        ("a green triangle", Scene("triangle", "green", "black", "still")),
        ("the violet disc does not move, on brown", Scene("circle", "purple", "brown", "still")),
        (
            "an orange star moves from left to right in front of a dark blue screen",
            Scene("star", "orange", "navy", "right"),
        ),
    ],
)
def test_prompts_inside_the_world(prompt: str, scene: Scene) -> None:
    assert read_prompt(prompt) == scene


@pytest.mark.parametrize(
    ("prompt", "word"),
    [
        ("a cat on a beach", "cat"),
        ("a red circle and a blue square", "2 shapes"),
        ("two red circles", "two"),
        ("a red circle on a green background", "green"),
        ("a red circle moves right then moves up", "2 motions"),
        ("a red and yellow star", "2 colours"),
        ("a circle on black", "no colour"),
        ("something red", "something"),
        ("red", "no shape"),
        ("a blue star on blue", "can't be seen"),
        ("a red circle turns", "turning circle"),
        ("a pink circle on black", "pink"),
        ("a red red circle", "2 colours"),
        ("", "no shape"),
    ],
)
def test_prompts_outside_of_it_are_refused_with_the_reason(prompt: str, word: str) -> None:
    read = read_prompt(prompt)
    assert isinstance(read, Refusal)
    assert word in read.reason


@pytest.mark.parametrize("word", ["a", "the", "plain", "on", "navy", "on the", "moves"])
def test_a_long_prompt_is_read_in_no_time(word: str) -> None:
    """A server reads as many letters: with fillers it took 13 seconds, and nobody else ran."""
    prompt = f"{word} " * (32_000 // (len(word) + 1))
    began = time.process_time()
    assert isinstance(read_prompt(prompt), Refusal)
    assert time.process_time() - began < 1


def test_whatever_the_card_offers_is_read() -> None:
    """Each word of its lists, and each motion as the card writes it."""
    card = (Path(shapes_prompts.__file__).parent / "shapes" / "MODEL_CARD.md").read_text()
    offered = card.split("**What it draws.**")[1].split(". No turning circle")[0]
    shapes, colours, grounds, motions = (
        re.split(r", | or ", each) for each in " ".join(offered.split()).split("; ")[:4]
    )
    motions = [re.sub("^(left|up|down)$", r"moving \1", each) for each in motions]
    read = [read_prompt(f"a {each} star") for each in colours]
    read += [read_prompt(f"a red {each}") for each in shapes]
    read += [read_prompt(f"a red star on {each.removeprefix('on ')}") for each in grounds]
    read += [read_prompt(f"a red star {each}") for each in motions]
    assert [each for each in read if isinstance(each, Refusal)] == []
    assert {each.motion for each in read[-len(motions) :]} == {*shapes_prompts.MOTIONS}


def test_every_caption_of_the_recipe_is_read_back() -> None:
    from recipes.shapes import captions, world

    rng = np.random.default_rng(0)
    for scene in world.all_scenes():
        for text in (captions.caption(scene, rng), captions.plain_caption(scene)):
            assert read_prompt(text) == scene, text
