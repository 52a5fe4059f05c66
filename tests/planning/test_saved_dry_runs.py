"""A dry run that another process saved is the one that this would make, or is made again."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from everyframe.checkpoints.cache_file import CacheFile
from everyframe.checkpoints.folder import cache_folder
from everyframe.core.plan import Precision
from everyframe.dry_run import executor
from everyframe.dry_run.call import DryRunCall
from everyframe.dry_run.result import DryRunResults, result_from_json, result_to_json
from everyframe.fast_paths.apply import applies_to
from everyframe.fast_paths.registry import CATALOGUE, OF_LAYERS
from everyframe.hardware.profiles import find_profile
from everyframe.planning import dry_runs
from everyframe.planning.dry_runs import DryRun
from helpers import config_only_models
from helpers.dry_runs import dry_run_call

pytestmark = pytest.mark.usefixtures("own_cache")

MODELS = config_only_models.all_models()
SETTINGS = {
    "opensora-1.2": config_only_models.settings(64, 64, 17),
    "svd": config_only_models.settings(64, 64, 4),
}
PRECISION = Precision("bfloat16", "bfloat16")


def dry_run_calls(name: str = "opensora-1.2") -> list[DryRunCall]:
    return list(MODELS[name].dry_run_calls(SETTINGS[name]))


def another_process(monkeypatch: pytest.MonkeyPatch) -> list[DryRunResults]:
    """Forget what this one did; every run that is made from now on is in the list."""
    monkeypatch.setattr(dry_runs, "_DONE", {})
    made: list[DryRunResults] = []
    real = executor.dry_run

    def seen(*args: Any) -> DryRunResults:
        made.append(real(*args))
        return made[-1]

    monkeypatch.setattr(executor, "dry_run", seen)
    return made


def run(each: DryRunCall, profile: str = "cuda-sm75", precision: Precision = PRECISION) -> DryRun:
    return dry_run_call(each, precision, find_profile(profile).machine().devices[0])


@pytest.mark.parametrize("name", list(SETTINGS))
def test_what_was_saved_is_what_was_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every stage, with its findings: that card emulates bfloat16."""
    made = another_process(monkeypatch)
    first = [run(each).found for each in dry_run_calls(name)]
    assert len(made) == len(first)
    assert any(found.findings for found in first)
    assert another_process(monkeypatch) == []
    again = [run(each).found for each in dry_run_calls(name)]
    assert again == first
    assert [result_from_json(json.loads(json.dumps(result_to_json(e)))) for e in first] == first


def test_another_call_precision_or_device_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = dry_run_calls()[:2]
    run(first)
    made = another_process(monkeypatch)
    run(first)
    assert made == []
    run(second)
    run(first, "mps")
    run(first, precision=Precision("float32", "float32"))
    assert len(made) == 3


def test_the_paths_that_have_a_place_are_saved_in_one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dozens of paths are asked for; a file of each would push dry runs out of their folder."""

    def asked() -> list[bool]:
        found = run(dry_run_calls()[1])
        return [found.has_place(path, is_quantized=quantized) for path in CATALOGUE
                for quantized in (False, True)]  # fmt: skip

    first, module = asked(), dry_run_calls()[1].module()
    assert first == [applies_to(path, module) and not (quantized and path in OF_LAYERS)
                     for path in CATALOGUE for quantized in (False, True)]  # fmt: skip
    assert {True, False} <= set(first)
    (place,) = (cache_folder() / "fast_path_places").iterdir()
    another_process(monkeypatch)
    monkeypatch.setattr(DryRunCall, "module", lambda self: pytest.fail("it is asked again"))
    assert asked() == first
    assert [*place.parent.iterdir()] == [place]
    place.write_text(place.read_text().replace("[", "[3, "))
    another_process(monkeypatch)
    monkeypatch.setattr(DryRunCall, "module", lambda self: module)
    assert asked() == first, "what is no list of names is not believed"


def planted(name: str) -> list[Any]:
    """What is in a saved run, each time with one thing wrong."""
    good = result_to_json(run(dry_run_calls(name)[1]).found)
    product, *others = good["products"]
    found: list[Any] = [3, [], {}, "text"]
    found += [{key: value for key, value in good.items() if key != name} for name in good]
    for key in ("num_operations", "working_bytes"):
        found += [{**good, key: value} for value in (-1, 1.5, "1", None, True, [1])]
    found += [{**good, "peak_at": 1}, {**good, "moved": [1, 2]}, {**good, "moved": [1, 2, "3"]}]
    found += [{**good, "findings": value} for value in (3, [["a"]], [["a", "b", "c", 4]], ["abcd"])]
    found += [{**good, "seen": value} for value in (3, [["a", "b"]], [["a", "b", None]], ["abc"])]
    wrong = [
        [*product[:4], -1], [*product[:4], "1"], [1, *product[1:]], product[:3],
        [product[0], product[1], [[1.5]], *product[3:]], [*product[:3], [{}], product[4]],
    ]  # fmt: skip
    return found + [{**good, "products": [each, *others]} for each in wrong]


def test_what_is_no_dry_run_is_refused_and_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    each = dry_run_calls()[1]
    another_process(monkeypatch)
    right = run(each).found
    files: list[CacheFile] = []
    real = CacheFile.read

    def read(self: CacheFile) -> Any:
        files.append(self)
        return real(self)

    monkeypatch.setattr(CacheFile, "read", read)
    wrong = planted("opensora-1.2")
    assert all(result_from_json(json.loads(json.dumps(value))) is None for value in wrong)
    another_process(monkeypatch)
    run(each)
    for value in wrong[:3]:
        files[-1].write({"denoiser": value})
        made = another_process(monkeypatch)
        assert run(each).found == right
        assert len(made) == 1
    # And is written over by that.
    made = another_process(monkeypatch)
    assert run(each).found == right
    assert made == []


def test_a_kernel_that_the_caller_switched_off_is_part_of_the_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without it, scores are a tensor: what one process found was read by all others."""
    denoiser = dry_run_calls()[1]
    made = another_process(monkeypatch)
    found = run(denoiser, "cpu-fp32").found
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        plain = run(denoiser, "cpu-fp32").found
        assert run(denoiser, "cpu-fp32").found == plain
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
    assert plain.num_operations > found.num_operations
    assert run(denoiser, "cpu-fp32").found == found
    assert len(made) == 2
    assert another_process(monkeypatch) == []
    assert run(denoiser, "cpu-fp32").found == found


def test_what_was_found_while_a_switch_was_set_is_stored_nowhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As by a run in another thread, which has a kernel of its own."""
    denoiser = dry_run_calls()[1]
    right = run(denoiser, "cpu-fp32").found
    (cache_folder() / "dry_runs").rename(cache_folder() / "elsewhere")
    made = another_process(monkeypatch)
    real = executor.dry_run

    def meanwhile(*args: Any) -> DryRunResults:
        torch.backends.cuda.enable_flash_sdp(False)
        return real(*args)

    monkeypatch.setattr(executor, "dry_run", meanwhile)
    try:
        assert run(denoiser, "cpu-fp32").found != right
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
        monkeypatch.setattr(executor, "dry_run", real)
    assert run(denoiser, "cpu-fp32").found == right
    assert len(made) == 2


def test_a_default_dtype_of_the_caller_is_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        monkeypatch.setattr(dry_runs, "_DONE", {})
        run(dry_run_calls()[0])
    finally:
        torch.set_default_dtype(torch.float32)
    made = another_process(monkeypatch)
    run(dry_run_calls()[0])
    assert len(made) == 1
