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


ROWS = [
    line
    for line in PEERS.read_text(encoding="utf-8").splitlines()
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
