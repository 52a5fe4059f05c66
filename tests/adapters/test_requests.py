"""LoRAs in requests, plans, records and runs that go on; and on the command line."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import everyframe
from everyframe.checkpoints.tensor_file import open_checkpoint
from everyframe.core.errors import CheckpointError, InputError
from everyframe.core.events import Step
from everyframe.core.lora import Lora, parse_loras
from everyframe.core.request import Request
from everyframe.core.serialization import from_jsonable, to_jsonable
from everyframe.media.read import read_video
from everyframe.planning.find_model import find_model
from everyframe.planning.resolve import prepare
from everyframe.runtime.components.patchable import digest_with_loras
from everyframe.runtime.repair.repair_cache import RepairCacheKey, cached_key, key_of
from helpers.loras import files as lora_files
from helpers.loras.files import as_lora, factors_for
from helpers.tiny_checkpoints import families as tiny_families

NAME = "opensora-1.2"


@pytest.fixture(scope="module")
def model(tiny_models: Callable[[str], Path]) -> Path:
    return tiny_models(NAME)


@pytest.fixture
def lora(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A LoRA in the current folder."""
    monkeypatch.chdir(tmp_path)
    return write(model, Path("style.safetensors"))


def write(model: Path, path: Path, seed: int = 0) -> Path:
    state = tensors_of(model / "model.safetensors")
    factors = factors_for(state, lora_files.matrices(state, "blocks"), alpha=0.6, seed=seed)
    return lora_files.write(path, as_lora(factors))


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    opened = open_checkpoint(path)
    return {name: opened.load(name) for name in opened}


def generate(folder: Path | None, **more: Any) -> everyframe.Video:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", everyframe.EveryframeWarning)
        if "from_record" in more:
            made = everyframe.generate(run_dir="off", **more)
        else:
            made = everyframe.generate(
                **tiny_families.asked(NAME, model=str(folder), run_dir="off", **more)
            )
    assert isinstance(made, everyframe.Video)
    return made


# ---------------------------------------------------------------------------------------- requests


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("a.safetensors", [("a.safetensors", 1.0, "")]),
        ("a.safetensors:0.5", [("a.safetensors", 0.5, "")]),
        ("a.safetensors:-1", [("a.safetensors", -1.0, "")]),
        ("a.safetensors@low", [("a.safetensors", 1.0, "low")]),
        ("a.safetensors:2@transformer_2", [("a.safetensors", 2.0, "transformer_2")]),
        ("a@v2.safetensors", [("a@v2.safetensors", 1.0, "")]),
        ("C:\\a.safetensors", [("C:\\a.safetensors", 1.0, "")]),
        (["a.safetensors:0.5", "b.pt"], [("a.safetensors", 0.5, ""), ("b.pt", 1.0, "")]),
        (Path("x:1"), [("x:1", 1.0, "")]),
        (("a.safetensors", 0.5), [("a.safetensors", 0.5, "")]),
        ([("a.safetensors", 0.5), Path("b")], [("a.safetensors", 0.5, ""), ("b", 1.0, "")]),
        (("a.safetensors", np.float32(0.5)), [("a.safetensors", 0.5, "")]),
        ({"file": "a", "strength": 0.25}, [("a", 0.25, "")]),
        ({"file": "a", "strength": np.float32(0.25)}, [("a", 0.25, "")]),
        ([], []),
    ],
)
def test_how_loras_are_given(given: Any, wanted: list[tuple[str, float, str]]) -> None:
    found = Request(prompt="x", loras=given).loras
    assert [(each.file, each.strength, each.component) for each in found] == wanted


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (3, "loras must be a list of FILE"),
        ([3], "loras must be FILE"),
        ("", "got no file name"),
        (":0.5", "got no file name"),
        ("a:nan", "must be a number between -100 and 100, got nan"),
        ("a:1e9", "the strength of a must be"),
        (("a", 10**400), "must be a number between -100 and 100, got inf"),
        ({"file": "a", "weight": 1}, "loras must be FILE"),
        ({"file": 3}, "loras must be FILE"),
        ({"file": "a", "strength": "x"}, "loras must be FILE"),
        ({"file": "a", "strength": True}, "loras must be FILE"),
        ({"file": "a", "strength": 10**400}, "must be a number between -100 and 100, got inf"),
        ({"file": "a", "component": 5}, "loras must be FILE"),
        ({"file": "a", "sha256": 4}, "loras must be FILE"),
        ({"file": "a", "component": "../b"}, "is no name of a component"),
        (None, "loras must be a list"),
    ],
)
def test_what_is_no_lora(given: Any, text: str) -> None:
    with pytest.raises(InputError, match=re.escape(text)):
        Request(prompt="x", loras=given)


