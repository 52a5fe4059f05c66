"""A command line that asks for what can't be: one clear line, exit 2, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from everyframe.cli.main import main
from everyframe.engine.workers import launcher

BAD = [
    # (words, what the line must hold)
    ("generate x --hight 64", "did you mean '--height'"),
    ("generate --hight 64 x", "did you mean '--height'"),
    ("generate x --num-frame 3", "did you mean '--num-frames'"),
    ("plan x --sed 3", "did you mean '--seed'"),
    ("plan x --dry-run", "unknown option '--dry-run'"),
    ("genrate x", "did you mean 'generate'"),
    ("--verion", "did you mean '--version'"),
    ("generate x --seed", "--seed needs a value"),
    ("generate x --seed --steps 3", "--seed needs a value"),
    ("generate x --seed 1 --seed 2", "given more than once"),
    ("generate a red circle", "put a prompt of several words into quotes"),
    ("inspect", "FILE is missing"),
    ("generate x --seed nan", "seed must be a whole number, got 'nan'"),
    ("generate x --seed -1", "seed must be at least 0, got '-1'"),
    ("generate x --seed 1.5", "seed must be a whole number"),
    ("generate x --seed 99999999999999999999", "seed must be at most"),
    ("generate x --steps -3", "num_inference_steps must be more than 0, got '-3'"),
    ("generate x --num-frames 0", "num_frames must be more than 0"),
    ("generate x --fps inf", "fps must be a finite number"),
    ("generate x --fps nan", "fps must be a finite number"),
    ("plan x --fps 0.0000001", "fps must be at least 0.01, got '0.0000001'"),
    ("plan x --fps 1e400", "fps must be a finite number"),
    ("plan x --num-devices 257", "num_devices must be at most 256"),
    ("plan x --size 100000x100000", "size must have sides of 1 to 16384 pixels"),
    (f"plan x --size {'9' * 5000}x1", "size must be WIDTHxHEIGHT"),
    (f"plan x --resolution 144p --aspect {'9' * 400}:1", "aspect must be width:height"),
    (f"plan x --max-memory {'9' * 400}GB", "max_memory must be an amount such as 8GB"),
    ("plan x --size 16384x16384 --num-frames 100000", "26844 billion pixels; at most 100 billion"),
    ("generate x --guidance-scale lots", "guidance_scale must be a number, got 'lots'"),
    ("generate x --size 64", "size must be WIDTHxHEIGHT, for example 640x360, got '64'"),
    ("generate x --size 0x64", "size must have sides of 1 to 16384 pixels, got '0x64'"),
    ("generate x --size 64x16392", "size must have sides of 1 to 16384 pixels"),
    ("generate x --height 64", "height was given without width"),
    ("generate x --aspect 16:9", "aspect needs a resolution"),
    ("generate x --size 64x64 --resolution 360p", "both set the size"),
    ("generate x --num-frames 4 --seconds 1", "both set the length"),
    ("generate x --image a.png --extend b.mp4", "both give the first frames"),
    ("generate x --edit-strength 2", "edit_strength must be at most 1"),
    ("generate x --dtype fp9", "dtype must be one of auto"),
    ("generate x --aesthetic pretty", "aesthetic must be a number, got 'pretty'"),
    ("generate x --model opensra-1.2", "did you mean 'opensora-1.2'"),
    ("generate x --model nowhere/at/all", "no folder or file nowhere/at/all"),
    ("generate x --source no.mp4 --mask 0,0,8,8 --control canny", "source: 'no.mp4' does not"),
    ("generate x --mask no.png --control canny", "mask: 'no.png' does not exist; give a picture"),
    ("generate x --mask 0,0,8,8 --control canny,no.png", "control: 'no.png' does not exist; give"),
    ("generate x --mask 0,0,8,8 --size 33x32 -o a.mp4", "H.264 needs even sizes, got 33x32"),
    ("generate x --log-level loud", "--log-level must be one of debug"),
    ("generate x -o nowhere/clip.mp4", "does not exist"),
    ("generate x -o clip.mpx", "unknown ending '.mpx'"),
    ("inspect nothing.mp4", "no such file: 'nothing.mp4'"),
    ("generate --from nothing.mp4", "no such file: 'nothing.mp4'"),
]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And without a worker, which takes seconds to start."""

    def never(*_: object) -> None:
        raise AssertionError("a worker was started")

    monkeypatch.setattr(launcher, "run_in_workers", never)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EVERYFRAME_LOG", raising=False)


@pytest.mark.parametrize(("words", "message"), BAD, ids=[words for words, _ in BAD])
def test_bad_input_is_one_line(
    words: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code = main(words.split())
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err
    assert not list(tmp_path.iterdir()), "something was written"


@pytest.mark.parametrize("prompt", ["", "   ", "\n"])
def test_an_empty_prompt(prompt: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", prompt]) == 2
    assert "the prompt is empty" in capsys.readouterr().err


def test_a_prompt_that_is_no_text(capsys: pytest.CaptureFixture[str]) -> None:
    # Python hands on bytes that are no UTF-8 so.
    assert main(["generate", "a \udcff circle"]) == 2
    err = capsys.readouterr().err
    assert "is not UTF-8 text" in err
    assert "PYTHONUTF8" not in err


def test_a_locale_without_letters_says_how_to_have_them() -> None:
    variables = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "everyframe", "plan", "ein Kreis ●", "--model", "shapes"],
        capture_output=True, env={**os.environ, **variables}, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert b"Python reads it as ascii here: export PYTHONUTF8=1 first" in done.stderr
    assert done.stderr.count(b"\n") == 1


def test_with_json_the_error_is_the_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["generate", "x", "--seed", "nan", "--json"], ["generate", "--json", "--sed"]):
        assert main(words) == 2
        out, err = capsys.readouterr()
        line = json.loads(out.splitlines()[-1])
        assert (line["type"], line["code"]) == ("error", 2)
        assert line["message"] in err


def test_level_of_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERYFRAME_LOG", "loud")
    assert main(["inspect", "x.mp4"]) == 2
    assert "EVERYFRAME_LOG must be one of debug" in capsys.readouterr().err
    monkeypatch.setenv("EVERYFRAME_LOG", "debug")
    assert main(["inspect", "x.mp4"]) == 2
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.delenv("EVERYFRAME_LOG")
    assert main(["inspect", "x.mp4", "--log-level", "debug"]) == 2
    assert "Traceback" in capsys.readouterr().err
