"""Each line of the page on security has a test, and it is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "explanation" / "security.md"
ROWS = [
    line
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| what holds")
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("::")[-1].strip("`| "))
def test_a_line_has_its_test(row: str) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
    assert named, "each line names the test that holds it"
    for file, name in named:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert name in functions


def test_there_are_lines() -> None:
    assert len(ROWS) > 20
