"""Seeded fuzz cases for the command line: its arguments and input files.

Each `Case` is a command line with its files; the same kind and seed give the same case. `Inputs`
writes valid files once, and a case changes some of their bytes or values. `fuzz_runner.py` runs and
judges the cases.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import typing
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
from PIL import Image

import everyframe
from everyframe.core.events import Step
from everyframe.core.request import Request
from everyframe.engine.run import stream
from everyframe.families.registry import all_options
from everyframe.runs.checksummed_json import read_json, write_json
from everyframe.runs.run_state import EVERY_STEP, SaveOptions
from helpers.fuzz_values import OUTPUTS, RIGHT, TEXTS, VALUES, changed
from helpers.tiny_checkpoints import opensora as tiny_opensora
from helpers.tiny_checkpoints import pipelines as tiny_pipelines
from helpers.tiny_checkpoints import svd as tiny_svd

PROMPT = "a red circle moves to the right on a blue background"

#: The file that a case reads as its standard input, where it is there.
STDIN = "stdin.txt"


@dataclass(frozen=True)
class Case:
    """A command line to run, and what must be there before.

    Attributes:
        name: kind and number, enough to make the case again.
        argv: the words after `everyframe`.
        prepare: writes files into the folder that the command runs in.
        expected: a video whose frames are the only ones that ``out.mp4`` may hold; None: any.
    """

    name: str
    argv: tuple[str, ...]
    prepare: Callable[[Path], object]
    expected: Path | None = None


Prepared = tuple[tuple[str, ...], Callable[[Path], Any]]
Maker = Callable[[random.Random, "Inputs"], Prepared]


def _nothing(folder: Path) -> None:
    """No file is needed."""


class Inputs:
    """Valid files that cases are made of, written once below `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.opensora = folder / "opensora"
        tiny_opensora.opensora_1_2(self.opensora)
        self.svd = folder / "svd"
        tiny_svd.svd(self.svd)
        self.wan = folder / "wan"
        tiny_pipelines.TINY["wan"](self.wan)
        self.shards = self._sharded()
        self.modular = folder / "modular"
        tiny_pipelines.TINY["ltx25"](self.modular)
        rng = np.random.default_rng(0)
        picture = rng.integers(0, 255, (32, 48, 3), np.uint8)
        self.media: list[Path] = []
        for ending in ("png", "jpg", "webp", "gif", "bmp", "tiff"):
            self.media.append(folder / f"picture.{ending}")
            Image.fromarray(picture).save(self.media[-1])
        video = everyframe.generate(PROMPT, seed=1, num_inference_steps=1, isolate=False)
        self.videos = [folder / f"video.{ending}" for ending in ("mp4", "gif", "webp")]
        for path in self.videos:
            video.save(path)
        self.record: dict[str, Any] = dict(video.record)
        self.run, self.whole = self._interrupted()

    def _interrupted(self) -> tuple[Path, Path]:
        """A run that was let go after its second step, and the frames of an unbroken one."""
        asked = {
            "prompt": PROMPT, "model": str(self.opensora), "seed": 3, "num_inference_steps": 3,
            "size": "32x32", "num_frames": 5, "device": "cpu",
        }  # fmt: skip
        whole = self.folder / "whole.mp4"
        everyframe.generate(**asked, isolate=False).save(whole)
        runs, steps = self.folder / "runs", 0
        events = stream(Request(**asked), keep=SaveOptions(runs, pace=EVERY_STEP), num_threads=1)
        with closing(events):
            for event in events:
                steps += isinstance(event, Step) and event.stage == "denoise"
                if steps == 2:
                    break
        return next(path for path in runs.iterdir() if path.is_dir()), whole

    def _sharded(self) -> Path:
        """Wan, one of its transformers in several files and an index of them."""
        place = self.folder / "shards"
        _link_model(self.wan, place)
        whole = diffusers.WanTransformer3DModel.from_pretrained(self.wan / "transformer")
        shutil.rmtree(place / "transformer")
        whole.save_pretrained(place / "transformer", max_shard_size="40KB")
        return place

    @property
    def models(self) -> tuple[Path, ...]:
        """The checkpoints."""
        return (self.opensora, self.svd, self.wan, self.shards, self.modular)


def flipped(data: bytes, rng: random.Random) -> bytes:
    """Those bytes with some changed, cut off, doubled or put in."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 3, 20))):
        if not out:
            break
        # Most of what a reader believes stands at the beginning.
        most = len(out) if rng.random() < 0.5 else min(len(out), 64)
        at = rng.randrange(most)
        kind = rng.randrange(5)
        if kind == 0:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            out[at] = rng.choice((0, 0xFF, 0x7F, 0x80))
        elif kind == 2:
            del out[at:]
        elif kind == 3:
            out[at:at] = out[at : at + rng.randrange(1, 64)]
        else:
            width = rng.choice((2, 4, 8))
            out[at : at + width] = rng.choice((b"\xff", b"\x00", b"\x7f")) * width
    return bytes(out)


def _link_model(model: Path, place: Path) -> None:
    """A copy of a checkpoint's folders, its files being the same ones on the disk."""
    shutil.copytree(model, place, copy_function=os.link)


def _write(path: Path, data: bytes) -> None:
    """Write in the place of what may be a link to a shared file."""
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


# ------------------------------------------------------------------ the kinds


def _options() -> dict[str, Any]:
    """Option -> its field, of every family's."""
    fields = dict(Request.model_fields)
    for options in all_options().values():
        fields |= options.model_fields
    unasked = ("family_options", "prompt", "latents", "compile")
    return {name: field for name, field in sorted(fields.items()) if name not in unasked}


_COMMANDS = (
    "plan", "plan", "plan", "plan", "generate", "generate", "generate", "inspect", "models",
    "resume", "trace", "doctor", "paths",
)  # fmt: skip


def request_case(rng: random.Random, inputs: Inputs) -> Prepared:
    """Any options with any values, of `plan` as a rule and of each other command."""
    words: list[str] = []
    command = rng.choice(_COMMANDS)
    if rng.random() < 0.8:
        words.append(PROMPT if rng.random() < 0.6 else rng.choice(TEXTS))
    if rng.random() < 0.5:
        words += ["--model", str(rng.choice(inputs.models))]
    # Where the first wrong value ends it, the others are never read.
    hostile = rng.choice((0.0, 0.1, 0.7))
    for name, field in rng.choices(list(_options().items()), k=rng.randrange(6)):
        flag = "--" + name.replace("_", "-")
        words += [flag] if field.annotation is bool else [flag, _value(name, field, hostile, rng)]
        if field.annotation is Any and rng.random() < 0.7:
            words[-1] = str(rng.choice(inputs.media + inputs.videos))
    if command == "generate" and rng.random() < 0.7:
        words.append("--dry-run")
    elif command == "generate":
        # What is asked for last is what counts; the work is to stay small.
        words += ["--num-inference-steps", "1", "--num-videos", "1", "-o", rng.choice(OUTPUTS)]
    if command in ("paths", "models"):
        words = words[1:3]
    if command == "doctor":  # one that has nothing to refuse computes for half a minute
        words = [rng.choice(("--as", "--device", "--json")), rng.choice(TEXTS)]
    # The system hands no such words to a program.
    return (command, *(word.replace("\x00", "") for word in words)), _nothing


def _value(name: str, field: Any, hostile: float, rng: random.Random) -> str:
    """A value that is right for the option, or one that is none of its kind."""
    if rng.random() < hostile:
        return rng.choice(TEXTS) if rng.random() < 0.7 else str(rng.choice(VALUES))
    if name in RIGHT:
        return rng.choice(RIGHT[name])
    kind = next((kind for kind in (int, float) if kind in _kinds(field)), None)
    if kind is None:
        return rng.choice(TEXTS)
    limits = {
        end: getattr(each, end)
        for each in field.metadata
        for end in ("gt", "ge", "le")
        if getattr(each, end, None) is not None
    }
    low, most = limits.get("ge", limits.get("gt", 0)), limits.get("le", 1000)
    near = min(most, low + rng.choice((1, 5, 17, 64)))
    value = kind(rng.uniform(low, near if rng.random() < 0.8 else most))
    return str(rng.choice((value, value, value, low, most, kind(most) + 1)))


def _kinds(field: Any) -> tuple[Any, ...]:
    return (field.annotation, *typing.get_args(field.annotation))


def stdin_case(rng: random.Random, inputs: Inputs) -> Prepared:
    """A prompt out of standard input that is cut, endless for a prompt, or no text."""
    text = rng.choice((*TEXTS, PROMPT, PROMPT * 1000)).encode("utf-8", "surrogateescape")
    data = flipped(text, rng) if rng.random() < 0.5 else text
    words = ["plan", "-"]
    if rng.random() < 0.8:
        model = rng.choice((inputs.opensora, inputs.svd, inputs.wan))
        words += ["--num-frames", "5", "--size", "32x32", "--model", str(model)]
    return tuple(words), partial(_given_file, STDIN, data)


def record_case(rng: random.Random, inputs: Inputs) -> Prepared:
    """A record with values changed, alone or within a file, read by ``--from`` and `inspect`."""
    data = json.dumps(changed(inputs.record, rng)).encode()
    if rng.random() < 0.3:
        data = flipped(data, rng)
    name = "given.json"
    if rng.random() < 0.3:
        source = rng.choice(inputs.videos)
        name = f"given{source.suffix}"
        data = flipped(source.read_bytes(), rng)
    command = rng.choice((("inspect",), ("generate", "--dry-run", "--from"), ("plan", "--from")))
    return (*command, name), partial(_given_file, name, data)


def _given_file(name: str, data: bytes, folder: Path) -> None:
    _write(folder / name, data)


def config_case(rng: random.Random, inputs: Inputs) -> Prepared:
    """A checkpoint one of whose JSON files has values or bytes changed."""
    model = rng.choice(inputs.models)
    files = sorted(path.relative_to(model) for path in model.rglob("*.json"))
    configs = [path for path in files if "config" in path.name or "index" in path.name]
    return _with_model(rng, model, rng.choice(configs or files), _json_changed)


def weights_case(rng: random.Random, inputs: Inputs) -> Prepared:
    """A checkpoint one of whose weight files has a changed header."""
    model = rng.choice(inputs.models)
    files = sorted(path.relative_to(model) for path in model.rglob("*.safetensors"))
    return _with_model(rng, model, rng.choice(files), _header_changed)


def _with_model(
    rng: random.Random, model: Path, file: Path, change: Callable[[bytes, random.Random], bytes]
) -> Prepared:
    data = change((model / file).read_bytes(), rng)

    def prepare(folder: Path) -> None:
        _link_model(model, folder / "model")
        _write(folder / "model" / file, data)

    words = ["plan", PROMPT, "--model", "./model", "--num-frames", "5", "--size", "32x32"]
    if model.name == "modular":
        words[5] = "9"
    if model.name == "svd":
        words += ["--image", str(model.parent / "picture.png")]
        words.remove(PROMPT)
    if model.name != "svd" and model.name != "opensora":
        words += ["--option", "max_sequence_length=16"]
    if rng.random() < 0.15:
        words[0] = "generate"
        words += ["--steps", "1", "-o", "out.mp4"]
    return tuple(words), prepare


def _json_changed(data: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.2:
        return flipped(data, rng)
    return json.dumps(changed(json.loads(data), rng)).encode()


def _header_changed(data: bytes, rng: random.Random) -> bytes:
    size = struct.unpack("<Q", data[:8])[0]
    header, rest = data[8 : 8 + size], data[8 + size :]
    kind = rng.random()
    if kind < 0.2:
        return (
            struct.pack("<Q", rng.choice((0, 1, size - 1, size + 1, 2**32, 2**63, 640, 1152)))
            + (data[8:])
        )
    if kind < 0.5:
        return flipped(data, rng)
    new = json.dumps(changed(json.loads(header), rng)).encode()
    return struct.pack("<Q", len(new)) + new + rest


def media_case(rng: random.Random, inputs: Inputs) -> Prepared:
    """A picture or video with bytes changed, inspected or given as a first frame."""
    source = rng.choice(inputs.media + inputs.videos)
    name = f"given{source.suffix}"
    data = flipped(source.read_bytes(), rng)
    commands = (
        ("inspect", name),
        ("plan", "--model", str(inputs.svd), "--image", name, "--num-frames", "4"),
        ("plan", PROMPT, "--extend", name, "--model", str(inputs.opensora), "--num-frames", "5"),
    )
    return rng.choice(commands), partial(_given_file, name, data)


def run_case(rng: random.Random, inputs: Inputs) -> Prepared:
    """An interrupted run one of whose files has changed bytes, resumed."""
    files = sorted(path for path in inputs.run.rglob("*") if path.is_file() and path.stat().st_size)
    file = rng.choice(files).relative_to(inputs.run)
    data = flipped((inputs.run / file).read_bytes(), rng)

    def prepare(folder: Path) -> None:
        place = folder / "runs" / inputs.run.name
        shutil.copytree(inputs.run, place)
        _write(place / file, data)

    return ("resume", inputs.run.name, "-o", "out.mp4"), prepare


def stranger_case(rng: random.Random, inputs: Inputs) -> Prepared:
    """A run folder that somebody else made, with values changed, resumed with or without names."""
    values = read_json(inputs.run / "run.json")
    assert values is not None
    values |= {name: changed(values[name], rng) for name in rng.sample(sorted(values), 1)}
    values["signature"] = ""

    def prepare(folder: Path) -> None:
        place = folder / "runs" / inputs.run.name
        shutil.copytree(inputs.run, place)
        with suppress(ValueError, RecursionError):  # no JSON
            write_json(place / "run.json", values)

    names = ("--model", str(inputs.opensora)) if rng.random() < 0.7 else ()
    return ("resume", inputs.run.name, *names, "-o", "out.mp4"), prepare


#: What makes the words and the files of a case of each kind.
KINDS: Mapping[str, Maker] = {
    "request": request_case,
    "stdin": stdin_case,
    "record": record_case,
    "config": config_case,
    "weights": weights_case,
    "media": media_case,
    "run": run_case,
    "stranger": stranger_case,
}


def names(count: int, seed: int = 0, kinds: tuple[str, ...] = ()) -> list[str]:
    """The names of `count` cases, the kinds in rotation."""
    among = kinds or tuple(KINDS)
    return [f"{among[number % len(among)]} {seed} {number}" for number in range(count)]


def case_of(name: str, inputs: Inputs) -> Case:
    """The case of that name: its kind, the seed and its number."""
    kind = name.split()[0]
    argv, prepare = KINDS[kind](random.Random(name), inputs)
    return Case(name, argv, prepare, inputs.whole if kind == "run" else None)
