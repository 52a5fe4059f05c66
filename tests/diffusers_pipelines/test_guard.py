"""Faults planted in pipelines that run through their own call: found, rightly named, repaired.

Weights of tiny checkpoints are made so large that float16 overflows for real, on the CPU. What is
compared with is diffusers' own pipeline with the same weights in float32.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

import everyframe
from everyframe.core.errors import NumericsError
from everyframe.core.events import Event, Note, Repaired
from helpers.diagonals import diagonal
from helpers.events import alarms
from helpers.guard_pipelines import hooked, planted, state_of
from helpers.tiny_checkpoints import pipelines as tiny_pipelines

ASKED: dict[str, Any] = {"prompt": "a fox", "num_inference_steps": 2, "seed": 1}

#: Eleven bits of a number through a random network and its decoder: 0.01 on average was measured,
#: frames of another seed are 0.1 and more away.
CLOSE = 0.05

#: Where weights are planted, and what made the first value that was not finite.
PLANTED = {
    "cogvideox": {
        "text_encoder.encoder.block.0.layer.1.DenseReluDense.wi_0": "mm",
        "transformer.transformer_blocks.0.ff.net.0.proj": "linear",
        "transformer.patch_embed.text_proj": "linear",
        "transformer.patch_embed.proj": "conv",
        "vae.decoder.mid_block.resnets.0.conv1.conv": "conv",
    },
    "wan": {
        "text_encoder.encoder.block.0.layer.1.DenseReluDense.wi_0": "mm",
        "transformer.blocks.1.ffn.net.2": "linear",
        "transformer_2.patch_embedding": "conv",
        "vae.decoder.up_blocks.1.resnets.0.conv1": "conv",
        "vae.post_quant_conv": "conv",
    },
}
#: These run always, the others with ``--slow``.
FAST = ("text_encoder.encoder.block.0.layer.1.DenseReluDense.wi_0", "transformer.patch_embed.proj",
        "vae.decoder.up_blocks.1.resnets.0.conv1")  # fmt: skip
CASES = [
    pytest.param(name, place, id=f"{name}-{place}", marks=() if place in FAST else pytest.mark.slow)
    for name, places in PLANTED.items()
    for place in places
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("models")

    @cache
    def made(name: str) -> Path:
        tiny_pipelines.TINY[name](root / name)
        return root / name

    return made


@pytest.fixture(scope="module")
def pipe_of(folder: Callable[[str], Path]) -> Callable[[str], Any]:
    """Diffusers' own pipeline, loaded once, in float16."""

    @cache
    def loaded(name: str) -> Any:
        pipe = diffusers.DiffusionPipeline.from_pretrained(folder(name)).to(torch.float16)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    return loaded


def run(pipe: Any, name: str, **more: Any) -> tuple[np.ndarray[Any, Any], list[Event]]:
    events: list[Event] = []
    asked = {**ASKED, **tiny_pipelines.CALLS[name], **more}
    video = everyframe.run(pipe, output="float", on_event=events.append, **asked)
    assert isinstance(video, everyframe.Video)
    return video.frames, events


def in_float32(pipe: Any, name: str) -> np.ndarray[Any, Any]:
    """What the same weights make in float32."""
    modules = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
    for module in modules:
        module.float()
    frames, events = run(pipe, name)
    assert not alarms(events), "no fault in float32"
    for module in modules:
        module.half()
    return frames


@pytest.mark.parametrize(("name", "place"), CASES)
def test_overflow_is_repaired_and_the_pipeline_left_as_it_was(
    name: str, place: str, pipe_of: Callable[[str], Any]
) -> None:
    pipe = pipe_of(name)
    with planted(pipe, place):
        wanted = in_float32(pipe, name)
        before = state_of(pipe)
        frames, events = run(pipe, name)
        assert state_of(pipe) == before
    assert np.isfinite(frames).all()
    assert np.abs(frames - wanted).mean() < CLOSE
    repairs = [event for event in events if isinstance(event, Repaired)]
    first = repairs[0]
    assert f"{first.component}.{first.module}" == place
    assert first.operation.startswith(PLANTED[name][place])
    assert {event.cause for event in repairs} == {"range"}
    assert {event.component for event in repairs} == {first.component}
    # Of two experts the second has the second step.
    steps = {"transformer": "step 1 of pipeline", "transformer_2": "step 2 of pipeline"}
    assert steps.get(first.component, f" of {first.component}") in first.text


@pytest.mark.parametrize("name", list(PLANTED))
def test_a_clean_run_raises_no_alarm(name: str, pipe_of: Callable[[str], Any]) -> None:
    assert not alarms(run(pipe_of(name), name)[1])


@pytest.mark.parametrize(
    "place", ["text_encoder.encoder.block.0.layer.0.SelfAttention.o", "transformer.proj_out"]
)
def test_bad_weights_are_refused_by_name(place: str, pipe_of: Callable[[str], Any]) -> None:
    pipe = pipe_of("cogvideox")
    with planted(pipe, place, torch.nan), pytest.raises(NumericsError) as caught:
        run(pipe, "cogvideox")
    assert f"{place}.weight in 1 of" in str(caught.value)


