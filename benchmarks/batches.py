"""What is a step of several videos at once worth, and does each video keep its bits?

    python benchmarks/batches.py    # five minutes

First one forward of STDiT3 for 1, 2 and 4 videos of the same plan, by turns: as one tensor, and
as a server does it, with products and attention to texts video by video. Then jobs of the embedded
model through a server's queue and worker, one by one and in batches, by turns.
"""

from __future__ import annotations

import hashlib
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from denoiser import Sizes, build
from measuring import hardware, seconds
from result_pages import compose_page, make_parser, publish, where
from torch import Tensor

from everyframe.core.facts import DeviceFacts
from everyframe.engine.calibration import shapes_prompts
from everyframe.engine.workers.warm_workers import WarmWorkers
from everyframe.families.opensora.sharding import Sharding
from everyframe.families.opensora.stdit3 import STDiT3
from everyframe.hardware import machine_facts, pick_device
from everyframe.media.read import read_video
from everyframe.ops.call_override import ModuleCall
from everyframe.ops.text_context import KeysValues, TextContext
from everyframe.parallel.communicator import ONE
from everyframe.precision.strict_float32 import strict_float32
from everyframe.runtime.batched_calls import BatchedModule
from everyframe.server.data_folder import open_folder
from everyframe.server.dispatch.dispatcher import Dispatcher, DispatcherOptions
from everyframe.server.queue.jobs import NewJob
from everyframe.server.queue.store import JobStore

BATCHES = (1, 2, 4)
#: The embedded model's size, and two blocks of Open-Sora's.
SIZES = (
    Sizes(hidden=192, heads=4, depth=6, frames=4, side=8, text=32),
    Sizes(hidden=1152, heads=16, depth=1, frames=4, side=32, text=120),
)


def calls_of(model: STDiT3, sizes: Sizes, device: str) -> list[ModuleCall]:
    """A denoiser call of each video, whose texts differ in length."""
    generator = torch.Generator().manual_seed(1)
    side, pixels = sizes.side, float(sizes.side * 8)
    calls = []
    for number in range(max(BATCHES)):
        latents = torch.randn(1, 4, sizes.frames, side, side, generator=generator).to(device)
        text = torch.randn(1, sizes.text, sizes.hidden, generator=generator).to(device)
        mask = torch.arange(sizes.text)[None] < sizes.text - number
        t = torch.full((1,), 637.5 - number, device=device)
        given = (latents, t, model.context(text, mask))
        sized = {"fps": 24.0, "height": pixels, "width": pixels}
        calls.append(ModuleCall(model, type(model), given, sized))
    return calls


def one_after_the_other(calls: list[ModuleCall]) -> list[Tensor]:
    """The calls without a batch."""
    return [call.compute() for call in calls]


def plainly(model: STDiT3, calls: list[ModuleCall]) -> list[Tensor]:
    """The calls as one, all rows in one product; texts are cut to the shortest, as if equal."""
    length = min(call.args[2].blocks[0].keys.shape[2] for call in calls)
    texts = [call.args[2] for call in calls]
    blocks = tuple(
        KeysValues(
            torch.cat([each.keys[:, :, :length] for each in parts]),
            torch.cat([each.values[:, :, :length] for each in parts]),
        )
        for parts in zip(*(text.blocks for text in texts), strict=True)
    )
    latents, t = (torch.cat([call.args[place] for call in calls]) for place in (0, 1))
    made: Tensor = model(latents, t, TextContext(blocks, None), **calls[0].kwargs)
    return list(made.chunk(len(calls)))


