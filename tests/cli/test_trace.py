"""`trace record` and `trace diff`: what is printed and written, and the codes."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch

import everyframe
from everyframe.cli.main import main
from everyframe.numerics.trace import file
from helpers import traced_modules
from helpers.tiny_checkpoints import opensora as tiny_opensora


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """right.trace, narrow.trace in bfloat16, wrong.trace with a planted fault, large.trace."""
    folder, net = tmp_path_factory.mktemp("traces"), traced_modules.net()
    runs = {
        "right": (net, 40),
        "narrow": (copy.deepcopy(net).bfloat16(), 40),
        "wrong": (traced_modules.planted(net, 1), 40),
        "large": (net, 50),
    }
    for name, (module, tokens) in runs.items():
        with everyframe.trace(module, folder / f"{name}.trace"):
            traced_modules.sample(module, tokens=tokens, steps=2)
    return folder


def diff(traces: Path, first: str, second: str, *more: str) -> int:
    words = [str(traces / f"{name}.trace") for name in (first, second)]
    return main(["trace", "diff", *words, *more])


def test_what_precision_explains_is_0(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert diff(traces, "right", "narrow") == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == f"right.trace: model float32; cpu; {torch.__version__}"
    assert out.splitlines()[-1] == "explained: precision explains every difference"
    assert err == ""


def test_a_place_is_1_and_drawn(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert diff(traces, "right", "wrong", "-o", "diff.png") == 1
    out = capsys.readouterr().out.splitlines()
    assert out[-2].startswith("found: model.blocks.1.attn.core, call 1: its output differs by ")
    assert out[-1] == "diff.png"
    assert Path("diff.png").read_bytes().startswith(b"\x89PNG")


def test_json_is_one_line(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert diff(traces, "right", "wrong", "--json") == 1
    shown = json.loads(capsys.readouterr().out)
    assert shown["type"] == "trace_diff"
    assert not shown["explained"]
    assert shown["place"]["module"] == "model.blocks.1.attn.core"
    assert shown["place"]["kind"] == "output"
    assert diff(traces, "right", "right", "--json") == 0
    assert json.loads(capsys.readouterr().out)["largest"] == 0


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("right.trace large.trace", "two sizes: the input x of model, call 1 is (1, 40, 32)"),
        ("right.trace none.trace", "there is no trace"),
        ("right.trace text", "is no trace of everyframe, or was cut off"),
        ("right.trace", "SECOND is missing (see everyframe trace diff --help)"),
        ("right.trace wrong.trace -o diff.jpg", "the picture is a png"),
        ("right.trace wrong.trace -o no/diff.png", "no such folder"),
        ("right.trace wrong.trace --outptu diff.png", "did you mean '--output'?"),
    ],
)
def test_wrong_input_is_2_and_one_line(
    traces: Path, words: str, shown: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(traces)
    (traces / "text").write_text("no zip")
    assert main(["trace", "diff", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert shown in err
    assert err.count("\n") == 1
    assert {path.suffix for path in traces.iterdir()} == {".trace", ""}


def test_unknown_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "dif"]) == 2
    assert "did you mean 'diff'? (commands are record, diff)" in capsys.readouterr().err
    assert main(["trace"]) == 0
    assert "record" in capsys.readouterr().out


def test_a_run_is_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_opensora.opensora_1_2(tmp_path / "tiny")
    words = f"trace record circle --model {model} --size 32x32 --num-frames 5 --steps 1 --seed 1"
    words += " --device cpu --full denoiser.final_layer"
    assert main(words.split()) == 2
    assert "name the trace to write, such as -o a.trace" in capsys.readouterr().err
    assert main([*words.split(), "-o", "no/a.trace"]) == 2
    assert main([*words.split(), "-o", "a.trace"]) == 0
    assert capsys.readouterr().out == "a.trace\n"
    trace = file.read("a.trace")
    assert trace.same["frames"] == "5"
    assert trace.full
    assert {path.name for path in tmp_path.iterdir()} == {"tiny", "a.trace"}
