"""Evaluate the embedded model's targets: ``python recipes/shapes/evaluate.py [--side 128]``.

`everyframe.generate` makes the clips, and plain image arithmetic reads them (`reader.py`). Prompts
and seeds are fixed, one try each. It prints a table and exits with 1 if a target is missed.
``--validation`` uses other prompts and seeds, to choose steps and guidance. ``--count 20`` is a
quick look without statistical weight. ``--processes 2`` makes the same clips in parallel, which is
faster if other work runs on the same cores.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

import everyframe
from everyframe.checkpoints.shapes_prompts import Scene
from recipes.shapes import captions, reader, world
from recipes.shapes.world import FORMATS, SMALL, Format

NAMES = ("colour", "background", "motion", "shape")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Row:
    """One line of the table: name, value, target, and whether the target is met."""

    name: str
    value: float
    bar: str
    met: bool


@dataclass(frozen=True)
class Trial:
    """A prompt with its scene and its one seed."""

    scene: Scene
    prompt: str
    seed: int


def at_least(name: str, value: float, bar: float) -> Row:
    return Row(name, value, f">= {bar:g}", value >= bar)


def below(name: str, value: float, bar: float) -> Row:
    return Row(name, value, f"< {bar:g}" if bar else "= 0", value < bar if bar else value == 0)


def trials(count: int, validation: bool) -> list[Trial]:
    """`count` prompts, half of them of attribute combinations that were not in training."""
    rng = np.random.default_rng(2027 if validation else 2026)
    first_seed = 500_000 if validation else 1000
    never = rng.permutation(len(world.held_out_scenes()))
    seen = rng.permutation(len(world.train_scenes()))
    found = []
    for i in range(count):
        if i % 2 == 0:
            scene = world.held_out_scenes()[never[i // 2 % len(never)]]
        else:
            scene = world.train_scenes()[seen[i // 2]]
        found.append(Trial(scene, captions.caption(scene, rng), first_seed + i))
    return found


def measure_reader(count: int, form: Format = SMALL) -> list[Row]:
    """The reader on true clips, on other clips' captions, on noise and on constant frames."""
    rng = np.random.default_rng(31)
    scenes = [world.all_scenes()[i] for i in rng.permutation(len(world.all_scenes()))[:count]]
    read = []
    for start in range(0, count, 50):
        read += [reader.read(frames) for frames in _drawn(scenes[start : start + 50], form, rng)]
    others = [*scenes[1:], scenes[0]]
    shape = (form.num_frames, form.side, form.side, 3)
    nothing = [rng.uniform(size=shape).astype(np.float32) for _ in range(20)]
    nothing += [np.full(shape, value, np.float32) for value in np.linspace(0, 1, 20)]
    for name in world.PALETTE:
        flat = np.array(world.PALETTE[name], np.float32) / 255
        nothing.append(np.broadcast_to(flat, shape).copy())
    of_nothing = [reader.read(frames) for frames in nothing]
    seen = [any(getattr(one, name) for name in NAMES) for one in of_nothing]
    return [
        at_least("reader: true clips", _all_right(read, scenes), 0.99),
        below("reader: another clip's caption", _all_right(read, others), 0.15),
        below("reader: anything in noise or constants", float(np.mean(seen)), 0),
    ]


def _drawn(scenes: Sequence[Scene], form: Format, rng: np.random.Generator) -> world.Floats:
    """A true clip of each scene (B, T, H, W, 3), 0..1."""
    return world.pictures(world.draw_whole(world.random_clips(scenes, rng), form))


def _all_right(read: list[reader.Reading], scenes: list[Scene]) -> float:
    pairs = zip(read, scenes, strict=True)
    return float(np.mean([all(one.right(scene).values()) for one, scene in pairs]))


def measure_autoencoder(count: int, form: Format = SMALL) -> list[Row]:
    """PSNR of drawn clips through the shipped autoencoder: whole frames, and the object alone."""
    from recipes.shapes import shipped, temporal

    vae, rng = shipped.autoencoder(), np.random.default_rng(32)
    scenes = world.random_scenes(world.all_scenes(), count, rng)
    found = temporal.measure(vae, temporal.clip_frames(world.random_clips(scenes, rng), form))
    return [
        at_least("autoencoder: PSNR, dB", found["psnr"], 30),
        at_least("autoencoder: PSNR on the object, dB", found["object"], 30),
    ]


def measure_prompts(
    chosen: list[Trial], options: dict[str, Any], processes: int, say: Say
) -> list[Row]:
    """Generated clips, read back: each attribute over all, unseen and trained combinations."""
    rights: list[dict[str, bool]] = []
    begun = time.monotonic()
    made = _each(_made, [(trial, options, None) for trial in chosen], processes)
    for number, (trial, (found, _)) in enumerate(zip(chosen, made, strict=True), start=1):
        rights.append(found.right(trial.scene))
        if not all(rights[-1].values()):
            say(f"  missed: {trial.prompt!r} seed {trial.seed}: {found}")
        if number % 20 == 0:
            say(f"  {number}/{len(chosen)}, {(time.monotonic() - begun) / number:.2f} s a clip")
    rows = []
    for name in NAMES:
        share = [float(right[name]) for right in rights]
        bar = 0.90 if name == "shape" else 0.95
        rows.append(at_least(f"generated: {name}", float(np.mean(share)), bar))
        rows.append(Row(f"  of never-trained ones: {name}", float(np.mean(share[::2])), "", True))
    every = [all(right.values()) for right in rights]
    return [*rows, Row("generated: all four", float(np.mean(every)), "", True)]