def test_a_request_is_written_and_read_again() -> None:
    request = Request(prompt="x", loras=["a:0.5@high", "b"])
    assert from_jsonable(json.loads(json.dumps(to_jsonable(request)))) == request
    assert parse_loras(request.loras) == request.loras


def test_a_folder_of_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bare name is one of the folder's, if there is no such file here."""
    folder = tmp_path / "loras"
    folder.mkdir()
    for name in ("style.safetensors", "old.pt"):
        (folder / name).touch()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert Lora("style").path == Path("style")
    monkeypatch.setenv("EVERYFRAME_LORAS", str(folder))
    for given in ("style", "style.safetensors"):
        assert parse_loras(f"{given}:0.5")[0].path == folder / "style.safetensors"
    assert Lora("old.pt").path == folder / "old.pt"
    assert parse_loras("style:0.5")[0].name == "style.safetensors"
    for given in ("old", "none", "../loras/none", "./style", str(tmp_path / "style")):
        assert Lora(given).path == Path(given)
    Path("style").touch()
    assert Lora("style").path == Path("style")


# ------------------------------------------------------------------------------------------- plans


def test_a_plan_tells_them(model: Path, lora: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from everyframe.cli.main import main

    asked = ["a red circle", "--model", str(model), "--size", "32x32", "--num-frames", "5"]
    more = ["--lora", f"{lora}:0.5", "--lora", f"{lora}:0"]
    assert main(["plan", *asked, *more]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    number = len(lora_files.matrices(tensors_of(model / "model.safetensors"), "blocks"))
    assert re.search(r"lora style\.safetensors, strength 0\.5: \d+ tensors of denoiser", printed)
    assert "strength 0:" in printed
    plan = everyframe.plan("a red circle", model=str(model), size="32x32", num_frames=5,
                           loras=f"{lora}:0.5")  # fmt: skip
    (entry,) = plan.to_json()["loras"]
    assert entry["file"] == "style.safetensors"
    assert dict(entry["components"]) == {"denoiser": number}


@pytest.mark.parametrize("command", ["plan", "generate"])
def test_wrong_files_are_one_line_and_wrong_input(
    command: str, model: Path, lora: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from everyframe.cli.main import main

    asked = ["a red circle", "--model", str(model), "--size", "32x32", "--num-frames", "5"]
    lora.with_name("short.safetensors").write_bytes(lora.read_bytes()[:-1])
    other = lora_files.factors_for(lora_files.state_of("ltx"), ["transformer_blocks.0.attn1.to_q"])
    lora_files.write(Path("other.safetensors"), as_lora(other))
    for file, text in (
        ("none.safetensors", "there is no LoRA file"),
        ("short.safetensors", "is truncated"),
        ("other.safetensors", "other.safetensors is no LoRA for"),
        ("style.safetensors@transformer", "has no component 'transformer'"),
        ("style.safetensors:1e5", "must be a number between"),
    ):
        assert main([command, *asked, "--lora", file]) == 2
        printed = capsys.readouterr().err.strip()
        assert text in printed
        assert len(printed.splitlines()) == 1
        assert "Traceback" not in printed


def test_values_that_are_not_finite_stop_a_run_before_it_computes(model: Path, lora: Path) -> None:
    tensors = tensors_of(lora)
    tensors[next(k for k in tensors if "lora_A" in k)][0, 0] = float("nan")
    lora_files.write(Path("bad.safetensors"), tensors)
    seen: list[Any] = []
    with pytest.raises(CheckpointError, match=r"bad\.safetensors: .* not finite"):
        generate(model, loras="bad.safetensors", on_event=seen.append)
    assert not any(isinstance(each, Step) for each in seen)


# ----------------------------------------------------------------------------------------- records


def test_a_record_makes_the_video_again(model: Path, lora: Path, tmp_path: Path) -> None:
    video = generate(model, loras=f"{tmp_path / lora}:0.5")
    (entry,) = video.record["request"]["loras"]
    assert entry["strength"] == 0.5
    assert set(entry["file"]) == {"file", "sha256"}
    assert entry["file"]["file"] == "style.safetensors"
    assert str(tmp_path) not in json.dumps(video.record)
    again = generate(None, from_record=video, model=str(model))
    assert np.array_equal(again.frames, video.frames)
    assert again.record["request"]["loras"] == [entry]
    other = generate(None, from_record=video, model=str(model), loras=[])
    assert not np.array_equal(other.frames, video.frames)


def test_the_file_of_a_record_must_be_the_same(model: Path, lora: Path, tmp_path: Path) -> None:
    video = generate(model, loras=str(lora))
    write(model, lora, seed=5)
    with pytest.raises(InputError, match=r"is not the LoRA that the video was made with"):
        generate(None, from_record=video, model=str(model))
    lora.unlink()
    with pytest.raises(InputError, match=r"'style.safetensors', which is not in this folder"):
        generate(None, from_record=video, model=str(model))
    elsewhere = write(model, tmp_path / "moved.safetensors")
    again = generate(None, from_record=video, model=str(model), loras=str(elsewhere))
    assert np.array_equal(again.frames, video.frames)


@pytest.mark.parametrize(
    "planted",
    [
        "/etc/passwd",
        ["/etc/passwd:1"],
        [{"file": "/etc/passwd", "strength": 1.0, "component": ""}],
        [{"file": {"file": "../a.safetensors", "sha256": "0" * 64},
          "strength": 1.0, "component": ""}],
        [{"file": {"file": "/a.safetensors", "sha256": "0" * 64},
          "strength": 1.0, "component": ""}],
        [{"file": {"file": "a.safetensors"}, "strength": 1.0, "component": ""}],
        [{"file": {"sha256": "0" * 64}, "strength": 1.0, "component": ""}],
        [{"file": {"file": "a.safetensors", "sha256": "0"}, "strength": 1.0, "component": ""}],
        [{"file": {"file": "a.safetensors", "sha256": "0" * 64}, "component": ""}],
        [{"file": {"file": "a.safetensors", "sha256": "0" * 64},
          "strength": 1.0, "component": "", "path": "/etc/passwd"}],
        {"a": 1},
        3,
    ],
)  # fmt: skip
def test_a_record_reads_no_path(planted: Any, model: Path, lora: Path) -> None:
    from everyframe.engine.records.recorded_request import request_from

    record = json.loads(json.dumps(generate(model, loras=str(lora)).record))
    record["request"]["loras"] = planted
    with pytest.raises(InputError) as caught:
        request_from(record, {"model": str(model)})
    assert "\n" not in str(caught.value)
    assert request_from(record, {"model": str(model), "loras": str(lora)}).loras == (
        Lora(str(lora)),
    )


# ------------------------------------------------------------------------------------ runs, repairs


def interrupted(model: Path, **more: Any) -> None:
    """Begin a run and leave it after its first step."""
    request = Request(**tiny_families.asked(NAME, model=str(model), **more))
    events = everyframe.stream(request)
    next(each for each in events if isinstance(each, Step))
    events.close()


def test_a_run_goes_on_with_its_lora(
    model: Path, lora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = generate(model, loras=f"{lora}:0.5").frames
    interrupted(model, loras=f"{lora}:0.5")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", everyframe.EveryframeWarning)
        resumed = everyframe.resume()
        assert np.array_equal(resumed.frames, expected)
        interrupted(model, loras=f"{lora}:0.5")
        shutil.copy(lora, "kept.safetensors")
        write(model, lora, seed=5)
        with pytest.raises(InputError, match=r"loras is not what .* was begun with"):
            everyframe.resume()
        lora.unlink()
        with pytest.raises(CheckpointError, match="there is no LoRA file"):
            everyframe.resume()
        shutil.copy("kept.safetensors", lora)
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        with pytest.raises(InputError, match="go there first"):
            everyframe.resume()
        monkeypatch.chdir(tmp_path)
        assert np.array_equal(everyframe.resume().frames, expected)


def test_repairs_are_remembered_for_weights_with_their_loras(model: Path, lora: Path) -> None:
    def key(**more: Any) -> RepairCacheKey | None:
        request = Request(**tiny_families.asked(NAME, model=str(model), **more))
        prepared = prepare(request)
        versions = {"torch": "1"}
        key_of("", prepared.plan.device, versions)._file.parent.mkdir(parents=True, exist_ok=True)
        return cached_key(find_model(request, False)[0], prepared.plan.device, versions)

    place = Path.cwd()
    assert key(loras=str(place / lora)) is None, "never hashed"
    generate(model, loras=str(place / lora))
    keys = [key(), key(loras=str(place / lora)), key(loras=f"{place / lora}:0.5")]
    assert None not in keys
    assert len({each.model for each in keys if each is not None}) == 3
    assert digest_with_loras("a", ()) == "a"


@pytest.mark.slow
def test_the_command_line_from_end_to_end(model: Path, lora: Path, tmp_path: Path) -> None:
    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "everyframe", "generate", *arguments]
        command += ["--model", str(model)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stderr

    asked = ["a red circle", "--size", "32x32", "--frames", "5", "--steps", "2", "--seed", "3"]
    run(*asked, "--lora", f"{lora}:0.5", "-o", "out.mp4")
    run(*asked, "-o", "plain.mp4")
    printed = run("--from", "out.mp4", "-o", "again.mp4")
    assert "not those" not in printed
    frames = {each: read_video(f"{each}.mp4")[0] for each in ("out", "again", "plain")}
    assert np.array_equal(frames["out"], frames["again"])
    assert not np.array_equal(frames["out"], frames["plain"])
