"""A run that somebody else made reads and writes nothing that was not named in this call."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import everyframe
from everyframe.checkpoints.tensor_file import open_checkpoint
from everyframe.cli.main import main
from everyframe.core.errors import CorruptRunError, InputError
from everyframe.core.events import Event
from everyframe.core.plan import PreviewPlan
from everyframe.core.request import Request
from everyframe.core.serialization import to_jsonable
from everyframe.engine.resumption.foreign_run import asked_outside, find_here, with_named
from everyframe.engine.resumption.interrupted_run import load_run
from everyframe.engine.resumption.resume import resume_run
from everyframe.engine.workers.launcher import run_in_workers
from everyframe.engine.workers.worker_process import WorkerJob
from everyframe.media.video import Video
from everyframe.runs.checksummed_json import checksum, write_json
from everyframe.runs.folder import RunFolder
from everyframe.runs.tensor_store import TensorStore
from helpers.interrupted_runs import cut, videos
from helpers.loras import files as lora_files
from helpers.loras.files import as_lora, factors_for


def edited(run: RunFolder, **values: Any) -> None:
    """Change what is written there, checksum and all, as anybody can who lacks the key."""
    write_json(run.path / "run.json", {**run.run(), **values})


def with_picture(folder: Path) -> Path:
    """The folder, with a picture in it."""
    pixels = np.random.default_rng(0).integers(0, 255, (16, 16, 3), np.uint8)
    Image.fromarray(pixels).save(folder / "cat.png")
    return folder


@pytest.fixture
def picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A picture in the folder that this is called from."""
    monkeypatch.chdir(with_picture(tmp_path))
    return tmp_path / "cat.png"


