"""Prompt parser of the embedded model `shapes`: its vocabulary, and which prompts it can draw.

The vocabulary is data: four shapes, eight colours, five backgrounds, eight motions, and the words
for them. `recipes/shapes` writes its training captions from these tables. `read_prompt` does not
guess: a prompt with one unknown word is refused. Imports no torch. Drawing is in
`recipes/shapes/world.py`, and the weights are in `shapes/`, beside this file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

SHAPES: dict[str, tuple[str, ...]] = {
    "circle": ("circle", "disc", "disk", "ball", "dot"),
    "square": ("square", "box"),
    "triangle": ("triangle",),
    "star": ("star",),
}
COLOURS: dict[str, tuple[str, ...]] = {
    "red": ("red",),
    "green": ("green",),
    "blue": ("blue",),
    "yellow": ("yellow",),
    "purple": ("purple", "violet"),
    "orange": ("orange",),
    "white": ("white",),
    "cyan": ("cyan", "turquoise"),
}
BACKGROUNDS: dict[str, tuple[str, ...]] = {
    "black": ("black",),
    "grey": ("grey", "gray"),
    "navy": ("navy", "navy blue", "dark blue"),
    "brown": ("brown",),
    "blue": ("blue",),
}
"""Words for each name, the name first."""

MOTIONS: dict[str, tuple[str, ...]] = {
    "right": (
        "moves right", "moves to the right", "moving right", "moving to the right",
        "goes right", "going to the right", "slides to the right", "sliding right",
        "travels right", "drifts to the right", "from left to right",
        "moves from left to right", "moving from left to right", "move right",
    ),
    "left": (
        "moves left", "moves to the left", "moving left", "moving to the left",
        "goes left", "going to the left", "slides to the left", "sliding left",
        "travels left", "drifts to the left", "from right to left",
        "moves from right to left", "moving from right to left", "move left",
    ),
    "up": (
        "moves up", "moves upwards", "moving up", "moving upward", "goes up", "going up",
        "rises", "rising", "slides up", "sliding up", "drifts upward", "from bottom to top",
        "moves from bottom to top", "moving to the top", "move up", "climbs",
    ),
    "down": (
        "moves down", "moves downwards", "moving down", "moving downward", "goes down",
        "going down", "falls", "falling", "slides down", "sliding down", "drifts downward",
        "from top to bottom", "moves from top to bottom", "moving to the bottom", "move down",
        "sinks",
    ),
    "still": (
        "stays still", "stands still", "is still", "does not move", "not moving", "stays in place",
        "resting", "rests", "standing still", "without moving", "static", "motionless",
        "stay still",
    ),
    "growing": (
        "grows", "growing", "gets bigger", "getting bigger", "gets larger", "getting larger",
        "becomes bigger", "grows larger", "expands", "expanding", "becoming larger", "grow",
    ),
    "shrinking": (
        "shrinks", "shrinking", "gets smaller", "getting smaller", "becomes smaller",
        "grows smaller", "contracts", "contracting", "becoming smaller", "shrink",
    ),
    "turning": (
        "turns", "turning", "rotates", "rotating", "spins", "spinning", "turns around",
        "turns in place", "rotates in place", "spinning in place", "rotates clockwise", "rotate",
    ),
}  # fmt: skip
"""Each motion's phrases. Turning is clockwise."""

# The model was trained on the phrases above alone, and knows both words of each of these.
_ALSO_READ = {"turning": tuple(f"{each} clockwise" for each in MOTIONS["turning"])}

BACKGROUND_NOUNS = ("background", "backdrop", "ground", "field", "screen")
PREPOSITIONS = ("on", "over", "against", "across", "in front of", "upon")
FILLERS = (
    "a", "an", "the", "is", "and", "which", "that", "it", "with", "one", "single", "there", "of",
    "show", "draw", "video", "clip", "animation", "slowly", "steadily", "plain", "simple", "while",
    "in", "small", "little", "bright", "flat", "shape", "coloured", "colored", "to", "its", "then",
)  # fmt: skip
"""Words that may stand anywhere and change nothing (what they say is not drawn)."""


def _longest_first(table: dict[str, tuple[str, ...]]) -> dict[str, str]:
    """Each phrase of `table` between spaces and its name, long phrases first."""
    names = {f" {phrase} ": name for name, phrases in table.items() for phrase in phrases}
    return {phrase: names[phrase] for phrase in sorted(names, key=len, reverse=True)}


_MOTION_OF = _longest_first(
    {name: (*each, *_ALSO_READ.get(name, ())) for name, each in MOTIONS.items()}
)
_BACKGROUND_OF = _longest_first(BACKGROUNDS)
_COLOUR_OF, _SHAPE_OF = _longest_first(COLOURS), _longest_first(SHAPES)
_ALLOWED = {"*", *FILLERS, *" ".join(PREPOSITIONS).split()}


