"""Prompts that were encoded before, given to a pipeline in memory in place of text.

Frames are compared bit for bit with the pipeline's own call, which gets the same tensors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import everyframe
from everyframe.core.errors import InputError
from helpers.tiny_checkpoints.diffusers import CASES

ASKED: dict[str, Any] = {
    "height": 32, "width": 32, "num_inference_steps": 2, "guidance_scale": 3.0,
}  # fmt: skip


def made(name: str) -> Any:
    pipe = CASES[name].build()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def own(name: str) -> dict[str, Any]:
    """The pipeline's own parameters in its case, with the length by its own name."""
    asked = CASES[name].asked
    length = {"LattePipeline": "video_length", "SanaVideoPipeline": "frames"}
    return {**asked.get("option", {}), length.get(name, "num_frames"): asked["num_frames"]}


def check_same(pipe: Any, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    seeded = torch.Generator().manual_seed(7)
    wanted = np.asarray(pipe(**theirs, generator=seeded, output_type="np").frames[0])
    video = everyframe.run(pipe, **ours, seed=7, output="float")
    assert isinstance(video, everyframe.Video)
    assert np.array_equal(video.frames, wanted)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_a_prompt_of_two_encoders() -> None:
    """Kandinsky 5 has no parameter ``prompt_embeds``, but one for each of its encoders."""
    pipe, asked = made("Kandinsky5T2VPipeline"), {**ASKED, **own("Kandinsky5T2VPipeline")}
    names = ("prompt_embeds_qwen", "prompt_embeds_clip", "prompt_cu_seqlens")
    encoded: dict[str, Any] = {}
    for prefix, text in (("", "a fox"), ("negative_", "bad")):
        found = pipe.encode_prompt(text, max_sequence_length=asked["max_sequence_length"])
        encoded |= {prefix + name: each for name, each in zip(names, found, strict=True)}
    check_same(pipe, {**asked, **encoded}, {**asked, **encoded})
    with pytest.raises(InputError, match="an empty prompt and an encoded one"):
        everyframe.run(pipe, "", **asked, **encoded)


@pytest.mark.parametrize("name", ["LattePipeline", "SanaVideoPipeline"])
def test_one_of_what_should_not_be_seen(name: str) -> None:
    """Their default for the text is ``""``, which they refuse beside it: scripts give None."""
    pipe, asked = made(name), {**ASKED, **own(name)}
    width = pipe.transformer.config.caption_channels
    encoded = {
        "prompt_embeds": numbers(1, 8, width),
        "negative_prompt_embeds": numbers(1, 8, width, seed=1),
    }
    if name.startswith("Sana"):
        mask = torch.ones(1, 8, dtype=torch.int64)
        encoded |= {"prompt_attention_mask": mask, "negative_prompt_attention_mask": mask}
    given = {**asked, **encoded, "negative_prompt": None}
    check_same(pipe, given, given)
    check_same(pipe, given, {**asked, **encoded})


def test_one_where_an_empty_text_is_given_otherwise() -> None:
    """EasyAnimate, whose code needs a negative prompt, refuses it beside an encoded one."""
    pipe, asked = made("EasyAnimatePipeline"), {**ASKED, **own("EasyAnimatePipeline")}
    masks = ("prompt_attention_mask", "negative_prompt_attention_mask")
    encoded: dict[str, Any] = dict.fromkeys(masks, torch.ones(1, 8, dtype=torch.int64))
    width = pipe.transformer.config.text_embed_dim
    for seed, name in enumerate(("prompt_embeds", "negative_prompt_embeds")):
        encoded[name] = numbers(1, 8, width, seed=seed)
    check_same(pipe, {**asked, **encoded}, {**asked, **encoded})


def test_none_is_not_an_encoded_prompt() -> None:
    pipe, asked = made("WanPipeline"), {**ASKED, **own("WanPipeline")}
    given = {**asked, "prompt": "", "prompt_embeds": None}
    check_same(pipe, given, given)
    with pytest.raises(InputError, match="makes a video of a text; give a prompt"):
        everyframe.run(pipe, **asked, prompt_embeds=None)


def test_a_refusal_has_no_pages_of_numbers() -> None:
    pipe, asked = made("WanPipeline"), {**ASKED, **own("WanPipeline")}
    given = {**asked, "prompt": "a fox", "prompt_embeds": numbers(1, 16, 32)}
    with pytest.raises(ValueError, match=r"both `prompt`: a fox and .*tensor\(\[\[\["):
        pipe(**given)
    with pytest.raises(InputError) as refused:
        everyframe.run(pipe, **given)
    assert "`prompt`: a fox and `prompt_embeds`: tensor(...). Please" in str(refused.value)


def test_a_record_names_what_it_has_no_numbers_of() -> None:
    pipe, asked = made("WanPipeline"), {**ASKED, **own("WanPipeline")}
    encoded = {"prompt_embeds": numbers(1, 16, 32), "negative_prompt_embeds": numbers(1, 16, 32)}
    video = everyframe.run(pipe, **asked, **encoded, seed=7)
    assert isinstance(video, everyframe.Video)
    with pytest.raises(InputError, match="with a prompt_embeds given in Python; give it again"):
        everyframe.run(pipe, from_record=video)
    again = everyframe.run(pipe, from_record=video, **encoded)
    assert isinstance(again, everyframe.Video)
    assert np.array_equal(again.frames, video.frames)
