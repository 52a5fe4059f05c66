"""Native code is loaded only if this device compiled it, and everything else is refused by name."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import everyframe
from everyframe.cli.main import main
from everyframe.core.errors import ExitCode, InputError
from everyframe.fast_paths.compilation import compiled_block, module_compilation, package_store
from everyframe.fast_paths.compilation.block_export import CallSizes
from everyframe.fast_paths.compilation.block_state import NotCompilableError
from everyframe.fast_paths.compilation.module_compilation import compiled_blocks
from everyframe.fast_paths.compilation.toolchain import why_not
from everyframe.planning import compiled_model
from helpers.compiled_blocks import Model, inputs, made
from helpers.planted_compiler import PlantedCompiler


@pytest.fixture
def saved(compiler: PlantedCompiler, tmp_path: Path) -> Path:
    model = everyframe.compile(made())
    called(model)
    return everyframe.save_compiled(model, tmp_path / "saved")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with what was compiled, and beside it the folder that it was saved in."""
    place = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVERYFRAME_CACHE", str(place / "cache"))
        PlantedCompiler(patch)
        model = everyframe.compile(made())
        called(model)
        everyframe.save_compiled(model, place / "saved")
    return place


@pytest.fixture
def copied(compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copies of both, which a test may harm: the folder."""
    monkeypatch.setenv("EVERYFRAME_CACHE", str(shutil.copytree(compiled / "cache", tmp_path / "c")))
    return Path(shutil.copytree(compiled / "saved", tmp_path / "saved"))


@torch.no_grad()
def called(model: Model) -> torch.Tensor:
    out: torch.Tensor = model(*inputs())
    return out


def in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is loaded yet."""
    monkeypatch.setattr(compiled_block, "_LOADED", {})


def test_what_was_saved_is_loaded(
    saved: Path, compiler: PlantedCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_a_new_process(monkeypatch)
    model = made()
    want = called(made())
    assert everyframe.load_compiled(saved, model) is model
    torch.testing.assert_close(called(model), want)
    assert all(block.report.packages for block in compiled_blocks(model).values())
    assert compiler.count == 1
    with torch.no_grad():  # of one sample: nothing is compiled for it
        model(*inputs(1, 6))
    why = "it isn't compiled yet (`everyframe compile` does it)"
    assert why in compiled_blocks(model)["blocks.0"].report.notes
    assert compiler.count == 1


def test_the_store_finds_it_by_itself(
    saved: Path, compiler: PlantedCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_a_new_process(monkeypatch)
    model = everyframe.compile(made())
    called(model)
    assert compiler.count == 1
    assert compiled_blocks(model)["blocks.1"].report.packages


def the_library(saved: Path) -> Path:
    (path,) = saved.glob("*.pt2")
    return path


def the_description(saved: Path) -> Path:
    (path,) = (path for path in saved.glob("*.json") if len(path.stem) == 64)
    return path


def cut_short(saved: Path) -> None:
    the_library(saved).write_bytes(the_library(saved).read_bytes()[:-1])


def changed(saved: Path) -> None:
    the_library(saved).write_bytes(the_library(saved).read_bytes() + b"!")


def linked_library(saved: Path) -> None:
    moved = the_library(saved).rename(saved.parent / "elsewhere.pt2")
    (saved / f"{json.loads(the_description(saved).read_text())['library']}.pt2").symlink_to(moved)


def linked_description(saved: Path) -> None:
    path = the_description(saved)
    path.symlink_to(path.rename(saved.parent / "elsewhere.json"))


def linked_list(saved: Path) -> None:
    path = saved / "everyframe-compiled.json"
    path.symlink_to(path.rename(saved.parent / "list.json"))


def a_pipe(saved: Path) -> None:
    (path := the_library(saved)).unlink()
    os.mkfifo(path)


def no_library(saved: Path) -> None:
    the_library(saved).unlink()


def damaged_description(saved: Path) -> None:
    the_description(saved).write_text("{")


def other_types(saved: Path) -> None:
    path = the_description(saved)
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "device": 5, "library": "\0"}))


def rewrite(saved: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = the_description(saved)
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values, sort_keys=True, indent=1))


def list_packages(saved: Path, name: str) -> None:
    whole = {"schema": "everyframe.package/1", "packages": [name]}
    (saved / "everyframe-compiled.json").write_text(json.dumps(whole))


def other_conditions(saved: Path) -> None:
    rewrite(saved, lambda values: values["sizes"].update(conditions=["1 == 1"]))


