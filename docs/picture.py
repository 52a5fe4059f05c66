"""Draw the README's picture: prompts, and frames that the embedded model made from them.

    python docs/picture.py          writes docs/pictures/shapes.png

Read next: `docs/generate.py`, which writes the reference pages.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

import everyframe

PROMPTS = {
    "a red circle moves to the right on a blue background": 7,
    "a purple star turns on a black background": 1,
    "a yellow triangle grows on a grey background": 2,
    "a white square moves up on a navy background": 4,
}
SHOWN_FRAMES = (0, 4, 8, 12, 16)
SCALE, GAP, TEXT = 2, 6, 22
TARGET = Path(__file__).parent / "pictures" / "shapes.png"


def row(prompt: str, seed: int) -> Image.Image:
    """Frames of one video side by side, the prompt above them."""
    video = everyframe.generate(prompt, model="shapes", seed=seed)
    assert isinstance(video, everyframe.Video)
    shown = [np.kron(video.frames[t], np.ones((SCALE, SCALE, 1), np.uint8)) for t in SHOWN_FRAMES]
    side = shown[0].shape[0]
    sheet = Image.new("RGB", (len(shown) * (side + GAP) + GAP, side + TEXT + GAP), "white")
    pen = ImageDraw.Draw(sheet)
    pen.text((GAP, 4), f'"{prompt}", seed {seed}', fill="black", font=ImageFont.load_default(13))
    for place, frame in enumerate(shown):
        sheet.paste(Image.fromarray(frame), (GAP + place * (side + GAP), TEXT))
    return sheet


def main() -> None:
    """All rows, one below the other."""
    rows = [row(prompt, seed) for prompt, seed in PROMPTS.items()]
    picture = Image.new("RGB", (rows[0].width, sum(part.height for part in rows)), "white")
    top = 0
    for part in rows:
        picture.paste(part, (0, top))
        top += part.height
    TARGET.parent.mkdir(exist_ok=True)
    picture.save(TARGET, optimize=True)


if __name__ == "__main__":
    main()
