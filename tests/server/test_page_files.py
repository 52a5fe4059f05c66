"""The page's files alone: nothing of theirs can run what a prompt says, or ask another server."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import everyframe
from everyframe.server.http.middleware import SECURITY_HEADERS

STATIC = Path(everyframe.__file__).parent / "server" / "static"
SCRIPTS = sorted(STATIC.glob("*.js"))
STYLES = sorted(STATIC.glob("*.css"))
INDEX = STATIC / "index.html"

#: Ways to make markup or code of a text.
UNSAFE = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc"
    r"|DOMParser|createContextualFragment|setHTML|setAttribute\(\s*[\"'](?:style|on\w+)"
)
FOREIGN = re.compile(r"https?://(?!www\.w3\.org/2000/svg)|[\"'(]//\w|@import")
#: What a policy without ``unsafe-inline`` refuses.
INLINE = re.compile(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son\w+=|javascript:")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_set_text_alone(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert not UNSAFE.findall(source)
    assert source.startswith("/**"), "a module says what it is"
    assert len(source.splitlines()) < 300


@pytest.mark.parametrize("path", [*SCRIPTS, *STYLES, INDEX], ids=lambda path: path.name)
def test_nothing_is_fetched_elsewhere(path: Path) -> None:
    assert not FOREIGN.findall(path.read_text(encoding="utf-8"))


def test_the_page_needs_no_inline_code() -> None:
    policy = SECURITY_HEADERS["content-security-policy"]
    assert "unsafe" not in policy
    assert policy.startswith(("default-src 'self';", "default-src 'none';"))
    assert not INLINE.findall(INDEX.read_text(encoding="utf-8"))


def test_every_file_is_used_and_there() -> None:
    sources = {path.name: path.read_text(encoding="utf-8") for path in [*SCRIPTS, INDEX]}
    named = {name for text in sources.values() for name in re.findall(r'from "\./([\w.]+)"', text)}
    named |= set(re.findall(r'(?:src|href)="([\w]+\.[a-z]+)"', sources["index.html"]))
    there = {path.name for path in STATIC.iterdir()}
    assert named | {"index.html"} == there


def test_every_icon_is_drawn() -> None:
    drawn = set(re.findall(r'id="i-(\w+)"', INDEX.read_text(encoding="utf-8")))
    scripts = "".join(path.read_text(encoding="utf-8") for path in SCRIPTS)
    used = set(re.findall(r'icon\("(\w+)"\)|icon: "(\w+)"', scripts))
    used |= set(re.findall(r'button\([^,]+, "(\w+)"', scripts))
    names = {name for each in used for name in ([each] if isinstance(each, str) else each) if name}
    assert names <= drawn


@pytest.mark.parametrize(
    "text",
    [
        'box.innerHTML = "<b>" + prompt', 'el.insertAdjacentHTML("beforeend", prompt)',
        "eval(prompt)", 'el.setAttribute("onclick", prompt)', "el.setAttribute('style', prompt)",
    ],
)  # fmt: skip
def test_a_planted_fault_is_found(text: str) -> None:
    assert UNSAFE.search(text)


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (FOREIGN, 'fetch("https://example.org")'), (FOREIGN, '<img src="//example.org/a.png">'),
        (FOREIGN, '@import "a.css"'), (INLINE, "<script>run()</script>"),
        (INLINE, '<p style="color: red">'), (INLINE, '<a onclick="run()">'),
    ],
)  # fmt: skip
def test_a_planted_address_or_script_is_found(rule: re.Pattern[str], text: str) -> None:
    assert rule.search(text)