def a_store_of_its_own(saved: Path) -> None:
    """The folder stands for the store: what is listed is there, by its digest."""
    rewrite(saved, lambda values: values.update(key=str(saved.absolute())))
    path = the_description(saved)
    name = hashlib.sha256(path.read_bytes()).hexdigest()
    path.rename(saved / f"{name}.json")
    list_packages(saved, name)


def other_torch(saved: Path) -> None:
    rewrite(saved, lambda values: values["device"].update(torch="1.0"))


def other_instructions(saved: Path) -> None:
    rewrite(saved, lambda values: values["device"].update(instructions="AVX9000"))


def no_list(saved: Path) -> None:
    (saved / "everyframe-compiled.json").unlink()


def a_list_that_leads_out(saved: Path) -> None:
    list_packages(saved, "../../" + "a" * 58)


REFUSED: list[tuple[Callable[[Path], None], str]] = [
    (cut_short, "was changed or cut short"),
    (changed, "was changed or cut short"),
    (linked_library, "can't be read"),
    (linked_description, "can't be read"),
    (linked_list, "is no folder of compiled blocks"),
    (a_pipe, "no plain file"),
    (no_library, "No such file"),
    (damaged_description, "is damaged"),
    (other_types, "is damaged"),
    (other_conditions, "this device didn't compile"),
    (a_store_of_its_own, "is damaged"),
    (other_torch, "was compiled for torch 1.0, and here is"),
    (other_instructions, "was compiled for instructions AVX9000, and here is"),
    (no_list, "is no folder of compiled blocks"),
    (a_list_that_leads_out, "is no folder of compiled blocks"),
]


@pytest.mark.skipif(os.name != "posix", reason="links and pipes")
@pytest.mark.parametrize(("harm", "says"), REFUSED, ids=lambda each: getattr(each, "__name__", ""))
def test_a_folder_that_is_not_ours_is_refused(
    harm: Callable[[Path], None], says: str, copied: Path
) -> None:
    everyframe.load_compiled(copied, made())  # as it is, it is taken
    harm(copied)
    with pytest.raises(InputError, match=says) as error:
        everyframe.load_compiled(copied, made())
    text = str(error.value)
    assert error.value.exit_code == ExitCode.WRONG_INPUT
    assert "everyframe compile MODEL -o" in text
    assert "\n" not in text


