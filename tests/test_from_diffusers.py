"""The page for people who come from diffusers: its blocks run, and its peers' claims have tests."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.docs_blocks import blocks_of

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "how-to" / "from-diffusers.md"
PEERS = ROOT / "docs" / "explanation" / "peers.md"


@pytest.mark.slow  # half a minute: diffusers is imported, and a tiny Wan runs seven times
def test_the_blocks_of_the_page_run(tiny_models: Callable[[str], Path], tmp_path: Path) -> None:
    """One after the other in one program, as somebody who reads the page types them."""
    blocks = blocks_of(PAGE, PAGE.read_text(encoding="utf-8"))
    assert [block.language for block in blocks] == ["python"] * 4
    (tmp_path / "my-wan").symlink_to(tiny_models("wan"))
    program = "\n".join(block.text for block in blocks)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env={**os.environ}, capture_output=True,
        text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "fox.mp4").stat().st_size > 500


CLAIMS, _, SPEED = PEERS.read_text(encoding="utf-8").partition("## Speed")
ROWS = [
    line
    for line in CLAIMS.splitlines()
    if line.startswith("| ") and not line.startswith("| what |")
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_a_claim_about_us_has_its_test(row: str) -> None:
    (place,) = re.findall(r"`(tests/[\w/]+\.py::\w+)`", row)
    file, name = place.split("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert re.search(r"\((run|code)\)|reference|by running there", row), "its source is there"


def test_there_are_claims() -> None:
    assert len(ROWS) > 10
    assert "2026-11-2" in PEERS.read_text(encoding="utf-8")


def cells(text: str, num: int) -> list[list[str]]:
    """Rows of the tables with so many columns, without heads; an empty cell is as above."""
    rows: list[list[str]] = []
    for line in text.splitlines():
        row = [each.strip(" *") for each in line.strip().strip("|").split("|")]
        if line.startswith("| ") and len(row) == num and not row[0].startswith("---"):
            rows.append(
                [own or above for own, above in zip(row, rows[-1] if rows else row, strict=True)]
            )
    return rows


def result_page(cell: str) -> str:
    (name,) = re.findall(r"`([\w.-]+\.md)`", cell)
    return (ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8")


CALLS = [row for row in cells(SPEED, 5) if row[0] != "CPU and page"]
WHOLE_RUNS = [row for row in cells(SPEED, 4) if row[0] != "CPU and page"]


@pytest.mark.parametrize("row", CALLS, ids=" ".join)
def test_a_speed_is_that_of_its_page(row: list[str]) -> None:
    """Ours, and no candidate of the same dtype is faster than the peer that is named."""
    place, model, dtype, ours, peer = row
    title = {"Stable Video Diffusion": "SVD"}.get(model, model)
    section = result_page(place).split(f"\n## {title}")[1].partition("\n## ")[0]
    speeds = {name: speed for name, _, speed, *_ in cells(section, 7)}
    assert speeds.pop(f"ours {dtype}, fast paths") == ours
    peers = {
        name: float(speed)
        for name, speed in speeds.items()
        if dtype in name and not name.startswith("ours")
    }
    fastest = max(peers.values())
    (claimed,) = re.findall(r"\d\.\d\d", peer)
    assert float(claimed) == fastest
    assert any(name.startswith(peer.split()[0]) for name in peers if peers[name] == fastest)


@pytest.mark.parametrize("row", WHOLE_RUNS, ids=" ".join)
def test_the_speed_of_a_whole_run_is_that_of_its_page(row: list[str]) -> None:
    place, _, beside_float32, beside_bfloat16 = row
    speeds = {name: float(x) for name, _, x, *_ in cells(result_page(place), 6) if x[0].isdigit()}
    assert f"{speeds['everyframe']:.2f}" == beside_float32
    assert f"{speeds['everyframe'] / speeds['diffusers bfloat16']:.2f}" == beside_bfloat16


def test_there_are_speeds() -> None:
    assert (len(CALLS), len(WHOLE_RUNS)) == (18, 5)
