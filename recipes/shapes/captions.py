"""Captions: one scene in many wordings, from the word tables of `shapes_prompts`.

A test checks that `read_prompt` of `everyframe.checkpoints.shapes_prompts` reads each one back.
"""

from __future__ import annotations

import numpy as np

from everyframe.checkpoints.shapes_prompts import (
    BACKGROUNDS,
    COLOURS,
    DEFAULT_BACKGROUND,
    DEFAULT_MOTION,
    MOTIONS,
    PREPOSITIONS,
    SHAPES,
    Scene,
)

_OBJECTS = (
    "a {c} {s}", "the {c} {s}", "one {c} {s}", "{c} {s}", "a single {c} {s}", "a bright {c} {s}",
)  # fmt: skip
_GROUNDS = (
    "{p} a {b} background", "{p} a {b} backdrop", "{p} {b}", "with a {b} background",
    "{p} a plain {b} background", "{p} the {b} background", "{p} a {b} screen",
)  # fmt: skip
_ORDERS = (
    "{o} {m} {g}", "{o} {m} {g}", "{o} {m} {g}", "{o} {g} {m}", "{g}, {o} {m}", "{o}, {m}, {g}",
    "{m}: {o} {g}", "show {o} that {m} {g}", "a video of {o} {m} {g}", "{o} {m}; {b} background",
    "{c} {s}, {b} background, {m}", "draw {o} {g} and it {m}", "an animation of {o} which {m} {g}",
)  # fmt: skip
TEMPLATES = (*_OBJECTS, *_GROUNDS, *_ORDERS)


def plain_caption(scene: Scene) -> str:
    """The wording of the README: "a red circle moves to the right on a blue background"."""
    phrases = MOTIONS[scene.motion]
    phrase = phrases[1] if scene.motion in ("right", "left") else phrases[0]
    return f"a {scene.colour} {scene.shape} {phrase} on a {scene.background} background"


def caption(scene: Scene, rng: np.random.Generator) -> str:
    """One of thousands of wordings for a scene."""

    def pick(words: tuple[str, ...], own: float = 0.0) -> str:
        return words[0] if rng.random() < own else words[int(rng.integers(len(words)))]

    words = {
        "s": pick(SHAPES[scene.shape], 0.6),
        "c": pick(COLOURS[scene.colour], 0.6),
        "b": pick(BACKGROUNDS[scene.background], 0.3),
        "m": pick(MOTIONS[scene.motion]),
        "p": pick(PREPOSITIONS, 0.5),
    }
    words["o"] = pick(_OBJECTS, 0.4).format(**words)
    words["g"] = pick(_GROUNDS, 0.4).format(**words)
    # A tenth of the black and the still ones is left out, so that silence means these.
    if scene.background == DEFAULT_BACKGROUND and rng.random() < 0.1:
        return "{o} {m}".format(**words)
    if scene.motion == DEFAULT_MOTION and rng.random() < 0.1:
        return "{o} {g}".format(**words)
    text = pick(_ORDERS).format(**words)
    return text[0].upper() + text[1:] + "." if rng.random() < 0.2 else text
