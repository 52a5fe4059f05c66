"""A pipeline's dry run that an earlier process saved is the one that this would make."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import everyframe
from everyframe.checkpoints import cache_file
from everyframe.dry_run import executor
from everyframe.dry_run.result import DryRunResults
from everyframe.planning import dry_runs
from everyframe.planning.resolve import PreparedPlan, prepare
from helpers.tiny_checkpoints import pipelines

ASKED: dict[str, Any] = {
    "prompt": "a fox", "size": "32x32", "num_frames": 5, "num_inference_steps": 2, "seed": 1,
    "device": "cpu", "dtype": "fp32",
}  # fmt: skip


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny-wan"
    pipelines.wan(path)
    return path


@pytest.fixture
def folder(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy that a test may change, and a cache folder with nothing in it."""
    monkeypatch.setenv("EVERYFRAME_CACHE", str(tmp_path / "cache"))
    return Path(shutil.copytree(original, tmp_path / "tiny-wan"))


@pytest.fixture(scope="module")
def saved(
    original: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str, DryRunResults]:
    """A cache folder with the dry runs of two prompts; the name of the first one's file, and it."""
    with pytest.MonkeyPatch.context() as patch:
        cache = tmp_path_factory.mktemp("cache")
        patch.setenv("EVERYFRAME_CACHE", str(cache))
        found = seen_by(patch, executor.dry_run)
        another_process(original)
        (file,) = files()
        another_process(original, prompt="a hen")
    return cache, file.name, found[0]


