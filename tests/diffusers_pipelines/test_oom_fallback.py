"""A pipeline that finds no memory: called again in less, what was answered served, or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.models.unets.unet_2d_blocks import UNetMidBlock2D
from torch import nn

import everyframe
from everyframe.core.errors import CannotRunError
from everyframe.core.events import Event, Repaired, Step, VideoDone
from everyframe.core.plan import ComponentPlan, Precision, Settings
from everyframe.core.request import Request
from everyframe.diffusers_pipelines.inputs.signature import CallSignature, of_class
from everyframe.diffusers_pipelines.oom_fallback import PipelineOomFallbacks, chunk_savings
from everyframe.engine.run import stream
from everyframe.runs.run_state import SaveOptions
from everyframe.runtime.interface import MemorySaving
from helpers.events import frames_of
from helpers.guard_modules import Net, inputs, plan
from helpers.out_of_memory import TOO_LITTLE, before_calls
from helpers.tiny_checkpoints import pipelines as tiny_pipelines
from helpers.tiny_checkpoints.diffusers import CASES

ASKED: dict[str, Any] = {
    "prompt": "a fox", "num_inference_steps": 2, "seed": 1, **tiny_pipelines.CALLS["wan"],
}  # fmt: skip


@contextmanager
def no_room(kind: str, while_: Callable[[], bool]) -> Iterator[list[str]]:
    """Within, modules of that class find no memory for as long as that is so; gives all calls."""
    called: list[str] = []

    def check(module: nn.Module, given: Any) -> None:
        if next(module.parameters(), torch.empty(0)).is_meta:
            return  # a dry run
        name = type(module).__name__
        called.append(name)
        if name == kind and while_():
            raise RuntimeError(TOO_LITTLE)

    with before_calls(check):
        yield called


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("models") / "wan"
    tiny_pipelines.TINY["wan"](place)
    return place


def events_of(folder: Path, root: Path | None, **more: Any) -> list[Event]:
    request = Request(model=str(folder), device="cpu", dtype="fp32", **{**ASKED, **more})
    return list(stream(request, keep=SaveOptions(root)))


def test_decoding_goes_on_in_tiles_and_no_step_is_done_twice(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Tiles have no dry run, so no kernel of attention is chosen for them.
    wanted = events_of(folder, tmp_path, vae_tiling=True, attention="flash")
    tiled: list[bool] = []
    plainly = diffusers.AutoencoderKLWan.enable_tiling
    monkeypatch.setattr(
        diffusers.AutoencoderKLWan,
        "enable_tiling",
        lambda vae, *given: (tiled.append(True), plainly(vae, *given)),
    )
    with no_room("WanMidBlock", lambda: not tiled) as called:
        events = events_of(folder, tmp_path, attention="flash")
    (repair,) = [event for event in events if isinstance(event, Repaired)]
    assert (repair.component, repair.cause, repair.step) == ("vae", "memory", 2)
    assert repair.text.startswith("step 2 of pipeline, in its vae: out of memory ([enforce fail]")
    assert "decoded in tiles" in repair.to
    np.testing.assert_array_equal(frames_of(events), frames_of(wanted))
    assert called.count("WanTransformer3DModel") == 4, "two steps of two branches, each once"
    assert [event.step for event in events if isinstance(event, Step)] == [1, 2]
    done = events[-1]
    assert isinstance(done, VideoDone)
    assert [each["cause"] for each in done.record["repairs"]] == ["memory"]


def test_given_latents_are_those_of_the_call_before(tmp_path: Path) -> None:
    """Kandinsky 5 writes into them."""
    case = CASES["Kandinsky5T2VPipeline"]
    case.build().save_pretrained(tmp_path / "kandinsky")
    asked: dict[str, Any] = {
        "model": str(tmp_path / "kandinsky"), "prompt": "a fox", "seed": 1, "device": "cpu",
        "dtype": "fp32", "attention": "flash", "num_inference_steps": 2, "run_dir": "off",
        "latents": np.random.default_rng(0).normal(size=(1, 2, 2, 2, 4)).astype(np.float32),
        **case.asked,
    }  # fmt: skip
    wanted = everyframe.generate(**asked, vae_tiling=True)
    failed: list[bool] = []
    with no_room("HunyuanVideoMidBlock3D", lambda: not failed and not failed.append(True)):
        video = everyframe.generate(**asked)
    assert failed
    np.testing.assert_array_equal(video.frames, wanted.frames)


@pytest.fixture(scope="module")
def animated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("models") / "animatediff"
    tiny_pipelines.TINY["animatediff"](place)
    return place


@contextmanager
def room_for_one_frame() -> Iterator[None]:
    """Within, a decoder of pictures finds no memory for several at once."""

    def check(module: nn.Module, given: Any) -> None:
        # Not in a dry run.
        if isinstance(module, UNetMidBlock2D) and len(given[0]) > 1 and not given[0].is_meta:
            raise RuntimeError(TOO_LITTLE)

    with before_calls(check):
        yield


def test_fewer_frames_are_decoded_at_once_before_there_are_tiles(
    animated: Path, tmp_path: Path
) -> None:
    asked = {**tiny_pipelines.CALLS["animatediff"], "option": {}}
    one = {**asked, "option": {"decode_chunk_size": 1}}
    wanted = frames_of(events_of(animated, tmp_path, **one))
    with room_for_one_frame():
        events = events_of(animated, tmp_path, **asked)
        repairs = [event for event in events if isinstance(event, Repaired)]
        assert [repair.to for repair in repairs] == [
            "frames are decoded 2 at once (decode_chunk_size), each by itself",
            "frames are decoded 1 at once (decode_chunk_size), each by itself",
        ]
        np.testing.assert_array_equal(frames_of(events), wanted)
        # A pipeline that somebody has loaded: only its call is given another number.
        pipe = diffusers.DiffusionPipeline.from_pretrained(animated)
        pipe.set_progress_bar_config(disable=True)
        video = everyframe.run(pipe, output="float", **{**ASKED, **asked})
    assert not isinstance(video, list)
    assert [each["cause"] for each in video.record["repairs"]] == ["memory", "memory"]
    np.testing.assert_allclose(video.frames, wanted, atol=1e-5, rtol=0)


def test_how_many_frames_at_once_is_the_pipelines_own_parameter() -> None:
    settings = plan().settings
    chunked = of_class(diffusers.AnimateDiffPipeline)

    def offered(
        interface: CallSignature, given: tuple[str, ...], vae: str
    ) -> list[tuple[int, bool]]:
        found = chunk_savings(interface, given, replace(settings, num_frames=9), vae)
        return [(each.settings.saving("decode_chunk_size", 0), each.is_lossy) for each in found]

    exactly = [(5, False), (3, False), (2, False), (1, False)]
    assert offered(chunked, (), "AutoencoderKL") == exactly
    assert offered(chunked, ("decode_chunk_size",), "AutoencoderKL") == []
    assert offered(of_class(diffusers.WanPipeline), (), "AutoencoderKLWan") == []
    latte = of_class(diffusers.LattePipeline)
    assert {is_lossy for _, is_lossy in offered(latte, (), "AutoencoderKLTemporalDecoder")} == {
        True
    }


def test_without_kept_answers_it_begins_again(folder: Path) -> None:
    failures = iter([True])
    with no_room("WanMidBlock", lambda: next(failures, False)) as called:
        events = events_of(folder, None)
    assert called.count("WanTransformer3DModel") == 8
    assert [event.step for event in events if isinstance(event, Step)] == [1, 2]


def test_where_nothing_takes_less_it_is_refused_with_what_was_tried(folder: Path) -> None:
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    with (
        no_room("WanTransformerBlock", lambda: True),
        pytest.raises(CannotRunError, match=r"^step 1 of pipeline, in its transformer") as caught,
    ):
        everyframe.run(pipe, **ASKED)
    assert "no memory fallback is left;" in str(caught.value)
    assert "pipe.vae.enable_tiling()" in str(caught.value)
    assert caught.value.exit_code == 3
    with (
        no_room("WanMidBlock", lambda: True),
        pytest.raises(CannotRunError, match=r"tried: decoded in tiles") as caught,
    ):
        events_of(folder, None)


def net() -> Net:
    made = Net(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    return made.requires_grad_(False).eval()


def test_on_a_card_parts_take_turns_and_then_come_by_blocks() -> None:
    """As if on a card, which the host's memory stands for: the results stay what they were."""
    whole = Precision("float32", "float32")
    nets = {"net": net(), "vae": net()}
    wanted = {name: each(inputs()) for name, each in nets.items()}
    parts = tuple(ComponentPlan(name, name, "pipeline", "", 0, "cpu", whole, 0, 0) for name in nets)
    on_card = replace(plan(), components=parts, device=_AsCard())  # type: ignore[arg-type]
    tiled: list[bool] = []
    pipe = SimpleNamespace(vae=SimpleNamespace(enable_tiling=lambda: tiled.append(True)))

    def savings(component: str, settings: Settings) -> Iterator[MemorySaving]:
        if component == "vae" and not settings.options:
            tiles = replace(settings, options=(("vae_tiling", True),))
            yield MemorySaving(tiles, "in tiles", is_lossy=True)

    fallbacks = PipelineOomFallbacks(on_card, pipe, nets, savings)
    found = []
    for at in ("", "net", "net", "vae", "vae", "vae"):
        fallback = fallbacks.next(at)
        found.append(
            None if fallback is None else (fallback.component, fallback.message.split()[0])
        )
        for name, each in nets.items():
            assert torch.equal(each(inputs()), wanted[name])
    assert found == [
        ("", "torch's"),
        ("", "model"),
        ("net", "block"),
        ("vae", "block"),
        ("vae", "in"),
        None,
    ]
    assert tiled == [True]
    assert len(fallbacks.tried) == 5


def test_on_a_card_a_callers_weights_give_up_their_old_storage_first() -> None:
    on_card = replace(plan(), device=_AsCard())  # type: ignore[arg-type]
    fallbacks = PipelineOomFallbacks(on_card, SimpleNamespace(), {}, None)
    assert fallbacks.keeps_storage
    fallback = fallbacks.next("net")
    assert fallback is not None
    assert "same bits in new storage" in fallback.message
    assert not fallbacks.keeps_storage
    assert fallbacks.next("net") is None
    assert not PipelineOomFallbacks(on_card, SimpleNamespace(), {"net": net()}, None).keeps_storage


class _AsCard:
    """A card whose name torch takes for the host."""

    kind, torch_name = "cuda", "cpu"