def measure(sizes: Sizes, dtype: str, rounds: int, device: str) -> list[str]:
    """A row of the table for each batch."""
    model = build(sizes, dtype, plain=False, device=device)
    calls, taken = calls_of(model, sizes, device), dict[tuple[str, int], list[float]]()
    same: dict[tuple[str, int], int] = {}
    with Sharding(model, ONE), BatchedModule(model) as batched:
        alone = one_after_the_other(calls)
        ways: dict[str, Callable[[list[ModuleCall]], Sequence[Tensor]]] = {
            "in one tensor": partial(plainly, model),
            "products apart": batched.compute,
        }
        for _ in range(rounds):
            for count in BATCHES:
                some = calls[:count]
                one_by_one = seconds(partial(one_after_the_other, some), device)
                for name, way in ways.items():
                    spent = seconds(partial(way, some), device)
                    taken.setdefault((name, count), []).append(one_by_one / spent)
        for name, way in ways.items():
            for count in BATCHES:
                pairs = zip(way(calls[:count]), alone, strict=False)
                same[name, count] = sum(torch.equal(a, b) for a, b in pairs)
    return [
        f"| {sizes.hidden} | {dtype} | {name} | {count} | {statistics.median(gains):.2f} "
        f"| {same[name, count]} of {count} |"
        for (name, count), gains in taken.items()
    ]


def queue_rows(num_jobs: int, rounds: int) -> list[str]:
    """Jobs of the embedded model through a queue, one by one and in batches, by turns."""
    rates: dict[int, list[float]] = {1: [], 4: []}
    frames: set[bytes] = set()
    workers = WarmWorkers()
    for number in range(rounds + 1):
        for most, found in rates.items():
            with tempfile.TemporaryDirectory() as folder:
                rate, digest = through_queue(workers, Path(folder) / "server", most, num_jobs)
            frames.add(digest)
            if number:  # the first turn loads, plans, and tries the batches
                found.append(rate)
    workers.close()
    assert len(frames) == 1, "a video of a batch has other frames"
    base = statistics.median(rates[1])
    return [
        f"| {most} | {statistics.median(found):.2f} | {statistics.median(found) / base:.2f} |"
        for most, found in rates.items()
    ]


def through_queue(
    workers: WarmWorkers, place: Path, most: int, num_jobs: int
) -> tuple[float, bytes]:
    """Jobs a second, and a digest of all their frames."""
    folder = open_folder(place)
    store = JobStore(folder)
    dispatcher = Dispatcher(store, workers, DispatcherOptions(max_batch=most))
    prompts = shapes_prompts(num_jobs)
    jobs = [
        store.add(NewJob({"prompt": prompt, "seed": seed}, model="shapes"))
        for seed, prompt in enumerate(prompts)
    ]
    began = time.perf_counter()
    dispatcher.start()
    while store.count()["completed"] < num_jobs:
        assert not store.count()["failed"], "a job failed"
        time.sleep(0.01)
    rate = num_jobs / (time.perf_counter() - began)
    dispatcher.drain()
    hasher = hashlib.sha256()
    for job in jobs:
        done = store.get(job.id)
        assert done is not None
        hasher.update(read_video(folder.path / str(done.file))[0].tobytes())
    store.close()
    folder.close()
    return rate, hasher.digest()


def page(rows: list[str], jobs: list[str], num_jobs: int, device: DeviceFacts) -> str:
    """The result page."""
    lines = [
        "One forward of STDiT3 for several videos of one plan, whose texts differ in length. Speed",
        "is beside the same calls one by one; bits are those of each video by itself.", "",
        "| width | dtype | way | videos | speed | with the same bits |",
        "| --- | --- | --- | --- | --- | --- |", *rows, "",
        *(f"Width {sizes.hidden}: {sizes}." for sizes in SIZES), "",
        f"{num_jobs} jobs of the embedded model through the queue and one worker; frames are the",
        "same to the bit:", "",
        "| jobs at a time | videos a second | speed |", "| --- | --- | --- |", *jobs,
    ]  # fmt: skip
    title = f"Several videos in one step on {where(device)}"
    return compose_page(title, "\n".join(lines), hardware(machine_facts(device.kind), device))


@torch.inference_mode()
def main() -> None:
    """Measure, print, and write the page."""
    parser = make_parser(__doc__, rounds=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=24, help="jobs of a turn through the queue")
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    device = pick_device(machine_facts(args.device), args.device)
    with strict_float32():
        rows = [
            row
            for sizes in SIZES
            for dtype in ("float32", "bfloat16")
            for row in measure(sizes, dtype, args.rounds, device.torch_name)
        ]
    jobs = queue_rows(args.jobs, args.turns)
    text = page(rows, jobs, args.jobs, device)
    publish("batches", text, is_page=args.is_page, device=device)


if __name__ == "__main__":
    main()
