"""`generate` and `plan` around a made-up engine: what is printed and written, and the codes."""

from __future__ import annotations

import errno
import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from everyframe.cli.main import main
from everyframe.core.errors import NumericsError, WorkerDiedError
from everyframe.media.read import read_video
from everyframe.media.record import read_record
from helpers.fake_engine import NUM_STEPS, FakeEngine


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    engine = FakeEngine()
    for name, module in engine.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    return engine


def names(folder: Path = Path()) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_video_and_its_path(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "a [red] circle", "-o", "clip.mp4", "--seed", "7"]) == 0
    out, err = capsys.readouterr()
    assert out == "clip.mp4\n"
    assert "seed 7" in err
    assert "note: a note of the plan" in err
    assert "denoise: done" in err
    assert names() == ["clip.json", "clip.mp4"]
    assert read_video("clip.mp4")[0].shape == (4, 64, 64, 3)
    assert read_record("clip.mp4")["request"] == {"prompt": "a [red] circle", "seed": 7}


def test_options_reach_the_request(engine: FakeEngine) -> None:
    words = "generate x --size 32x16 --steps 9 --cfg 2.5 --aesthetic 6 --truncate-prompt -o a/"
    assert main(words.split()) == 0
    assert engine.requests[0].given() == {
        "prompt": "x",
        "size": "32x16",
        "num_inference_steps": 9,
        "guidance_scale": 2.5,
        "family_options": {"aesthetic": 6.0, "truncate_prompt": True},
    }


@pytest.mark.parametrize("words", [["-"], ["--json", "-"], ["--prompt", "-"]])
def test_a_prompt_on_standard_input(
    words: list[str], engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("a star\n"))
    assert main(["generate", *words, "-o", "clip.gif"]) == 0
    assert engine.requests[0].prompt == "a star"


def test_several_videos_by_seed(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    words = "generate x -o clip.webp --seed 7 --num-videos 2 --chain 2"
    assert main(words.split()) == 0
    assert capsys.readouterr().out == "clip-7.webp\nclip-8.webp\n"
    for seed in (7, 8):
        frames = read_video(f"clip-{seed}.webp")[0]
        assert frames.shape[0] == 8
        # The made-up frames are grey of seed / 10; webp is written without loss.
        assert np.abs(frames.astype(int) - round(25.5 * seed)).max() <= 1
        assert read_record(f"clip-{seed}.webp")["request"]["seed"] == seed


def test_folders_by_seed(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "x", "-o", "a.b/", "--seed", "7", "--num-videos", "2"]) == 0
    assert names() == ["a.b-7", "a.b-8"]


def test_a_name_is_made_without_output(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "a star"]) == 0
    path = capsys.readouterr().out.strip()
    assert path.endswith("_fake_a-star_5.mp4")
    assert path in names()


def test_json_is_one_event_a_line(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "x", "-o", "clip.mp4", "--json"]) == 0
    out, err = capsys.readouterr()
    events = [json.loads(line) for line in out.splitlines()]
    types = [event["type"] for event in events]
    assert types[0] == "planned"
    assert types[-1] == "written"
    assert types.count("step") == 1 + NUM_STEPS + 2
    assert events[-1] == {"type": "written", "path": "clip.mp4", "seed": 5}
    assert all("frames" not in event for event in events if event["type"] == "frames")
    assert err == ""