@pytest.fixture
def known(
    original: Path,
    saved: tuple[Path, str, DryRunResults],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """A folder that no test changes; a copy of the cache that knows it."""
    monkeypatch.setenv("EVERYFRAME_CACHE", str(shutil.copytree(saved[0], tmp_path / "cache")))
    return original


def seen_by(patch: pytest.MonkeyPatch, run: Callable[..., DryRunResults]) -> list[DryRunResults]:
    """Every dry run from now on, which `run` makes."""
    found: list[DryRunResults] = []

    def seen(*given: Any) -> DryRunResults:
        found.append(run(*given))
        return found[-1]

    patch.setattr(executor, "dry_run", seen)
    return found


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[DryRunResults]:
    """Every dry run that is made."""
    return seen_by(monkeypatch, executor.dry_run)


@pytest.fixture
def counted(
    saved: tuple[Path, str, DryRunResults], monkeypatch: pytest.MonkeyPatch
) -> list[DryRunResults]:
    """Every dry run that is asked for, where it matters that it is and not what it finds.

    The first one stands for all: each takes as long as the rest of the test.
    """
    return seen_by(monkeypatch, lambda *_: saved[2])


def another_process(folder: Path, **changes: Any) -> PreparedPlan:
    """The plan of a process that has made none."""
    profile = changes.pop("profile", None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dry_runs, "_DONE", {})
        return prepare(
            everyframe.Request(**{"model": str(folder), **ASKED, **changes}), profile=profile
        )


def files() -> list[Path]:
    return sorted((cache_file.cache_folder() / "pipeline_dry_runs").glob("*.json"))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_second_plan_makes_no_dry_run_and_is_the_same(
    folder: Path, made: list[DryRunResults], dtype: str
) -> None:
    first = another_process(folder, dtype=dtype, force=True)
    assert len(made) == 1
    # Steps beyond the first and seeds change nothing in it.
    assert another_process(folder, dtype=dtype, force=True, seed=2, num_inference_steps=9)
    second = another_process(folder, dtype=dtype, force=True)
    assert len(made) == 1, "it is made again"
    free = {"free_memory": None}  # what other programs leave
    plans = [each.plan.to_json() for each in (first, second)]
    assert {**plans[0], "device": {**plans[0]["device"], **free}} == {
        **plans[1], "device": {**plans[1]["device"], **free},
    }  # fmt: skip
    assert [(run.found, run.made, run.precisions) for run in first.fitted.runs] == [
        (run.found, run.made, run.precisions) for run in second.fitted.runs
    ]
    assert first.fitted.runs[0].made == (5, 32, 32)


def _edit(name: str, **values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / name
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return change


def _add_file(folder: Path) -> None:
    (folder / "tokenizer" / "added_tokens.json").write_text("{}")


def test_a_change_of_its_files_makes_it_anew(folder: Path, counted: list[DryRunResults]) -> None:
    another_process(folder)
    for number, (what, change) in enumerate(
        {
            "sizes": _edit("transformer/config.json", num_layers=1),
            "scheduler": _edit("scheduler/scheduler_config.json", flow_shift=5.0),
            "index": _edit("model_index.json", boundary_ratio=0.8),
            "tokenizer": _edit("tokenizer/tokenizer_config.json", padding_side="left"),
            "another file": _add_file,
        }.items(),
        start=2,
    ):
        change(folder)
        for _ in range(2):
            another_process(folder)
            assert len(counted) == number, what


@pytest.mark.parametrize(
    "changes",
    [
        {"size": "48x32"}, {"num_frames": 9}, {"prompt": "two foxes"}, {"negative_prompt": "red"},
        {"guidance_scale": 1.0}, {"dtype": "bf16", "force": True}, {"profile": "cuda-sm75"},
        {"option": {"max_sequence_length": 64}},
    ],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
def test_another_call_is_made(
    known: Path, counted: list[DryRunResults], changes: dict[str, Any]
) -> None:
    another_process(known, **changes)
    assert counted


def test_other_software_makes_it_anew(
    known: Path, counted: list[DryRunResults], monkeypatch: pytest.MonkeyPatch
) -> None:
    another_process(known)
    assert not counted
    monkeypatch.setattr(cache_file, "software_key", lambda: "another version")
    another_process(known)
    assert len(counted) == 1


@pytest.mark.parametrize("package", ["torch", "diffusers", "transformers", "tokenizers", "ftfy"])
def test_software_is_what_computes_and_what_reads_the_prompt(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_file.software_key.cache_clear()
    before = cache_file.software_key()
    real = cache_file._version
    monkeypatch.setattr(cache_file, "_version", lambda name: real(name) + "+" * (name == package))
    cache_file.software_key.cache_clear()
    after = cache_file.software_key()
    cache_file.software_key.cache_clear()
    assert after != before


def _text(text: str) -> Callable[[Path], None]:
    return lambda file: file.write_text(text) and None


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


def _of_another(file: Path) -> None:
    """What was saved for another prompt, under this one's name."""
    shutil.copy(next(each for each in files() if each != file), file)


@pytest.mark.parametrize(
    "damage", [_text(""), _text("{}\n{}"), _cut, _of_another], ids=["empty", "bare", "cut", "other"]
)
def test_a_damaged_file_is_made_anew(
    known: Path,
    saved: tuple[Path, str, DryRunResults],
    made: list[DryRunResults],
    damage: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "everyframe.checkpoints.cache_file")
    first = another_process(known)
    assert not made
    (file,) = [each for each in files() if each.name == saved[1]]
    damage(file)
    again = another_process(known)
    assert len(made) == 1
    assert file.name in caplog.text
    assert again.plan.components == first.plan.components
    another_process(known)
    assert len(made) == 1, "it was written over"


@pytest.mark.parametrize(
    "change",
    [
        {"returned": [1, 2]}, {"returned": "abc"}, {"returned": [5, 32, -1]}, {"returned": [[1]]},
        {"found": 3}, {"found": {"transformer": {"code": "os.system"}}}, {"found": {"vae": None}},
    ],
)  # fmt: skip
def test_what_is_no_dry_run_is_refused(
    known: Path,
    counted: list[DryRunResults],
    change: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Even with the right digests, as if somebody had written it with our code."""
    real = cache_file.CacheFile.read

    def read(file: cache_file.CacheFile) -> Any:
        found = real(file)
        return found and {**found, **change}  # other files, of times, are not there

    monkeypatch.setattr(cache_file.CacheFile, "read", read)
    another_process(known)
    assert len(counted) == 1


def test_a_file_holds_numbers_and_names_of_modules_alone(folder: Path) -> None:
    another_process(folder)
    (file,) = files()
    head, _, text = file.read_text().partition("\n")
    assert set(json.loads(head)) == {"schema", "of", "sha256"}
    assert set(json.loads(text)) == {"found", "returned"}
    for sign in ("/", "\\\\", str(folder), "fox", "import", "__", "lambda"):
        assert sign not in text, sign


def test_code_that_comes_along_is_called_each_time(
    folder: Path, counted: list[DryRunResults]
) -> None:
    for _ in range(2):
        another_process(folder, trust_remote_code=True)
    assert len(counted) == 2
    assert files() == []


def test_what_no_text_holds_is_not_saved(folder: Path, made: list[DryRunResults]) -> None:
    """The text of a large array leaves most of it out."""
    from everyframe.diffusers_pipelines.dry_run import _is_plain

    assert _is_plain({"a": [1, 2.5, True, None, ("b",)]})
    assert not _is_plain({"a": [1, np.zeros(2)]})
    assert not _is_plain({"a": folder})


def test_another_file_of_the_same_name_is_dry_run_anew(
    folder: Path, tmp_path: Path, counted: list[DryRunResults]
) -> None:
    """So is one in another folder by the same relative name."""
    given = tmp_path / "words.npy"
    asked: dict[str, Any] = {"prompt": None, "option": {"prompt_embeds": str(given)}}
    for number, length in enumerate((16, 64), start=1):
        np.save(given, np.zeros((1, length, 32), np.float32))
        for _ in range(2):
            another_process(folder, **asked)
            assert len(counted) == number
    assert len(files()) == 2


def test_tensors_of_one_text_are_different_calls(folder: Path) -> None:
    """Both are written as zeros and three dots."""
    options = [{"prompt_embeds": torch.zeros(1, length, 32)} for length in (64, 512)]
    assert len({repr(each) for each in options}) == 1
    found = [
        prepare(everyframe.Request(**{"model": str(folder), **ASKED, "prompt": None}, option=each))
        for each in options
    ]
    assert len({str(each.fitted.runs[0].stage_call.key) for each in found}) == 2


def test_a_call_that_stops_is_made_each_time(
    folder: Path, made: list[DryRunResults], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reason is a text of other people's code, which may name anything."""
    import diffusers

    def decode(*_: Any, **__: Any) -> None:
        raise RuntimeError(f"no such thing in {folder}")

    monkeypatch.setattr(diffusers.AutoencoderKLWan, "decode", decode)
    for _ in range(2):
        another_process(folder)
    assert len(made) == 2
    assert files() == []


@pytest.mark.usefixtures("counted")
def test_the_oldest_files_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_runs, "_MAX_PIPELINE_RUNS", 2)
    for prompt in ("one", "two", "three"):
        another_process(folder, prompt=prompt)
    assert len(files()) == 2
