"""The page of LoRA formats says what the tests' files give, here and in diffusers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from helpers.components import formats_table
from helpers.loras import formats_page, layouts


def diffusers_results(number: int = 0) -> list[str]:
    """What the page says of diffusers, line by line."""
    return [line.split(" | ")[2] for line in lines_of_table(number)]


def lines_of_table(number: int = 0) -> list[str]:
    """The lines of one of the page's tables, but for its head."""
    tables = formats_page.PAGE.read_text(encoding="utf-8").split("\n## ")
    return [line for line in tables[number].splitlines() if line.startswith("| ")][1:]


def without_versions(page: str) -> str:
    return re.sub(r"diffusers \d\S* with PEFT \d\S*", "diffusers with PEFT", page)


def test_the_page_is_current_in_what_it_says_of_everyframe() -> None:
    results = iter(diffusers_results())
    rows = formats_page.rows(lambda name, folder: next(results))
    assert lines_of_table() == rows
    assert all(row.split(" | ")[3].startswith("right") for row in rows)


def test_the_table_of_components_is_current() -> None:
    pytest.importorskip("gguf", reason="the package that reads GGUF is not installed")
    results = iter(diffusers_results(1))
    rows = formats_table.rows(lambda name, folder: next(results))
    assert lines_of_table(1) == rows
    assert all(row.split(" | ")[3].startswith("right") for row in rows)


@pytest.mark.parametrize("name", ["comfyui", "short", "scaled"])
def test_diffusers_is_measured_on_components(name: str, tmp_path: Path) -> None:
    expected = {"comfyui": "right", "short": "NotImplementedError", "scaled": "wrong"}[name]
    assert expected in formats_table.in_diffusers(name, tmp_path)


def test_the_page_is_what_its_program_writes() -> None:
    pytest.importorskip("peft", reason="what diffusers does is measured with PEFT")
    pytest.importorskip("gguf", reason="what diffusers does is measured with GGUF")
    page = formats_page.PAGE.read_text(encoding="utf-8")
    assert without_versions(page) == without_versions(formats_page.page())


def test_a_wrong_weight_would_be_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert layouts.is_right("diffusers")
    wanted = layouts.wanted("diffusers")
    key = "blocks.0.attn1.to_q.weight"
    monkeypatch.setattr(
        layouts, "wanted", lambda name: {**wanted, key: wanted[key] + 2 * layouts.LIMIT}
    )
    assert not layouts.is_right("diffusers")


@pytest.mark.parametrize("name", ["diffusers", "diffsynth", "diff-norm", "kohya-attention"])
def test_diffusers_is_measured(name: str, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="what diffusers does is measured with PEFT")
    answer = formats_page.in_diffusers(name, tmp_path)
    expected = {"diffusers": "right", "diffsynth": "no effect", "diff-norm": "wrong",
                "kohya-attention": "KeyError"}[name]  # fmt: skip
    assert expected in answer