def test_dry_run_and_plan_say_the_same(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "x", "--dry-run"]) == 0
    dry = capsys.readouterr().out
    assert main(["plan", "x"]) == 0
    assert capsys.readouterr().out == dry
    for part in ("T5 encoder", "bfloat16", "34 MB", "a note of the plan", "Fits"):
        assert part in dry
    assert max(map(len, dry.splitlines())) <= 80
    assert not engine.requests
    assert not names()
    assert main(["plan", "x", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["model"] == "fake"


def test_a_plan_for_a_machine_that_is_not_here(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "x", "--as", "mps"]) == 0
    out = capsys.readouterr().out
    for part in ("mps, not this machine", "no clash of precision in 500", "3 TFLOP", "42 s",
                 "one video (made up)"):  # fmt: skip
        assert part in out
    assert max(map(len, out.splitlines())) <= 80
    assert main(["generate", "x", "--dry-run", "--as", "mps"]) == 0
    assert capsys.readouterr().out == out
    # Nothing can be made there.
    assert main(["generate", "x", "--as", "mps"]) == 2
    assert "give --dry-run" in capsys.readouterr().err
    assert not engine.requests
    engine.obstacle = "1 clashes of precision"
    assert main(["plan", "x", "--as", "mps"]) == 3
    assert "clash: denoise: blocks.0: mm: operands in two dtypes" in capsys.readouterr().out


def test_what_cannot_run_here(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.obstacle = "not enough memory; the largest that fits is 32x32"
    for words in ("generate x -o clip.mp4", "generate x --dry-run", "plan x"):
        assert main(words.split()) == 3
        out, err = capsys.readouterr()
        assert "T5 encoder" in out + err, "the plan is shown all the same"
        assert err.endswith(f"error: {engine.obstacle}\n")
        assert not names()
    assert main(["generate", "x", "--json"]) == 3
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0]["plan"]["infeasible"] == engine.obstacle
    assert lines[-1] == {"type": "error", "code": 3, "message": engine.obstacle}


def test_sizes_are_checked_before_anything_runs(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in ("generate x --size 33x32 -o clip.mp4", "plan x --size 33x32 -o clip.mp4"):
        assert main(words.split()) == 2
        out, err = capsys.readouterr()
        assert "H.264 needs even sizes, got 33x32" in err
        assert "denoise" not in out + err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("-o clip.png --num-frames 4", "can hold one frame, and 4"),
        ("-o clip.gif --fps 60", "at most 50 frames a second"),
        ("--image no.png", "image 'no.png' does not exist"),
        ("--last-image .", "image '.' is a folder"),
        ("--extend no.mp4", "video 'no.mp4' does not exist"),
        ("--report file", "report must be a folder, and 'file' is none"),
    ],
)
def test_what_needs_no_model_is_reported_before_the_engine_starts(
    words: str, says: str, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("file").write_text("")
    assert main(["generate", "x", *words.split()]) == 2
    assert says in capsys.readouterr().err
    assert not engine.requests


def test_what_cannot_run_here_is_planned_once(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the engine, whose plan is shown."""
    engine.obstacle = "not enough memory"
    monkeypatch.setattr(engine, "resolve", None)
    assert main(["generate", "x"]) == 3
    assert len(engine.requests) == 1


def test_a_png_holds_one_frame(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ("generate x", "generate x --dry-run", "plan x"):
        assert main([*words.split(), "-o", "clip.png"]) == 2
        assert "can hold one frame" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (NumericsError("step 3, denoiser, attention: not finite"), 4),
        (WorkerDiedError("worker 2 died of signal 8"), 5),
        (MemoryError(), 3),
        (OSError(errno.ENOSPC, "No space left on device"), 2),
        (KeyboardInterrupt(), 130),
        (RuntimeError("who knows"), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_failures_leave_nothing(
    failure: BaseException, code: int, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.failure = failure  # after the first frames are in the file
    Path("clip.mp4").write_bytes(b"an older one")
    assert main(["generate", "x", "-o", "clip.mp4", "--json"]) == code
    out, err = capsys.readouterr()
    assert names() == ["clip.mp4"]
    assert Path("clip.mp4").read_bytes() == b"an older one"
    assert json.loads(out.splitlines()[-1])["code"] == code
    assert ("Traceback" in err) == (code == 1)
    if code == 1:
        assert "this is a bug in everyframe: RuntimeError: who knows" in err
    else:
        assert err.count("\n") == 1


def test_frames_that_are_not_finite_are_not_written(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.nan = True
    assert main(["generate", "x", "-o", "clip.mp4"]) == 4
    assert not names()


def test_letters_that_the_terminal_lacks(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii", errors="strict"))
    assert main(["generate", "un café", "-o", "café.mp4"]) == 0
    assert main(["plan", "un café"]) == 0
    printed = raw.getvalue().decode("ascii").splitlines()
    assert printed[0] == r"caf\xe9.mp4"
    assert any(r"un caf\xe9" in line for line in printed[1:])


def test_inspect(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "x", "-o", "clip.mp4", "--seed", "7"]) == 0
    capsys.readouterr()
    for name in ("clip.mp4", "clip.json"):
        assert main(["inspect", name]) == 0
        assert "seed 7" in capsys.readouterr().out
        assert main(["inspect", name, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["request"]["seed"] == 7