def test_a_checkpoint_in_a_folder_is_repaired_too(folder: Callable[[str], Path]) -> None:
    """Its modules have casts at their edges, so that no more is raised than the culprit."""
    place = folder("cogvideox")
    pipe = diffusers.CogVideoXPipeline.from_pretrained(place)
    with planted(pipe, "transformer.transformer_blocks.0.ff.net.0.proj"):
        pipe.save_pretrained(place.parent / "faulty")
    asked = {**ASKED, **tiny_pipelines.CALLS["cogvideox"], "num_videos": 2}
    request = everyframe.Request(
        model=str(place.parent / "faulty"), dtype="fp16", force=True, device="cpu", **asked
    )
    events = list(everyframe.stream(request))
    repairs = [event for event in events if isinstance(event, Repaired)]
    assert repairs[0].module == "transformer_blocks.0.ff.net.0.proj"
    assert repairs[0].target == repairs[0].module
    # Each video has its own: it comes out as it would alone.
    assert {event.seed for event in repairs} == {1, 2}
    done = [event for event in events if event.type == "video_done"]
    for event in done:
        assert {each["seed"] for each in event.record["repairs"]} == {event.seed}  # type: ignore[attr-defined]


def test_a_sampler_that_overflows_is_named(
    pipe_of: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = pipe_of("cogvideox")
    step = type(pipe.scheduler).step

    def overflowing(self: Any, *args: Any, **kwargs: Any) -> Any:
        latents, *rest = step(self, *args, **kwargs)
        return (latents * torch.inf, *rest)

    monkeypatch.setattr(type(pipe.scheduler), "step", overflowing)
    with pytest.raises(NumericsError, match="transformer was given hidden_states that is not"):
        run(pipe, "cogvideox")


def test_frames_of_one_colour_are_reported(pipe_of: Callable[[str], Any]) -> None:
    pipe = copy.deepcopy(pipe_of("cogvideox"))
    conv = pipe.vae.decoder.conv_out.conv
    with planted(pipe, "vae.decoder.conv_out.conv"):
        with torch.no_grad():
            conv.weight.zero_()
            conv.bias.zero_()
        for colour, prompt, is_reported in (
            (0.0, "a fox", True), (0.0, "a black screen", True), (-1.0, "a black screen", False),
            (-1.0, "a white fox in the snow", True),
        ):  # fmt: skip
            with torch.no_grad():
                conv.bias.fill_(colour)
            _, events = run(pipe, "cogvideox", prompt=prompt)
            notes = [each for each in events if isinstance(each, Note) and "colour" in each.text]
            assert bool(notes) == is_reported
            assert not [event for event in events if isinstance(event, Repaired)]


@pytest.mark.parametrize(
    ("prompt", "colour"),
    diagonal(
        ["a fox", "a white fox in the snow", "a black piano at night"],
        [(-1.0, -1.0, -1.0), (-1.0, 1.0, -1.0), (0.2, -0.3, -0.3)],
    ),
)
def test_frames_of_any_one_colour_are_decoded_again(
    prompt: str, colour: tuple[float, ...], pipe_of: Callable[[str], Any]
) -> None:
    pipe = pipe_of("wan")

    def vanish(module: Any, args: Any, result: torch.Tensor) -> torch.Tensor:
        if result.dtype != torch.float16:
            return result
        return torch.tensor(colour).to(result)[:, None, None, None].expand_as(result).clone()

    with hooked(pipe, "vae.decoder.conv_out", vanish):
        frames, events = run(pipe, "wan", prompt=prompt)
    (repair,) = (event for event in events if isinstance(event, Repaired))
    assert (repair.component, repair.cause, repair.to) == ("vae", "blank", "float32")
    assert float(frames.std(axis=(1, 2)).min()) > 0.01


@pytest.mark.parametrize("how", ["layerwise", "disk"])
def test_weights_that_are_set_anew_in_each_call_are_reported(
    how: str, pipe_of: Callable[[str], Any], tmp_path: Path
) -> None:
    """A repair would widen weights that the call replaces; it ended in a mismatch of dtypes."""
    pipe = copy.deepcopy(pipe_of("cogvideox"))
    with torch.no_grad():
        weight = pipe.transformer.transformer_blocks[0].ff.net[0].proj.weight
        weight.copy_(weight.float() * (6e4 / weight.float().abs().max()))
    if how == "layerwise":
        pipe.transformer.enable_layerwise_casting(torch.float8_e5m2, torch.float16)
        message = "give it a wider compute_dtype"
    else:
        message = "reads its weights from a disk"
        pipe.transformer.enable_group_offload(
            torch.device("cpu"), offload_type="leaf_level", offload_to_disk_path=str(tmp_path)
        )
    with pytest.raises(NumericsError, match=f"step 1 .* transformer made values .*{message}"):
        run(pipe, "cogvideox")
