"""A byte of a run folder that changed later: an error names it, and no other video is made.

Every byte of the JSON files is changed once, and of every other file one in each region; of some,
the run is resumed. What is compared with is the unbroken run.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from everyframe.core.errors import CorruptRunError, ExitCode
from everyframe.core.events import Event, Note, Step
from everyframe.engine.resumption import resume
from everyframe.runs.checksummed_json import read_json
from everyframe.runs.folder import RunFolder
from everyframe.runs.replay_log import FileReplayLog
from everyframe.runs.tensor_store import TensorStore
from helpers.interrupted_runs import OPEN_SORA, PICTURE, begun, same, stop_before
from helpers.tiny_checkpoints import opensora as tiny_opensora

#: Regions of a file of tensors in which a byte is changed.
_REGIONS = 24


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, list[Event]]:
    """A run that was interrupted in its second clip, and the events of the same run unbroken."""
    place = tmp_path_factory.mktemp("flipped")
    options = {**OPEN_SORA, "model": str(tiny_opensora.opensora_1_2(place / "model")), "chain": 2,
               "image": PICTURE, "edit_strength": 0.5}  # fmt: skip
    whole = list(begun(place / "whole", **options))
    steps = [number for number, e in enumerate(whole) if isinstance(e, Step)]
    last = [number for number in steps if whole[number].stage == "denoise"][-2]  # type: ignore[attr-defined]
    folder = stop_before(begun(place / "runs", **options), last + 1)
    folder.write_oom_events([])
    return folder, whole


def flips(path: Path, count: int) -> Iterator[int]:
    """Places in a file, with its bytes changed there while each is had."""
    data = path.read_bytes()
    size = len(data)
    for number in range(min(count, size)):
        place = number * size // min(count, size)
        changed = bytearray(data)
        changed[place] ^= 1 << number % 8
        path.write_bytes(changed)
        yield place
    path.write_bytes(data)


def is_refused(path: Path) -> bool:
    """Whether JSON with a changed byte is seen to have one."""
    try:
        read_json(path)
    except CorruptRunError:
        return True
    return False


@pytest.mark.parametrize("one_of", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_every_byte_of_what_is_json_is_seen(
    one_of: int, unbroken: tuple[RunFolder, list[Event]]
) -> None:
    """One of so many of them, each seen by the digest of them all."""
    folder, _ = unbroken
    files = [folder.path / name for name in ("run.json", "state.json", "oom_events.json")]
    for path in files:
        assert read_json(path)
        for place in flips(path, path.stat().st_size // one_of):
            assert is_refused(path), f"byte {place} of {path.name} was believed"
        assert read_json(path)


def test_every_region_of_every_tensor_is_seen(unbroken: tuple[RunFolder, list[Event]]) -> None:
    folder, _ = unbroken
    stores = [TensorStore(folder.tensors), TensorStore(folder.given)]
    paths = [(store, path) for store in stores for path in store.folder.iterdir()]
    assert len(paths) >= 3
    for store, path in paths:
        for _ in flips(path, _REGIONS):
            with pytest.raises(CorruptRunError):
                store.fetch({"as": "tensor", "hash": path.stem})


def test_every_region_of_every_answer_is_seen(tmp_path: Path) -> None:
    answers = FileReplayLog(tmp_path / "3", pytest.fail)
    for number in range(2):
        assert answers.next(str(number)) is None
        answers.keep((torch.randn(3, 5),), ())
    second = sorted((tmp_path / "3").iterdir())[1]
    saved = second.read_bytes()
    for _ in flips(second, _REGIONS):
        messages: list[str] = []
        again = FileReplayLog(tmp_path / "3", messages.append)
        assert again.repairs() == ()
        assert again.next("0") is not None
        assert again.next("1") is None
        assert len(messages) == 1
        second.write_bytes(saved)


def test_nothing_else_lies_in_a_run(unbroken: tuple[RunFolder, list[Event]]) -> None:
    """What has no bytes can't be changed; every file that has some is tried here."""
    folder, _ = unbroken
    others = {
        path.name
        for path in folder.path.rglob("*")
        if path.is_file() and path.stat().st_size and path.parent.name not in ("tensors", "given")
    }
    assert others == {"run.json", "state.json", "oom_events.json"}


@pytest.mark.parametrize("name", ["run.json", "state.json", "oom_events.json", "tensors", "given"])
def test_a_run_with_a_changed_byte_begins_again_or_is_refused(
    name: str, unbroken: tuple[RunFolder, list[Event]], tmp_path: Path
) -> None:
    folder, whole = unbroken
    for number in range(2):
        copy = RunFolder(Path(shutil.copytree(folder.path, tmp_path / f"{number}-{folder.name}")))
        path = copy.path / name
        path = sorted(path.iterdir())[-1] if path.is_dir() else path
        data = bytearray(path.read_bytes())
        data[(2 * number + 1) * len(data) // 4] ^= 4
        path.write_bytes(data)
        if name in ("state.json", "tensors"):
            again = list(resume.resume_run(copy))
            same(whole, again)
            assert any(isinstance(e, Note) and path.name in e.text for e in again)
            continue
        with pytest.raises(CorruptRunError, match="generate it again from the start") as caught:
            list(resume.resume_run(copy))
        assert str(path) in str(caught.value)
        assert caught.value.exit_code == ExitCode.WRONG_INPUT
