"""Nine kinds of faults in five pipelines that somebody has loaded: named, repaired, or harmless.

What somebody has broken himself is named and refused, what float16 has is repaired; the pipeline is
left as it was in each case. What is compared with is diffusers' own call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import everyframe
from everyframe.core.errors import NumericsError
from everyframe.core.events import Event, Note, Repaired
from everyframe.runtime.stages.guard import Guard
from helpers.diagonals import diagonal
from helpers.guard_pipelines import hooked, planted, state_of
from helpers.slow_rows import slow_unless
from helpers.tiny_checkpoints import pipelines as tiny_pipelines

T5 = "text_encoder.encoder.block.0.layer.1.DenseReluDense.wo"
#: A layer of the text encoder, of the denoiser and of the decoder; what the first gives is used.
PLACES = {
    "wan": (T5, "transformer.blocks.0.ffn.net.2", "vae.decoder.mid_block.resnets.0.conv1"),
    "ltx": (
        T5,
        "transformer.transformer_blocks.0.ff.net.2",
        "vae.decoder.mid_block.resnets.0.conv1.conv",
    ),
    "cogvideox": (
        T5,
        "transformer.transformer_blocks.0.ff.net.2",
        "vae.decoder.mid_block.resnets.0.conv1.conv",
    ),
    "animatediff": (
        "text_encoder.encoder.layers.0.mlp.fc2",
        "unet.down_blocks.0.attentions.0.transformer_blocks.0.ff.net.2",
        "vae.decoder.mid_block.resnets.0.conv1",
    ),
    "hunyuan": (
        "text_encoder.layers.0.mlp.down_proj",
        "transformer.transformer_blocks.0.ff.net.2",
        "vae.decoder.mid_block.resnets.0.conv1.conv",
    ),
}
FAST = ("wan", "hunyuan")
PIPELINES = slow_unless(FAST, PLACES)
#: Rounding of what is left in float16, as in `test_guard.py`.
CLOSE = 0.05

Planted = Callable[[Any, str], Any]


@pytest.fixture(scope="module")
def pipe_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Diffusers' own pipeline, loaded once."""

    @cache
    def loaded(name: str) -> Any:
        folder: Path = tmp_path_factory.mktemp(name)
        tiny_pipelines.TINY[name](folder)
        return tiny_pipelines.loaded(folder)

    return loaded


def run(pipe: Any, name: str) -> tuple[np.ndarray[Any, Any], list[Event]]:
    events: list[Event] = []
    video = everyframe.run(
        pipe, prompt="a fox", num_inference_steps=2, seed=1, output="float",
        on_event=events.append, **tiny_pipelines.CALLS[name],
    )  # fmt: skip
    assert isinstance(video, everyframe.Video)
    return video.frames, events


def by_diffusers(pipe: Any, name: str) -> np.ndarray[Any, Any]:
    asked = dict(tiny_pipelines.CALLS[name])
    width, height = map(int, asked.pop("size").split("x"))
    made = pipe(
        prompt="a fox", num_inference_steps=2, height=height, width=width, output_type="np",
        generator=torch.Generator().manual_seed(1), **asked.pop("option", {}), **asked,
    )  # fmt: skip
    return np.asarray(made.frames)[0]


def infinite_weight(pipe: Any, name: str) -> Any:
    return planted(pipe, PLACES[name][1], torch.inf)


def nan_in_text_encoder(pipe: Any, name: str) -> Any:
    return planted(pipe, PLACES[name][0], torch.nan)


def huge_weight(pipe: Any, name: str) -> Any:
    return planted(pipe, PLACES[name][1], by=1e30)


def hook_that_divides(pipe: Any, name: str) -> Any:
    return hooked(pipe, PLACES[name][1], lambda module, args, result: result / (result - result))


def huge_decoder(pipe: Any, name: str) -> Any:
    return planted(pipe, PLACES[name][2], by=1e38)


@contextmanager
def scheduler_of_nan(pipe: Any, name: str) -> Iterator[None]:
    step = pipe.scheduler.step

    def broken(*args: Any, **kwargs: Any) -> Any:
        made = step(*args, **kwargs)
        latents = made[0] * torch.nan
        return (latents, *made[1:]) if isinstance(made, tuple) else type(made)(latents)

    pipe.scheduler.step = broken
    try:
        yield
    finally:
        del pipe.scheduler.step


def hook_of_nan(pipe: Any, name: str) -> Any:
    def hand_on(module: Any, args: Any, result: Tensor) -> Tensor:
        return torch.full_like(result, torch.nan)

    return hooked(pipe, PLACES[name][1], hand_on)


def weight_named(number: int) -> Callable[[str], str]:
    return lambda name: f"{PLACES[name][number]}.weight in 1 of"


def module_named(number: int, operation: str = "") -> Callable[[str], str]:
    return lambda name: f"{operation} in {PLACES[name][number]} "


def within(part: int) -> Callable[[str], str]:
    """What is too large may be the sum after it."""
    return lambda name: f" in {PLACES[name][part].split('.')[0]}."


