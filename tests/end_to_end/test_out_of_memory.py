"""An allocator that finds no memory, planted in whole runs: done in less, or refused in a sentence.

The videos are those of a run that was planned with that little from the start, bit for bit: the
same code does it, only later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import everyframe
from everyframe.core.errors import CannotRunError
from everyframe.core.events import Event, Repaired, VideoDone
from everyframe.core.facts import DeviceFacts
from everyframe.core.plan import ComponentPlan, Plan, Precision, Settings
from everyframe.core.request import Request
from everyframe.engine.records.comparison import differences
from everyframe.planning.resolve import prepare
from everyframe.runtime.interface import ConditioningFrames, MemorySaving
from everyframe.runtime.memory.oom_fallback import OomFallbacks
from everyframe.runtime.stages import tiling
from everyframe.runtime.stages.guard import Guard
from helpers.events import frames_of
from helpers.guard_modules import Net, inputs, plan
from helpers.out_of_memory import TOO_LITTLE, before_calls
from helpers.plans import frames_of as planned_frames
from helpers.plans import saving, unchanged
from helpers.tiny_checkpoints import families as tiny_families
from helpers.tiny_checkpoints import inpaint as tiny_inpaint
from helpers.tiny_checkpoints import opensora as tiny_opensora
from helpers.tiny_checkpoints import svd as tiny_svd

PICTURE = np.random.default_rng(0).integers(0, 255, (32, 32, 3), np.uint8)
MASK = np.zeros((32, 32), np.uint8)
MASK[8:24, 8:24] = 255

ASKED: dict[str, tuple[Callable[[Path], Path], dict[str, Any]]] = {
    "svd": (tiny_svd.svd, {"image": PICTURE, "size": "32x32", "num_frames": 4}),
    "inpaint": (
        tiny_inpaint.inpaint,
        {"prompt": "a red ball", "image": PICTURE, "mask": MASK, "control": "canny"},
    ),
    "opensora": (
        tiny_opensora.opensora_1_2,
        {"prompt": "a red circle", "size": "32x32", "num_frames": 2},
    ),
}


@contextmanager
def no_room(kind: str, above: int, after: int = 0) -> Iterator[list[int]]:
    """Within, modules of that class find no memory for more than `above` rows, after some calls."""
    calls: list[int] = []

    def check(module: nn.Module, args: Any, kwargs: Any) -> None:
        if type(module).__name__ == kind:
            given = next(each for each in (*args, *kwargs.values()) if torch.is_tensor(each))
            if next(module.parameters()).is_meta:
                return  # a dry run
            rows = len(given)
            calls.append(rows)
            if rows > above and len(calls) > after:
                raise RuntimeError(TOO_LITTLE)

    def hook(module: nn.Module, args: Any) -> None:
        check(module, args, {})

    with before_calls(hook):
        yield calls


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("models")
    return lambda family: tiny_families.written(ASKED[family][0], root / family)


def asked_of(family: str, **more: Any) -> dict[str, Any]:
    return {
        "num_inference_steps": 2, "seed": 1, "device": "cpu", "dtype": "fp32",
        **ASKED[family][1], **more,
    }  # fmt: skip


def events_of(folder: Path, family: str, **more: Any) -> list[Event]:
    return list(everyframe.stream(Request(model=str(folder), **asked_of(family, **more))))


def repairs_of(events: list[Event]) -> list[Repaired]:
    return [event for event in events if isinstance(event, Repaired)]


#: The class of the denoiser, and how far two orders of the same sums in float32 may be apart.
DENOISERS = {
    "svd": "VideoUNet", "inpaint": "UNet2DConditionModel",
    "opensora": "STDiT3Block",
}  # fmt: skip
CLOSE = 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    ["svd", *(pytest.param(each, marks=pytest.mark.slow) for each in ASKED if each != "svd")],
)
def test_a_step_goes_on_with_one_branch_after_the_other(
    family: str, folders: Callable[[str], Path]
) -> None:
    usual = frames_of(events_of(folders(family), family))
    kind = DENOISERS[family]
    with no_room(kind, above=1, after=1 if family != "opensora" else 4) as calls:
        events = events_of(folders(family), family)
    assert max(calls) > 1, "the fault was not planted"
    (repair,) = repairs_of(events)
    assert (repair.stage, repair.cause, repair.step) == ("denoise", "memory", 2)
    assert "one after the other" in repair.to
    assert "can't allocate memory" in repair.text
    assert np.abs(frames_of(events) - usual).max() < CLOSE
    (done,) = [event for event in events if isinstance(event, VideoDone)]
    assert [each["cause"] for each in done.record["repairs"]] == ["memory"]
    # Other bits can't be ruled out when it is made again, and a line says so.
    messages = differences(done.record, {**done.record, "repairs": []})
    assert [line for line in messages if "ran out of memory in denoise" in line]


@pytest.mark.slow
def test_decoding_goes_on_in_smaller_pieces(folders: Callable[[str], Path]) -> None:
    wanted = frames_of(events_of(folders("svd"), "svd", decode_chunk_size=1))
    with no_room("TemporalDecoder", above=1):
        events = events_of(folders("svd"), "svd")
    assert [repair.stage for repair in repairs_of(events)] == ["decode", "decode"]
    assert np.array_equal(frames_of(events), wanted), "frame by frame from the first chunk on"


@pytest.mark.slow
def test_opensora_decodes_fewer_frames_in_a_call(folders: Callable[[str], Path]) -> None:
    usual = frames_of(events_of(folders("opensora"), "opensora"))
    with no_room("Decoder", above=1):
        events = events_of(folders("opensora"), "opensora")
    repairs = repairs_of(events)
    assert {repair.stage for repair in repairs} == {"decode"}
    assert repairs[-1].to.startswith("frames are encoded and decoded 1 at once")
    assert np.abs(frames_of(events) - usual).max() < CLOSE


@contextmanager
def no_room_for_width(kind: str, above: int) -> Iterator[None]:
    """Within, modules of that class find no memory for more than `above` columns."""

    def hook(module: nn.Module, args: Any) -> None:
        wide = type(module).__name__ == kind and args[0].shape[-1] > above
        if wide and not next(module.parameters()).is_meta:
            raise RuntimeError(TOO_LITTLE)

    with before_calls(hook):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("family", ASKED)
def test_encoding_goes_on_in_tiles(
    family: str, folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After what is exact, of which there is none for one picture in one call."""
    monkeypatch.setattr(tiling, "SIDES", (3,))
    more = {"image": PICTURE, "num_frames": 17} if family == "opensora" else {}
    with no_room_for_width("Encoder", above=24):
        events = events_of(folders(family), family, **more)
    repairs = repairs_of(events)
    assert {repair.stage for repair in repairs} == {"given frames"}
    assert {repair.component for repair in repairs} == {"vae"}
    assert repairs[-1].to.startswith("given frames are encoded in 4 tiles")
    request = Request(model=str(folders(family)), **asked_of(family, **more))
    prepared = prepare(request, will_run=True)
    given = {"inputs": ConditioningFrames(first=PICTURE[None])}
    planned = planned_frames(prepared, saving("encode_tile", 3), **given)
    assert np.array_equal(frames_of(events), planned)
    assert not np.array_equal(planned, planned_frames(prepared, unchanged, **given))