def measure_image(
    chosen: list[Trial], options: dict[str, Any], form: Format, processes: int, say: Say
) -> list[Row]:
    """Clips from a given first frame: its PSNR, and whether the motion is as requested."""
    kept: list[float] = []
    moved: list[bool] = []
    rng = np.random.default_rng(33)
    with tempfile.TemporaryDirectory() as folder:
        jobs = []
        for number, trial in enumerate(chosen):
            first = _drawn([trial.scene], form, rng)[0, 0]
            path = Path(folder) / f"{number}.png"
            _save_png(path, np.round(first * 255).astype(np.uint8))
            jobs.append((trial, options, path))
        for trial, (found, error) in zip(chosen, _each(_made, jobs, processes), strict=True):
            kept.append(float(-10 * np.log10(max(1e-10, error))))
            moved.append(found.motion == trial.scene.motion)
            if not moved[-1]:
                say(f"  missed with an image: {trial.prompt!r} seed {trial.seed}: {found}")
    return [
        at_least("first frame given: least PSNR of it, dB", min(kept), 25),
        at_least("first frame given: motion", float(np.mean(moved)), 0.95),
    ]


Job = tuple[Trial, dict[str, Any], Path | None]


def _made(job: Job) -> tuple[reader.Reading, float]:
    """Reading of one generated clip, and the mean square error (pixels 0..1) of its image."""
    trial, options, image = job
    if image is None:
        return reader.read(_frames(trial, options)), 0.0
    frames = _frames(trial, {**options, "image": str(image)})
    error = (frames[0].astype(np.float64) - _load_png(image)) / 255
    return reader.read(frames), float(np.square(error).mean())


def _each(
    make: Callable[[Job], tuple[reader.Reading, float]], jobs: Sequence[Job], processes: int
) -> Iterator[tuple[reader.Reading, float]]:
    """Results of all jobs in order, from this process or from several with one core each."""
    if processes == 1:
        yield from map(make, jobs)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, initializer=_one_core) as pool:
        yield from pool.imap(make, jobs)


def _one_core() -> None:
    """A plan takes as many threads as the process has cores."""
    if hasattr(os, "sched_setaffinity"):  # Linux
        cores = sorted(os.sched_getaffinity(0))
        (number,) = multiprocessing.current_process()._identity
        os.sched_setaffinity(0, {cores[number % len(cores)]})


def _frames(trial: Trial, options: dict[str, Any]) -> Any:
    video = everyframe.generate(trial.prompt, model="shapes", seed=trial.seed, **options)
    assert not isinstance(video, list)
    return video.frames


def _save_png(path: Path, frame: Any) -> None:
    from PIL import Image

    Image.fromarray(frame).save(path)


def _load_png(path: Path) -> Any:
    from PIL import Image

    with Image.open(path) as image:
        return np.asarray(image)


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    lines = ["| measured | value | bar | met |", "| --- | ---: | ---: | --- |"]
    for row in rows:
        met = ("yes" if row.met else "NO") if row.bar else ""
        lines.append(f"| {row.name} | {row.value:.4g} | {row.bar} | {met} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="number of prompts")
    parser.add_argument("--images", type=int, default=40, help="number of given first frames")
    parser.add_argument("--validation", action="store_true", help="other prompts and seeds")
    parser.add_argument("--side", type=int, default=SMALL.side, help="of a frame: 64 or 128")
    parser.add_argument("--steps", type=int, help="steps instead of the checkpoint's own")
    parser.add_argument("--guidance", type=float, help="scale instead of the checkpoint's own")
    parser.add_argument("--quality", help="budget or method, instead of exact")
    parser.add_argument("--device", help="to make clips on, instead of the plan's choice")
    parser.add_argument("--processes", type=int, default=1, help="that make clips side by side")
    parser.add_argument("--json", type=Path, help="write the rows to this file as well")
    given = parser.parse_args()
    (form,) = (each for each in FORMATS if each.side == given.side)
    asked = {
        "height": form.side, "width": form.side, "num_frames": form.num_frames,
        "num_inference_steps": given.steps, "guidance_scale": given.guidance,
        "device": given.device, "quality": given.quality,
    }  # fmt: skip
    options = {name: value for name, value in asked.items() if value is not None}

    def say(line: str) -> None:
        print(line, flush=True)

    chosen = trials(given.count, given.validation)
    with_image = trials(given.images, given.validation)
    rows = measure_reader(300, form) + measure_autoencoder(48, form)
    rows += measure_prompts(chosen, options, given.processes, say)
    if given.images:
        rows += measure_image(with_image, options, form, given.processes, say)
    say(table(rows))
    if given.json is not None:
        given.json.write_text(json.dumps([row.__dict__ for row in rows], indent=2) + "\n")
    return 0 if all(row.met for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
