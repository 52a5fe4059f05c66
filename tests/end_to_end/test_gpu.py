"""Whole runs on a CUDA card: every family against the CPU, in every precision, in little memory.

Checkpoints are tiny and random, so what is compared is whether a card computes the same function.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import everyframe
from everyframe.core.events import Event, FramesDecoded, Repaired, RunSaved, Step
from everyframe.core.request import Request
from everyframe.engine import run, tracing
from everyframe.engine.resumption import resume
from everyframe.runs.folder import RunFolder
from everyframe.runs.run_state import EVERY_STEP, SaveOptions
from helpers.tiny_checkpoints import families as tiny_families
from helpers.tiny_checkpoints import svd as tiny_svd

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
]

Frames_ = np.ndarray[Any, Any]

#: The largest difference of a pixel in 0..1 that the order of float32's sums may make.
ROUNDING = 2e-3

#: The mean difference to float32, of the spread of all pixels, that a CPU makes in half precision:
#: random weights carry each rounding on, some models' far. Measured with torch 2.13.
ON_A_CPU = {
    "opensora-1.0": {"bf16": 9.6e-03, "fp16": 1.5e-03},
    "opensora-1.2": {"bf16": 1.8e-02, "fp16": 2.0e-03},
    "opensora2": {"bf16": 1.9e-02, "fp16": 1.8e-03},
    "opensora2-dcae": {"bf16": 1.8e-02, "fp16": 1.4e-03},
    "svd": {"bf16": 3.1e-02, "fp16": 3.2e-03},
    "inpaint": {"bf16": 6.8e-03, "fp16": 1.1e-03},
    "stepvideo": {"bf16": 5.8e-02, "fp16": 4.0e-03},
    "wan": {"bf16": 2.0e-01, "fp16": 9.2e-02},
    "ltx2": {"bf16": 7.0e-03, "fp16": 9.8e-04},
    "hunyuan15": {"bf16": 9.1e-03, "fp16": 1.1e-03},
    "cogvideox": {"bf16": 1.9e-02, "fp16": 3.3e-03},
    "ltx": {"bf16": 9.1e-03, "fp16": 1.2e-03},
    "ltx25": {"bf16": 1.1e-02, "fp16": 1.4e-03},
    "minimax_h3": {"bf16": 4.6e-03, "fp16": 5.7e-04},
    "hunyuan": {"bf16": 2.2e-01, "fp16": 2.2e-03},
    "mochi": {"bf16": 2.7e-02, "fp16": 3.5e-03},
    "latte": {"bf16": 4.4e-02, "fp16": 4.8e-03},
    "animatediff": {"bf16": 3.8e-02, "fp16": 7.0e-03},
    "wan_of_a_picture": {"bf16": 3.7e-01, "fp16": 8.5e-02},
}
#: A card rounds at other places, and may be so many times as far off.
TIMES = 2.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("models")
    return lambda name: tiny_families.made(name, root)


@pytest.fixture(scope="module")
def frames_of(folder: Callable[[str], Path]) -> Callable[..., Frames_]:
    """Frames (T, H, W, 3) in 0..1 of that checkpoint; the CPU's in float32 are made once."""

    def made(name: str, **more: Any) -> Frames_:
        asked = tiny_families.asked(name, **more)
        video = everyframe.generate(model=str(folder(name)), output="float", run_dir="off", **asked)
        assert isinstance(video, everyframe.Video)
        return video.frames

    on_cpu = cache(lambda name: made(name, device="cpu", dtype="fp32"))

    def frames(name: str, **more: Any) -> Frames_:
        return made(name, **more) if more else on_cpu(name)

    return frames


def off(got: Frames_, want: Frames_) -> tuple[float, float]:
    """The largest difference, and the mean one over the spread of `want`."""
    assert got.shape == want.shape
    assert want.std() > 0.01, "a flat picture would compare equal to anything flat"
    return float(np.abs(got - want).max()), float(np.abs(got - want).mean() / want.std())