def _background_patterns() -> tuple[re.Pattern[str], ...]:
    """A background's colour, marked by a preposition or a noun such as "background"."""
    colour = "|".join(phrase.strip() for phrase in _BACKGROUND_OF)
    noun = "|".join(BACKGROUND_NOUNS)
    before = "|".join(PREPOSITIONS)
    # Bounded: the time grows with the square of the prompt's length.
    filler = r"(?:(?:a|an|the|plain|flat|simple|dark) ){0,8}?"
    shape = "|".join(word for words in SHAPES.values() for word in words)
    return (
        re.compile(
            rf" (?:(?:{before}) )?{filler}(?P<colour>{colour}) (?:coloured |colored )?(?:{noun}) "
        ),
        re.compile(rf" (?:the )?(?:{noun}) (?:is )?(?P<colour>{colour}) "),
        re.compile(rf" (?:{before}) {filler}(?P<colour>{colour}) (?!(?:{shape}) )"),
    )


_BACKGROUND_PATTERNS = _background_patterns()
_OTHER_BACKGROUND = re.compile(rf" ([\w'-]+) (?:{'|'.join(BACKGROUND_NOUNS)}) ")

DEFAULT_BACKGROUND = "black"
DEFAULT_MOTION = "still"


@dataclass(frozen=True)
class Scene:
    """Content of a prompt; each word is a key of the table of the same name."""

    shape: str
    colour: str
    background: str
    motion: str


@dataclass(frozen=True)
class Refusal:
    """Reason why `shapes` cannot draw a prompt: a clause for the user, without a full stop."""

    reason: str


CAN_DRAW = (
    "one shape (circle, square, triangle, star) in one colour (red, green, blue, yellow, purple, "
    "orange, white, cyan) on a plain background (black, grey, navy, brown, blue) that moves right, "
    "left, up or down, stays still, grows, shrinks or turns; for example 'a red circle moves to "
    "the right on a blue background'"
)


def read_prompt(prompt: str) -> Scene | Refusal:
    """Parse a prompt to a scene, or return why `shapes` cannot draw it.

    The default background is black and the default motion is none, as in the training captions.
    """
    # Two stars hold a place, so that separate words never become adjacent.
    text = " " + " ".join(re.findall(r"[\w'-]+", prompt.casefold())) + " "
    motions, text = _take(text, _MOTION_OF)
    backgrounds, text = _take_backgrounds(text)
    ground = _OTHER_BACKGROUND.search(text)
    if ground is not None and ground[1] not in FILLERS:
        return Refusal(f"it knows no {ground[1]} background")
    colours, text = _take(text, _COLOUR_OF)
    shapes, text = _take(text, _SHAPE_OF)
    unknown = [word for word in text.split() if word not in _ALLOWED]
    if unknown:
        return Refusal(f"it does not know the word {unknown[0]!r}")
    wanted = (
        ("shape", "shapes", shapes, None),
        ("colour", "colours", colours, None),
        ("background", "backgrounds", backgrounds, DEFAULT_BACKGROUND),
        ("motion", "motions", motions, DEFAULT_MOTION),
    )
    found: dict[str, str] = {}
    for name, names, words, default in wanted:
        if len(words) > 1 and (name in ("shape", "colour") or len(set(words)) > 1):
            return Refusal(f"it draws one {name}, and the prompt has {len(words)} {names}")
        if not words and default is None:
            return Refusal(f"the prompt names no {name} that it knows")
        found[name] = words[0] if words else str(default)
    scene = Scene(**found)
    impossible = why_not(scene)
    return scene if impossible is None else Refusal(impossible)


def why_not(scene: Scene) -> str | None:
    """Reason why known words form no scene of this vocabulary, or None."""
    if scene.shape == "circle" and scene.motion == "turning":
        return "a turning circle looks like one that does not turn"
    if scene.colour == scene.background:
        return f"a {scene.colour} object can't be seen on a {scene.background} background"
    return None


def _take(text: str, names: dict[str, str]) -> tuple[list[str], str]:
    """Find phrases of `names` in the text, in their order; return the names and the rest."""
    found: list[str] = []
    for phrase, name in names.items():
        while phrase in text:  # twice, if it follows itself: one space is between them
            found += [name] * text.count(phrase)
            text = text.replace(phrase, " * ")
    return found, text


def _take_backgrounds(text: str) -> tuple[list[str], str]:
    """Find background colours, marked by a preposition or a noun such as "background"."""
    found: list[str] = []

    def take(match: re.Match[str]) -> str:
        found.append(_BACKGROUND_OF[f" {match['colour']} "])
        return " * "

    for pattern in _BACKGROUND_PATTERNS:
        text = pattern.sub(take, text)
    return found, text
