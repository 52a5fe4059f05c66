"""``everyframe fast-paths``: a line a path, what was asked for by name, and the exit codes."""

from __future__ import annotations

import json

import pytest

from everyframe.cli.main import main
from everyframe.fast_paths.compilation.toolchain import why_not

pytestmark = pytest.mark.usefixtures("own_cache")


def test_every_path_has_a_line(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["paths", "--model", model, "--size", "16x16", "--num-frames", "3", "--device", "cpu"]
    assert main([*asked, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    rows = {(row["component"], row["path"]): row for row in report["paths"]}
    assert rows["denoiser", "attention-flash"]["verdict"] == "expected"
    assert rows["denoiser", "linear-gelu"]["verdict"] == "untried"
    assert rows["denoiser", "linear-gelu"]["closeness"] == "rounding"
    assert rows["denoiser", "kept-embeddings"]["closeness"] == "exact"
    assert rows["denoiser", "compile"]["reason"] in (
        "on demand: --compile", why_not(),
    )  # fmt: skip
    assert not any(row["in_use"] for row in rows.values())
    assert main([*asked, "--attention", "flash", "--disable", "linear-gelu"]) == 0
    table = capsys.readouterr().out
    [line] = [each for each in table.splitlines() if "attention-flash   denoiser" in each]
    assert line.startswith("✓")
    assert "pinned" in line
    assert "by --attention" in line
    assert "-   linear-gelu       denoiser" in table


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--without", "linear-gello"], "did you mean 'linear-gelu'?"),
        (["--attention", "mathe"], "did you mean 'math'?"),
    ],
)
def test_a_wrong_name_is_reported_with_the_nearest(
    words: list[str], says: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["paths", "--model", model, *words]) == 2
    assert says in capsys.readouterr().err


def test_the_earlier_name_of_the_command_stays(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paths", "--help"]) == 0
    earlier = capsys.readouterr().out
    assert main(["fast-paths", "--help"]) == 0
    assert earlier == capsys.readouterr().out
    assert "everyframe fast-paths" in earlier