def test_a_folder_from_another_device_is_refused(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The very same processor and torch, but another user's or machine's store."""
    monkeypatch.setenv("EVERYFRAME_CACHE", str(tmp_path / "other cache"))
    with pytest.raises(InputError, match="this device didn't compile"):
        everyframe.load_compiled(saved, made())
    assert not list((tmp_path / "other cache").rglob("*.pt2"))


def test_a_library_that_was_cleared_away_comes_from_the_folder(
    saved: Path, compiler: PlantedCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_a_new_process(monkeypatch)
    for path in (tmp_path / "cache").rglob("*.pt2"):
        path.unlink()
    model = everyframe.load_compiled(saved, made())
    called(model)
    assert compiled_blocks(model)["blocks.0"].report.packages
    assert compiler.count == 1


def test_a_library_in_the_store_that_was_changed_is_compiled_again(
    saved: Path, compiler: PlantedCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_a_new_process(monkeypatch)
    for path in (tmp_path / "cache").rglob("*.pt2"):
        path.write_bytes(b"something else")
    called(everyframe.compile(made()))
    assert compiler.count == 2


@pytest.mark.skipif(os.name != "posix", reason="modes of files")
def test_a_store_where_others_write_is_refused(saved: Path, tmp_path: Path) -> None:
    for mode in (0o777, 0o755):  # folders inside may be open to a group that can come in
        (tmp_path / "cache" / "certificates" / "compiled").chmod(mode)
        with pytest.raises(InputError, match="others can come in; remove it, or chmod 700"):
            everyframe.load_compiled(saved, made())


def test_a_damaged_description_in_the_store_is_not_used(
    saved: Path, compiler: PlantedCompiler, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    in_a_new_process(monkeypatch)
    for path in (tmp_path / "cache" / "certificates" / "compiled").glob("*/*.json"):
        path.write_text(path.read_text().replace('"tensor"', '"other"'))
    called(everyframe.compile(made()))
    assert compiler.count == 2
    assert "is damaged" in caplog.text


@pytest.mark.parametrize("content", [b"\xff\xfe", b"5", b"[]"])
def test_a_description_that_is_no_text_is_not_used(
    content: bytes, saved: Path, compiler: PlantedCompiler, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    in_a_new_process(monkeypatch)
    for path in (tmp_path / "cache" / "certificates" / "compiled").glob("*/*.json"):
        path.write_bytes(content)
    called(everyframe.compile(made()))
    assert compiler.count == 2


def test_nothing_is_written_over(saved: Path, tmp_path: Path, compiler: PlantedCompiler) -> None:
    model = everyframe.compile(made())
    called(model)
    assert everyframe.save_compiled(model, saved) == saved  # its own: again
    full = tmp_path / "full"
    full.mkdir()
    (full / "thesis.txt").touch()
    for target in (full, full / "thesis.txt", full / "thesis.txt" / "in it"):
        with pytest.raises(InputError, match="is no folder of compiled blocks; name a new one"):
            everyframe.save_compiled(model, target)


def test_the_folder_is_checked_before_minutes_of_compiling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.txt").touch()
    monkeypatch.setattr(compiled_model, "prepare", lambda *_, **more: pytest.fail("too early"))
    assert main(["compile", "-o", str(tmp_path)]) == ExitCode.WRONG_INPUT
    assert "is no folder of compiled blocks; name a new one" in capsys.readouterr().err


def test_there_is_nothing_to_save(compiler: PlantedCompiler, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"everyframe.compile\(...\) comes first"):
        everyframe.save_compiled(made(), tmp_path / "saved")
    model = everyframe.compile(made())
    with pytest.raises(InputError, match="call it once"):
        everyframe.save_compiled(model, tmp_path / "saved")
    compiler.verdict = "refused"
    called(model)
    with pytest.raises(InputError, match="none of its blocks has compiled code: planted"):
        everyframe.save_compiled(model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_what_torch_compile_computes_is_not_saved(
    compiler: PlantedCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason why there is no package was given for the first of its kind alone."""
    compiler.says = "planted"
    monkeypatch.setattr(module_compilation, "_graphs", lambda call, backend: call)
    called(everyframe.compile(made()))
    model = everyframe.compile(made())
    called(model)
    with pytest.raises(InputError, match=r"they run by torch\.compile, whose code can't be saved"):
        everyframe.save_compiled(model, tmp_path / "saved")


def test_conditions_are_arithmetic_and_nothing_else() -> None:
    sizes = CallSizes(((2, (2, None)), ((2, 9),)), ("L['tensors'][0].size()[1] % 2 == 0",))
    assert sizes.take([(2, 6), (3,)])
    assert not sizes.take([(2, 7), (3,)])  # a condition
    assert not sizes.take([(2, 6), (10,)])  # a limit
    assert not sizes.take([(2, 1), (3,)])
    assert not sizes.take([(3, 6), (3,)])
    assert not sizes.take([(2, 6, 1), (3,)])
    assert not sizes.take([(2, 6)])
    for expression in ("__import__('os')", "open(1)", "s.clear()", "[].append(1)", "lambda: 1"):
        with pytest.raises(NotCompilableError, match="more than arithmetic"):
            CallSizes(((1,),), (expression,)).take([(1,)])


#: Compiles a model in one process, and calls it in another.
TWICE = """
import sys, time
import torch
from helpers.compiled_blocks import inputs, made
import everyframe
from everyframe.fast_paths.compilation import block_trial
from everyframe.fast_paths.compilation.module_compilation import compiled_blocks
def judge(error, limit, gain):
    return ("certified", "") if error <= limit else ("refused", "off")

block_trial.judge = judge
model, want = made(), made()
if sys.argv[1] == "first":
    everyframe.compile(model)
else:
    everyframe.load_compiled(sys.argv[2], model)
with torch.no_grad():
    for size in ((2, 6), (3, 11)):
        got = model(*inputs(*size))
        torch.testing.assert_close(got, want(*inputs(*size)), rtol=2e-5, atol=2e-5)
assert all(block.report.packages for block in compiled_blocks(model).values())
if sys.argv[1] == "first":
    everyframe.save_compiled(model, sys.argv[2])
else:
    assert not {"torch._inductor", "torch._dynamo"} & set(sys.modules)
"""


@pytest.mark.slow
@pytest.mark.skipif(bool(missing := why_not()), reason=str(missing))
def test_a_real_library_serves_the_next_process_without_a_compiler(tmp_path: Path) -> None:
    here = Path(__file__).parents[2]
    environment = {
        **os.environ, "EVERYFRAME_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip

    def run(which: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", TWICE, which, str(tmp_path / "saved")], env=environment,
            check=False, capture_output=True, text=True,
        )  # fmt: skip

    for which in ("first", "second"):
        ended = run(which)
        assert ended.returncode == 0, ended.stderr[-3000:]
    # A library of another program with the right name: its digest isn't that of what was compiled.
    library = next((tmp_path / "saved").glob("*.pt2"))
    shutil.copy(package_store.__file__, library)
    ended = run("second")
    assert ended.returncode != 0
    assert "was changed or cut short" in ended.stderr