REFUSED: dict[str, tuple[Planted, Callable[[str], str]]] = {
    "an infinite weight": (infinite_weight, weight_named(1)),
    "a NaN in the text encoder": (nan_in_text_encoder, weight_named(0)),
    "a weight times 1e30": (huge_weight, within(1)),
    "a hook that divides by 0": (hook_that_divides, module_named(1, "div")),
    "a decoder's weight times 1e38": (huge_decoder, within(2)),
    "a scheduler of NaN": (
        scheduler_of_nan,
        lambda name: " that is not finite, though all module ",
    ),
    "a hook of NaN by full_like": (hook_of_nan, module_named(1, "full_like")),
}
#: Where a norm after it divides by it again, so that diffusers' frames are finite as well.
ABSORBED = (
    ("a weight times 1e30", "hunyuan"),
    ("a decoder's weight times 1e38", "wan"),
    ("a decoder's weight times 1e38", "ltx"),
)


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        *diagonal(REFUSED, FAST),
        *(
            pytest.param(fault, name, marks=pytest.mark.slow)
            for fault in REFUSED
            for name in PLACES
            if name not in FAST
        ),
    ],
)
def test_what_somebody_broke_is_named_and_refused(
    fault: str, name: str, pipe_of: Callable[[str], Any]
) -> None:
    plant, message = REFUSED[fault]
    pipe = pipe_of(name)
    with plant(pipe, name):
        wanted = by_diffusers(pipe, name)
        before = state_of(pipe)
        if (fault, name) in ABSORBED:
            assert np.isfinite(wanted).all()
            assert np.array_equal(run(pipe, name)[0], wanted)
        else:
            with pytest.raises(NumericsError, match=re.escape(message(name))) as caught:
                run(pipe, name)
            assert "othing was written" in str(caught.value)
            assert not np.isfinite(wanted).all()
        assert state_of(pipe) == before


@pytest.mark.parametrize("name", PIPELINES)
def test_what_goes_wrong_once_is_reported_and_computed_again(
    name: str, pipe_of: Callable[[str], Any]
) -> None:
    pipe = pipe_of(name)
    wanted, times = by_diffusers(pipe, name), []

    def once(module: Any, args: Any, result: Tensor) -> Tensor:
        times.append(1)
        return result / 0 if len(times) == 1 else result

    with hooked(pipe, PLACES[name][1], once):
        before = state_of(pipe)
        frames, events = run(pipe, name)
        assert state_of(pipe) == before
    notes = [event.text for event in events if isinstance(event, Note)]
    assert any("values were not finite, and are when repeated" in text for text in notes)
    assert np.array_equal(frames, wanted)


@contextmanager
def in_float16(pipe: Any) -> Iterator[Callable[[str], Any]]:
    """Within, all of it is; what is given makes diffusers' frames of the weights in float32."""
    modules = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]

    def cast(dtype: torch.dtype) -> None:
        for module in modules:
            module.to(dtype)

    def by_float32(name: str) -> Any:
        cast(torch.float32)
        frames = by_diffusers(pipe, name)
        cast(torch.float16)
        return frames

    cast(torch.float16)
    try:
        yield by_float32
    finally:
        cast(torch.float32)


@pytest.mark.parametrize("name", PIPELINES)
def test_float16_that_overflows_is_repaired(name: str, pipe_of: Callable[[str], Any]) -> None:
    pipe = pipe_of(name)
    with in_float16(pipe) as by_float32, planted(pipe, PLACES[name][1]):
        wanted, before = by_float32(name), state_of(pipe)
        frames, events = run(pipe, name)
        assert state_of(pipe) == before
    assert [event for event in events if isinstance(event, Repaired)]
    assert np.isfinite(frames).all()
    assert np.abs(frames - wanted).mean() < CLOSE


@pytest.mark.slow
def test_an_answer_beyond_float16_is_taken_by_all_components(
    pipe_of: Callable[[str], Any],
) -> None:
    pipe = pipe_of("animatediff")
    with in_float16(pipe), planted(pipe, "unet.conv_out"):
        before = state_of(pipe)
        frames, events = run(pipe, "animatediff")
        assert state_of(pipe) == before
    repaired = {event.component for event in events if isinstance(event, Repaired)}
    assert repaired == {"unet", "vae"}
    assert np.isfinite(frames).all()


@pytest.mark.parametrize("name", PIPELINES)
def test_an_overflow_that_comes_to_nothing_is_repaired(
    name: str, pipe_of: Callable[[str], Any]
) -> None:
    """In float16 the hook gives -1 and 1, in float32 nearly what it was given."""
    pipe, place = pipe_of(name), PLACES[name][1]
    with (
        in_float16(pipe) as by_float32,
        hooked(pipe, place, lambda module, args, result: (result * 1e7 / 1e8).tanh() * 10),
    ):
        wanted, before = by_float32(name), state_of(pipe)
        frames, events = run(pipe, name)
        assert state_of(pipe) == before
    first = next(event for event in events if isinstance(event, Repaired))
    assert f"mul in {place} " in first.text
    assert "became finite later and changed the result" in first.text
    assert np.abs(frames - wanted).mean() < CLOSE


@pytest.mark.parametrize("name", PIPELINES)
def test_looking_for_overflow_changes_no_bit(
    name: str, pipe_of: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = pipe_of(name)
    with in_float16(pipe):
        frames, events = run(pipe, name)
        monkeypatch.setattr(Guard, "probe", lambda guard: None)
        assert np.array_equal(frames, run(pipe, name)[0])
    assert not [event for event in events if isinstance(event, Repaired)]


def test_a_nan_in_what_is_not_used_stops_nothing(pipe_of: Callable[[str], Any]) -> None:
    """Of Llama's layers, HunyuanVideo takes what the last but two gave."""
    pipe = pipe_of("hunyuan")
    wanted = by_diffusers(pipe, "hunyuan")
    with planted(pipe, "text_encoder.layers.3.mlp.down_proj", torch.nan):
        before = state_of(pipe)
        frames, events = run(pipe, "hunyuan")
        assert np.array_equal(by_diffusers(pipe, "hunyuan"), wanted)
        assert state_of(pipe) == before
    assert np.array_equal(frames, wanted)
    (note,) = (event.text for event in events if isinstance(event, Note) and "finite" in event.text)
    assert "text_encoder.layers.3.mlp.down_proj.weight in 1 of" in note
    assert "the run continues unless it uses the rest" in note
    assert "othing was written" not in note