@pytest.mark.parametrize("name", tiny_families.NAMES)
def test_float32_is_that_of_the_cpu_and_comes_again(
    name: str, frames_of: Callable[..., Frames_], record_property: Callable[..., None]
) -> None:
    want = frames_of(name)
    got = frames_of(name, device="cuda", dtype="fp32")
    largest, mean = off(got, want)
    record_property("largest, mean", f"{largest:.2e} {mean:.2e}")
    assert largest <= ROUNDING, (largest, mean)
    assert np.array_equal(frames_of(name, device="cuda", dtype="fp32"), got)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", tiny_families.NAMES)
def test_half_precision_is_near_and_comes_again(
    name: str, dtype: str, frames_of: Callable[..., Frames_], record_property: Callable[..., None]
) -> None:
    want = frames_of(name)
    got = frames_of(name, device="cuda", dtype=dtype)
    largest, mean = off(got, want)
    record_property("largest, mean", f"{largest:.2e} {mean:.2e}")
    assert mean <= TIMES * ON_A_CPU[name][dtype], (largest, mean)
    assert np.array_equal(frames_of(name, device="cuda", dtype=dtype), got)


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn", "math"])
@pytest.mark.parametrize("name", ["opensora-1.2", "svd", "stepvideo", "wan"])
def test_every_kernel_of_attention_gives_the_same_video(
    name: str, kernel: str, frames_of: Callable[..., Frames_]
) -> None:
    largest, mean = off(frames_of(name, device="cuda", attention=kernel), frames_of(name))
    assert mean <= TIMES * ON_A_CPU[name]["bf16"], (largest, mean)


#: Memory with which some weights wait on the host, and with which less of the host they stay in
#: their files.
LITTLE = {"svd": "5MB", "stepvideo": "10MB"}


@pytest.mark.parametrize("streams", [False, True], ids=["from the host", "from files"])
@pytest.mark.parametrize("name", LITTLE)
def test_weights_that_wait_elsewhere_give_the_same_video(
    name: str, streams: bool, folder: Callable[[str], Path], frames_of: Callable[..., Frames_]
) -> None:
    little: dict[str, Any] = {"max_memory": LITTLE[name]}
    if streams:
        little["max_host_memory"] = "500kB"
    asked = tiny_families.asked(name, device="cuda", dtype="fp32", **little)
    plan = everyframe.plan(model=str(folder(name)), **asked)
    waiting = [part for part in plan.components if part.block_offload]
    assert waiting
    assert any(part.from_disk for part in waiting) == streams
    largest, _ = off(frames_of(name, device="cuda", dtype="fp32", **little), frames_of(name))
    assert largest <= ROUNDING


def test_weights_in_eight_bits_are_those_of_the_cpu(frames_of: Callable[..., Frames_]) -> None:
    for kind in ("int8", "fp8"):
        want = frames_of("stepvideo", device="cpu", dtype="fp32", quantize=kind)
        got = frames_of("stepvideo", device="cuda", dtype="fp32", quantize=kind)
        largest, mean = off(got, want)
        assert largest <= ROUNDING, (kind, largest, mean)
        # And they are not the whole ones.
        assert np.abs(got - frames_of("stepvideo")).max() > ROUNDING


def events_of(folder: Path, name: str, **more: Any) -> list[Event]:
    asked = tiny_families.asked(name, device="cuda", **more)
    return list(everyframe.stream(Request(model=str(folder), **asked)))


def joined(events: list[Event]) -> Frames_:
    return np.concatenate([event.frames for event in events if isinstance(event, FramesDecoded)])