@pytest.mark.slow
def test_frames_are_encoded_one_by_one_before_tiles_are_thought_of(tmp_path: Path) -> None:
    """Each by itself, so only sums are in another order."""
    folder = tiny_inpaint.inpaint(tmp_path / "inpaint")
    frames = np.random.default_rng(1).integers(0, 255, (3, 32, 32, 3), np.uint8)
    source = tmp_path / "source"
    source.mkdir()
    for number, frame in enumerate(frames):
        Image.fromarray(frame).save(source / f"{number}.png")
    asked = {
        "model": str(folder), "prompt": "a red ball", "source": str(source), "mask": "8,8,24,24",
        "control": "canny", "frames_at_once": 3, "num_inference_steps": 2, "seed": 1,
        "device": "cpu", "dtype": "fp32",
    }  # fmt: skip
    usual = frames_of(list(everyframe.stream(Request(**asked))))
    with no_room("Encoder", above=1) as calls:
        events = list(everyframe.stream(Request(**asked)))
    assert max(calls) == 3, "the fault was not planted"
    repairs = repairs_of(events)
    assert [repair.to.split()[5] for repair in repairs] == ["2", "1"]
    assert "only rounds differently" in repairs[-1].to
    assert np.abs(frames_of(events) - usual).max() < CLOSE


