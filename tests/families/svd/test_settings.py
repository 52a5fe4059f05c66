"""What is asked of a Stable Video Diffusion, resolved: defaults, sizes, notes and refusals.

Against `released`, the sizes of the released models; no weights, no torch modules.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image

from everyframe.core.errors import InputError
from everyframe.core.plan import Settings
from everyframe.core.request import Request
from everyframe.families.svd.config import SVDConfig, released
from everyframe.families.svd.options import SVDOptions
from everyframe.families.svd.settings import resolve_settings, smaller_settings

CONFIG = SVDConfig.from_json("released", released())
WIDE = np.zeros((288, 512, 3), np.uint8)


def resolved(image: Any = WIDE, **given: Any) -> tuple[Settings, tuple[str, ...]]:
    own = {name: given.pop(name) for name in list(given) if name in SVDOptions.model_fields}
    return resolve_settings(
        CONFIG, "this model", Request(image=image, **given), SVDOptions(**own), 5
    )


def test_defaults_are_those_of_diffusers() -> None:
    settings, notes = resolved()
    assert (settings.height, settings.width) == (576, 1024)
    assert (settings.num_frames, settings.fps, settings.num_inference_steps) == (25, 7.0, 25)
    assert dict(settings.options) == {
        "motion_bucket_id": 127, "noise_aug_strength": 0.02, "min_guidance_scale": 1.0,
        "max_guidance_scale": 3.0, "decode_chunk_size": 25, "fit": "crop",
    }  # fmt: skip
    assert settings.prompt == ""
    assert settings.fit is None
    assert notes == ()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"image": None}, "makes a video of a picture; give one"),
        ({"prompt": "a red circle"}, "prompt has no effect"),
        ({"negative_prompt": "blur"}, "negative_prompt has no effect"),
        ({"guidance_scale": 2.0}, "give min_guidance_scale and max_guidance_scale"),
        ({"last_image": WIDE}, "knows only a first picture"),
        ({"edit_strength": 0.5}, "give noise_aug_strength"),
        ({"resolution": "360p"}, "no named sizes"),
        ({"chain": 2}, "chain"),
        ({"size": "500x300"}, "height must be a multiple of 8, got 300; try 296 or 304"),
        ({"size": "500x304"}, "width must be a multiple of 8, got 500; try 496 or 504"),
        ({"fit": "crob"}, "fit must be one of crop, pad, stretch, got 'crob'; did you mean 'crop'"),
        ({"min_guidance_scale": 2.0, "max_guidance_scale": 1.0}, "turns guidance off"),
        ({"image": "nowhere.png"}, "does not exist"),
        ({"image": WIDE[:1]}, "2 pixels or more"),
        ({"seconds": 1e6}, "at most 100000"),
        ({"seconds": 1e308}, "at most 100000"),
        ({"latents": np.zeros((1, 4, 25, 72, 128))}, r"\(1, 25, 4, 72, 128\) \(1, frames,"),
    ],
)
def test_refusals(given: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        resolved(**given)


def test_notes() -> None:
    _, notes = resolved(np.zeros((50, 40, 3), np.uint8), decode_chunk_size=8, seconds=2)
    assert [note.split(",")[0] for note in notes] == [
        "the model was trained on 25 frames",
        "frames are decoded 8 at once (decode_chunk_size): the decoder sees a frame's neighbours "
        "only inside of these",
        "the picture is 40x50 and is cropped to the proportions of 1024x576 (fit: pad or stretch "
        "would be another way)",
    ]


def test_a_pillow_picture_will_do() -> None:
    settings, notes = resolved(Image.new("RGB", (64, 64)), size="64x64", fit="pad")
    assert (settings.height, settings.width, len(notes)) == (64, 64, 0)
    assert settings.option("fit") == "pad"


def test_latents_of_the_right_shape_will_do() -> None:
    resolved(latents=np.zeros((1, 3, 4, 4, 8)), size="64x32", num_frames=3)


def test_smaller_ones_are_valid_and_smaller() -> None:
    settings, _ = resolved()
    choices = list(smaller_settings(CONFIG, settings))
    assert choices
    sizes = [each.height * each.width * each.num_frames for each in choices]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] < settings.height * settings.width * settings.num_frames
    for each in choices:
        assert each.height % 64 == each.width % 64 == 0
        assert each.option("decode_chunk_size") <= each.num_frames