@pytest.mark.parametrize(
    ("name", "file", "module"),
    [
        ("svd", "unet/diffusion_pytorch_model", "mid_block.resnets.0.temporal_res_block.conv1"),
        ("opensora-1.2", "model", "spatial_blocks.0.mlp.fc1"),
    ],
)
def test_overflow_in_float16_is_repaired_where_it_arises(
    name: str, file: str, module: str, tmp_path: Path
) -> None:
    folder = tiny_families.made(name, tmp_path)
    path = folder / f"{file}.safetensors"
    tensors = load_file(path)
    weight = tensors[f"{module}.weight"]
    # As large as float16 just holds.
    tensors[f"{module}.weight"] = weight * (6e4 / weight.abs().max())
    save_file(tensors, path, metadata={"format": "pt"})
    events = events_of(folder, name, dtype="fp16")
    repairs = [event for event in events if isinstance(event, Repaired)]
    assert [event.module for event in repairs][:1] == [module]
    assert {event.cause for event in repairs} == {"range"}
    got = joined(events)
    assert np.isfinite(got).all()
    want = joined(events_of(folder, name, dtype="fp32"))
    assert np.abs(got - want).mean() <= 0.03 * want.std()


def test_too_little_memory_is_done_in_less(tmp_path: Path) -> None:
    """A card whose memory somebody else has taken meanwhile: the plan counted on all of it."""
    folder = tiny_svd.svd(tmp_path / "svd")
    asked = {"size": "512x512", "num_frames": 14, "dtype": "fp32"}
    torch.cuda.reset_peak_memory_stats()
    want = joined(events_of(folder, "svd", **asked))
    most = torch.cuda.max_memory_reserved()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(0.6 * most / total)
    try:
        events = events_of(folder, "svd", **asked)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    repairs = [event for event in events if isinstance(event, Repaired)]
    assert repairs, "the fault was not planted"
    assert {event.cause for event in repairs} == {"memory"}
    assert "out of memory" in repairs[0].text
    # This decoder gives other frames in other chunks: those that were taken are asked for at once.
    chunks = [re.search(r"decoded (\d+) at once", repair.to) for repair in repairs]
    sizes = [int(found[1]) for found in chunks if found]
    if sizes:
        want = joined(events_of(folder, "svd", decode_chunk_size=sizes[-1], **asked))
    assert np.abs(joined(events) - want).max() <= ROUNDING


@pytest.mark.parametrize("name", ["opensora-1.2", "svd", "inpaint", "stepvideo"])
def test_a_run_that_is_interrupted_gives_the_same_bits(name: str, tmp_path: Path) -> None:
    asked = tiny_families.asked(name, device="cuda", num_inference_steps=3)
    request = Request(model=str(tiny_families.made(name, tmp_path)), **asked)
    keep = SaveOptions(tmp_path / "runs", pace=EVERY_STEP)
    whole = list(run.stream(request, keep=keep))
    steps = [place for place, event in enumerate(whole) if isinstance(event, Step)]
    events = run.stream(request, keep=keep)
    begun = list(itertools.islice(events, steps[1] + 1))
    events.close()  # type: ignore[attr-defined]
    (kept,) = [event for event in begun if isinstance(event, RunSaved)]
    again = list(resume.resume_run(RunFolder(Path(kept.path))))
    assert np.array_equal(joined(again), joined(whole))


def test_a_trace_of_a_card_differs_from_the_cpus_by_rounding_alone(
    folder: Callable[[str], Path], tmp_path: Path
) -> None:
    for device in ("cpu", "cuda"):
        asked = tiny_families.asked("opensora-1.2", device=device, dtype="fp32")
        request = Request(model=str(folder("opensora-1.2")), **asked)
        for _ in tracing.record(request, tmp_path / f"{device}.trace"):
            pass
    verdict = everyframe.trace_diff(tmp_path / "cpu.trace", tmp_path / "cuda.trace")
    assert verdict.is_explained, verdict.place


def test_modules_on_a_card_are_traced_inside_of_a_run(tmp_path: Path) -> None:
    """What a trace says of float32 there asks torch for switches that a run has set."""
    from everyframe.precision.strict_float32 import strict_float32

    net = torch.nn.Linear(4, 4).cuda()
    with strict_float32(), everyframe.trace(net, tmp_path / "a.trace"):
        net(torch.zeros(1, 4, device="cuda"))
    assert (tmp_path / "a.trace").exists()
