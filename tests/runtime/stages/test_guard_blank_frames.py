"""Frames of one colour are decoded again in float32; what stays blank is noted and kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from everyframe.core.events import Event, Note, Repaired
from everyframe.runtime.stages.guard import Guard
from helpers.guard_modules import (
    halved,
    plan,
)


class Dim(nn.Module):
    """Weights at the lower end of float16: their products vanish in it, and not in float32.

    What is left is one colour, in -1..1.
    """

    def __init__(self, size: float, colour: Sequence[float]) -> None:
        super().__init__()
        self.colour = colour
        self.conv = nn.Conv2d(4, 3, 1, bias=False)
        nn.init.constant_(self.conv.weight, size)

    def forward(self, latents: Tensor) -> Tensor:
        pixels = self.conv(latents * 1e-4) * 1e8
        return pixels + torch.tensor(self.colour, dtype=pixels.dtype)[:, None, None]


GREY, BLACK, WHITE = (0.0, 0.0, 0.0), (-1.0, -1.0, -1.0), (1.0, 1.0, 1.0)


GREEN, BROWN = (-1.0, 1.0, -1.0), (0.2, -0.3, -0.3)


def decoded(
    size: float, prompt: str = "a circle", colour: Sequence[float] = GREY, **given: Any
) -> tuple[Tensor, list[Event], str]:
    vae = halved(Dim(size, colour))
    latents = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    guard = Guard(plan(prompt=prompt), "decode", {"vae": vae})
    with torch.inference_mode():
        pixels = guard.check_decoded(1, lambda: vae(latents), latents, **given)
    return pixels, list(guard.events()), str(vae.conv.weight.dtype)


def test_frames_that_vanish_in_half_precision_are_decoded_again() -> None:
    pixels, events, dtype = decoded(6e-6)
    assert float(pixels.std()) > 0.01
    (repair,) = events
    assert isinstance(repair, Repaired)
    assert (repair.component, repair.cause, repair.to) == ("vae", "blank", "float32")
    assert dtype == "torch.float32"


def test_frames_that_are_blank_in_float32_too_are_noted_and_kept() -> None:
    pixels, events, dtype = decoded(0.0)
    assert float(pixels.abs().max()) == 0
    (note,) = events
    assert isinstance(note, Note)
    assert "2 of 2 frames are of one colour" in note.text
    assert dtype == "torch.float16", "what did not help is taken back"


def test_frames_are_kept_where_float32_has_no_room() -> None:
    """A check of a whole video is no reason to lose it."""
    vae = halved(Dim(6e-6, GREY))
    latents = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    guard = Guard(plan(), "decode", {"vae": vae})

    def decode() -> Tensor:
        if vae.conv.weight.dtype == torch.float32:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        out: Tensor = vae(latents)
        return out

    with torch.inference_mode():
        pixels = guard.check_decoded(1, decode, latents)
    assert float(pixels.abs().max()) == 0
    (note,) = guard.events()
    assert isinstance(note, Note)
    assert "2 of 2 frames are of one colour" in note.text
    assert "too little memory" in note.text
    assert not note.in_record, "the same run elsewhere has the same record"
    assert vae.conv.weight.dtype == torch.float16


PROMPTS = ("a fox", "a white fox in the snow", "a woman with dark hair plays a black piano",
           "a black screen", "a plain green wall")  # fmt: skip


@pytest.mark.parametrize("colour", [GREY, BLACK, WHITE, GREEN, BROWN])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_no_word_and_no_colour_keeps_frames_from_being_decoded_again(
    prompt: str, colour: tuple[float, ...]
) -> None:
    pixels, events, _ = decoded(6e-6, prompt, colour)
    assert float(pixels[:, 0].std()) > 0.01
    assert [type(event) for event in events] == [Repaired]


@pytest.mark.parametrize(
    ("prompt", "colour", "is_reported"),
    [
        ("a black screen", BLACK, False),
        ("a black screen", GREY, True),
        ("a black screen", WHITE, True),
        ("a dark forest", (-0.97, -0.98, -0.9), False),
        ("a dark forest", GREEN, True),
        ("a white fox in the snow", BLACK, True),
        ("a white fox in the snow", WHITE, False),
        ("it fades out", BLACK, False),
        ("it fades out", WHITE, False),
        ("it fades out", BROWN, True),
        ("a plain background", BROWN, True),
        ("a fox", BLACK, True),
    ],
)
def test_only_words_that_ask_for_the_colour_keep_a_note_back(
    prompt: str, colour: tuple[float, ...], is_reported: bool
) -> None:
    """In float32 too the frames are blank."""
    assert bool(decoded(0.0, prompt, colour)[1]) == is_reported


def test_a_given_frame_of_one_colour_keeps_a_note_back_and_no_repair() -> None:
    assert not decoded(0.0, is_asked=True)[1]
    assert [type(event) for event in decoded(6e-6, is_asked=True)[1]] == [Repaired]