@pytest.mark.parametrize("family", [pytest.param("svd", marks=pytest.mark.slow), "opensora"])
def test_where_nothing_takes_less_it_is_refused(
    family: str, folders: Callable[[str], Path]
) -> None:
    with no_room(DENOISERS[family], above=0), pytest.raises(CannotRunError) as caught:
        events_of(folders(family), family)
    text = str(caught.value)
    assert text.startswith("step 1 of denoise")
    assert "no memory fallback is left" in text
    assert caught.value.exit_code == 3


def test_what_devices_compute_together_says_what_would_do() -> None:
    """The others wait in the middle of an exchange; none of the ways is tried on one alone."""
    guard = Guard(plan(), "denoise", {}, savings=lambda *_: iter(()), unsharded=nullcontext)

    def short() -> torch.Tensor:
        raise RuntimeError(TOO_LITTLE)

    with pytest.raises(
        CannotRunError, match=r"^step 3 of denoise .*: out of memory in a step that"
    ):
        guard.call(3, short)


def test_other_errors_stay_what_they_are() -> None:
    guard = Guard(plan(), "denoise", {})

    def broken() -> torch.Tensor:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        guard.call(1, broken)


CARD = DeviceFacts("a card", "cuda", 0, 10**12, 10**12)


def on_a_card() -> Plan:
    """As if it ran on a card, which the host's memory stands for."""
    whole = Precision("float32", "float32")
    part = ComponentPlan("net", "Net", "denoise", "toy", 0, "cpu", whole, 0, 0)
    return replace(plan(CARD), components=(part,))


def test_weights_wait_on_the_host_at_last() -> None:
    net = Net(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)).requires_grad_(False).eval()
    wanted = net(inputs())
    failures = 2

    def compute() -> torch.Tensor:
        nonlocal failures
        if failures:
            failures -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return net(inputs())

    guard = Guard(on_a_card(), "denoise", {"net": net})
    assert torch.equal(guard.call(1, compute), wanted)
    first, second = [event for event in guard.events() if isinstance(event, Repaired)]
    assert "cache is emptied" in first.to
    assert "in host memory" in second.to
    hooks = sum(len(part._forward_pre_hooks) for part in net.modules())
    assert hooks, "offloaded"


def test_what_shows_in_the_picture_comes_after_weights_that_wait() -> None:
    def savings(component: str, settings: Settings) -> Iterator[MemorySaving]:
        yield MemorySaving(settings.with_saving("at_once", 1), "one by one")
        yield MemorySaving(settings.with_saving("tile", 8), "in tiles", is_lossy=True)

    fallbacks = OomFallbacks(on_a_card(), {"net": Net(nn.Linear(8, 8))}, savings, "denoise")
    messages = [fallback.message for fallback in iter(fallbacks.next, None)]
    assert [text.split()[0] for text in messages] == ["torch's", "one", "block", "in"]
    assert "in host memory" in messages[2]


def test_each_way_is_tried_once() -> None:
    fallbacks = OomFallbacks(on_a_card(), {}, None, "denoise")
    assert fallbacks.next() is not None
    assert fallbacks.next() is None