@pytest.fixture(scope="module")
def interrupted(model: str, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """An own run of such a picture that was interrupted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(with_picture(tmp_path_factory.mktemp("own")))
        return cut(model, Path.cwd() / "runs", image="cat.png", edit_strength=0.5)


@pytest.fixture
def run(interrupted: RunFolder, picture: Path, tmp_path: Path) -> RunFolder:
    """A copy of it that a test may change."""
    place = tmp_path / "runs" / interrupted.path.name
    return RunFolder(Path(shutil.copytree(interrupted.path, place)))


@pytest.fixture
def in_its_place(run: RunFolder, interrupted: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the folder that it was begun in, where an own run finds its picture."""
    monkeypatch.chdir(interrupted.path.parents[1])


def of_another_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From here on, as if somebody else were at work."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))


@pytest.mark.usefixtures("in_its_place")
def test_an_own_run_goes_on_as_ever(run: RunFolder, model: str, tmp_path: Path) -> None:
    copied = RunFolder(Path(shutil.copytree(run.path, tmp_path / "copied")))
    video = everyframe.resume(run.path)
    assert isinstance(video, Video)
    other = everyframe.resume(copied.path)
    assert isinstance(other, Video)
    np.testing.assert_array_equal(video.frames, other.frames)


@pytest.mark.parametrize(
    ("how", "has_worker"),
    [
        ("edited", False), ("unsigned", False), ("another user", True),
        # Each starts a process, to ask the same of what is the same there.
        *(pytest.param(how, True, marks=pytest.mark.slow) for how in ("edited", "unsigned")),
    ],
)  # fmt: skip
def test_what_a_strangers_run_asks_for_is_named_again(
    how: str,
    has_worker: bool,
    run: RunFolder,
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if how == "edited":
        edited(run, place="/nowhere")
    elif how == "unsigned":
        edited(run, signature=None)
    else:
        of_another_user(monkeypatch, tmp_path)
    message = r"use.*--option image=FILE \(it was 'cat.png'\), --model FOLDER \(it was '.*tiny'\)"
    for refused in (
        lambda: everyframe.resume(run.path),
        lambda: [*resume_run(run)],
        *([lambda: [*run_in_workers(WorkerJob(run=run.path))]] if has_worker else []),
    ):
        with pytest.raises(InputError, match=message):
            refused()
    with pytest.raises(InputError, match=r"again.*: --option image=FILE \(it was 'cat.png'\)$"):
        everyframe.resume(run.path, model=model)


@pytest.mark.usefixtures("in_its_place")
def test_what_is_named_again_may_lie_anywhere_and_be_called_anything(
    run: RunFolder, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = [*resume_run(RunFolder(Path(shutil.copytree(run.path, tmp_path / "whole"))))]
    edited(run, place="/nowhere")
    (tmp_path / "elsewhere").mkdir()
    shutil.copy("cat.png", tmp_path / "elsewhere" / "fox.png")
    moved = shutil.copytree(model, tmp_path / "moved")
    monkeypatch.chdir(tmp_path / "elsewhere")
    named = {"image": "fox.png", "model": str(moved)}
    events: list[Event] = [*resume_run(run, named=named)]
    for seed, frames in videos(whole).items():
        np.testing.assert_array_equal(videos(events)[seed], frames)


def test_files_that_are_named_again_are_those_of_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank works in the folder where the run began; what isn't here keeps its name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    for name in ("a.png", "b.png", "vae.safetensors", "style.safetensors"):
        (tmp_path / name).write_bytes(b"x")
    found = find_here(
        {
            "model": "model", "controlnet": "model,owner/name", "image": Path("a.png"),
            "mask": ["a.png", "b.png,a.png", 3], "components": {"vae": "vae.safetensors"},
            "loras": ["style.safetensors:0.5", "other"], "prompt_2": "model",
        }
    )  # fmt: skip
    here = str(tmp_path)
    loras = found.pop("loras")
    assert [(lora.file, lora.strength) for lora in loras] == [
        (f"{here}/style.safetensors", 0.5),
        ("other", 1.0),
    ]
    assert found == {
        "model": f"{here}/model", "controlnet": "model,owner/name", "image": f"{here}/a.png",
        "mask": [f"{here}/a.png", f"{here}/b.png,{here}/a.png", 3],
        "components": {"vae": f"{here}/vae.safetensors"}, "prompt_2": "model",
    }  # fmt: skip
    assert find_here({"model": "shapes"}) == {"model": "shapes"}


def test_the_loras_of_a_strangers_run_are_named_again(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = open_checkpoint(model)
    key = next(name for name in file if name.endswith("attn.proj.weight"))
    factors = factors_for({key: file.load(key)}, [key.removesuffix(".weight")])
    lora = lora_files.write(tmp_path / "style.safetensors", as_lora(factors))
    run = cut(model, tmp_path / "runs", loras=[f"{lora}:0.5"])
    of_another_user(monkeypatch, tmp_path)
    with pytest.raises(
        InputError, match=r"again.*: --option loras=.* \(it was \['style.safetensors:0.5'\]\)$"
    ):
        everyframe.resume(run.path, model=model)
    with pytest.raises(InputError, match="loras"):
        everyframe.resume(run.path, model=model, loras=f"{lora}:0.75")
    shutil.copy(lora, tmp_path / "mine.safetensors")
    lora.unlink()
    assert everyframe.resume(run.path, model=model, loras=str(tmp_path / "mine.safetensors:0.5"))


def test_what_is_named_again_must_be_what_it_was(
    run: RunFolder, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_another_user(monkeypatch, tmp_path)
    Image.new("RGB", (16, 16)).save("dog.png")
    with pytest.raises(InputError, match="image is not what"):
        everyframe.resume(run.path, model=model, image="dog.png")
    with pytest.raises(InputError, match=r"the run names image, model outside.*, and no vae"):
        everyframe.resume(run.path, model=model, image="cat.png", vae="elsewhere")


@pytest.mark.usefixtures("in_its_place")
def test_a_run_that_this_call_began_goes_on_without_a_key(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after memory ran out among ranks: who has no place for a key named it all a moment ago."""
    of_another_user(monkeypatch, tmp_path)
    assert [*resume_run(run, named=None)]


def test_the_command_line_asks_for_the_output_too(
    run: RunFolder, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    target = tmp_path / "theirs.mp4"
    edited(run, output=str(target), place=str(tmp_path.parent))
    assert main(["resume", str(run.path)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "--output PLACE (it was '/" in err
    assert "), --option image=FILE (it was" in err
    named = ["--model", model, "--option", "image=cat.png"]
    assert main(["resume", str(run.path), *named]) == 2
    assert "--output PLACE" in capsys.readouterr().err
    assert run.path.is_dir()
    assert main(["resume", str(run.path), *named, "-o", "mine.mp4"]) == 0
    assert capsys.readouterr().out == "mine.mp4\n"
    assert not target.exists()


@pytest.mark.parametrize("name", ["place", "output", "record", "request", "plan", "later"])
def test_what_a_stranger_wrote_wrongly_is_one_line(
    name: str, run: RunFolder, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    written = run.run()
    if name in ("place", "output"):
        edited(run, **{name: 5})
    elif name == "record":
        edited(run, record={**written["record"], "settings": 5})
    elif name == "request":
        edited(run, request={"a": 1})
    else:
        plan = load_run(run).plan
        wrong = {"height": "x"} if name == "plan" else {"num_inference_steps": -3}
        settings: Any = replace(plan.settings, **wrong)
        edited(run, plan=to_jsonable(replace(plan, settings=settings)))
    named = ["--model", model, "--option", "image=cat.png", "-o", "mine.mp4"]
    assert main(["resume", str(run.path), *named]) == 2
    out, err = capsys.readouterr()
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert (out, len(errors)) == ("", 1)
    if name == "plan":
        assert "its plan.settings.height is missing or wrong" in err
    assert not Path("mine.mp4").exists()


@pytest.mark.parametrize("rest", ['\n"a": ', '\n"a": ' + "[" * 10**5, '\n"a": ' + "9" * 5000 + "}"])
def test_what_a_stranger_wrote_that_is_no_json_is_one_line(
    rest: str, run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its checksum is right: anybody can make one."""
    text = rest.encode()
    (run.path / "run.json").write_bytes(f'{{"checksum": "{checksum(text)}",'.encode() + text)
    assert main(["resume", str(run.path)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "run.json holds no JSON: " in err


def test_many_threads_are_not_a_strangers_to_ask_for(run: RunFolder, model: str) -> None:
    plan = load_run(run).plan
    edited(run, plan=to_jsonable(replace(plan, num_threads=100_000)))
    with pytest.raises(InputError, match="asks for 100000 CPU threads"):
        everyframe.resume(run.path, model=model, image="cat.png")


def test_what_lies_outside_of_a_run(picture: Path, tmp_path: Path) -> None:
    deep = {"shot": [{"image": "cat.png"}], "words": "a cat", "scale": 2}
    request = Request(
        prompt="cat.png", image=["missing.png"], last_image=np.zeros((2, 2, 3)), report="page",
        model="opensora-1.2", vae=str(tmp_path), text_encoder="DeepFloyd/t5-v1_1-xxl",
        mask="1,2,3,4", control="canny,cat.png", option=deep,
    )  # fmt: skip
    assert asked_outside(request) == {
        "image": ["missing.png"], "report": "page", "vae": str(tmp_path),
        "control": "canny,cat.png", "shot": deep["shot"],
    }  # fmt: skip
    again = with_named(request, {"shot": "fox.png", "vae": "here", "report": "there"})
    assert again.family_options["option"] == {**deep, "shot": "fox.png"}
    assert (again.family_options["vae"], again.report) == ("here", "there")
    # As a command line has them.
    texts = Request(option=["fps=8", f"shot={tmp_path}"])
    assert asked_outside(texts) == {"shot": str(tmp_path)}
    assert with_named(texts, {"shot": "a"}).family_options["option"] == {"fps": 8, "shot": "a"}
    assert asked_outside(Request(extend=Video(np.zeros((1, 2, 2, 3), np.uint8), 8))) == {}


def test_a_strangers_run_opens_no_decoder_of_previews(model: str, tmp_path: Path) -> None:
    """Its place is in the plan too, which is as much a stranger's as the request."""
    run = cut(model, tmp_path / "runs")
    (tmp_path / "mine.safetensors").write_bytes(b"what must not be read")
    decoder = str(tmp_path / "mine.safetensors")
    plan = replace(load_run(run).plan, preview=PreviewPlan(1, "a tiny autoencoder", decoder))
    request = run.run()["request"]
    request["fields"]["preview_decoder"] = decoder
    edited(run, plan=to_jsonable(plan), request=request)
    assert isinstance(everyframe.resume(run.path, model=model), Video)


def test_a_picture_of_a_strangers_run_starts_no_program(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pillow reads PostScript by Ghostscript, which it looks for on the path."""
    program = tmp_path / "gs"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    run = cut(model, tmp_path / "runs", image=Image.new("RGB", (16, 16)), edit_strength=0.5)
    drawing = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 16 16\n%%EndComments\nshowpage\n"
    stored = TensorStore(run.given).keep(torch.frombuffer(bytearray(drawing), dtype=torch.uint8))
    assert stored is not None
    request = run.run()["request"]
    request["fields"]["image"]["hash"] = stored["hash"]
    edited(run, request=request)
    with pytest.raises(CorruptRunError, match="a saved picture is no PNG"):
        everyframe.resume(run.path, model=model)
    assert not (tmp_path / "ran").exists()
