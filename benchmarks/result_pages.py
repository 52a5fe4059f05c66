"""Options, texts and the dated page that the benchmarks share; a page is a file of `results/`.

Imports no torch and nothing of the package: some benchmarks measure these imports, others run on a
copy of the package that is found later. Not here: clocks and peaks (`measuring.py`).
"""

from __future__ import annotations

import argparse
import shlex
import sys
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from everyframe.core.facts import DeviceFacts, MachineFacts

RESULTS = Path(__file__).parent / "results"


def make_parser(text: str | None, rounds: int | None = None) -> argparse.ArgumentParser:
    """Parser of ``--no-page`` for a benchmark with that docstring, and of ``--rounds`` if given."""
    parser = argparse.ArgumentParser(description=(text or "").partition("\n")[0])
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, help=f"default {rounds}")
    parser.add_argument(
        "--no-page", dest="is_page", action="store_false", help="print, and write no page"
    )
    return parser


def command() -> str:
    """The command of this process, in Markdown."""
    script = Path(sys.argv[0]).name
    return f"`{shlex.join(['python', f'benchmarks/{script}', *sys.argv[1:]])}`"


def versions_of(facts: MachineFacts) -> str:
    """Name and version of everything that the machine's facts know."""
    return ", ".join(f"{name} {version}" for name, version in facts.versions.items())


def where(device: DeviceFacts) -> str:
    """A CPU, or the card by its name: what a page's title ends with."""
    return "a CPU" if device.kind == "cpu" else device.name


def compose_page(title: str, *parts: str) -> str:
    """The dated title, the parts and the command, with a blank line between them."""
    head = f"# {title}, {date.today()}"
    blocks = [head, *(part.strip("\n") for part in parts), f"Command: {command()}"]
    return "\n\n".join(filter(None, blocks)) + "\n"


def page_path(name: str, device: DeviceFacts | None = None) -> Path:
    """The dated page of that benchmark; a card's name is in its file's."""
    words = [] if device is None or device.kind == "cpu" else device.name.lower().split()
    card = "".join(f"-{word}" for word in words[1:2] or words)
    return RESULTS / f"{name}{card}-{date.today()}.md"


def publish(name: str, text: str, *, is_page: bool, device: DeviceFacts | None = None) -> None:
    """Print a result, and write it to its dated page."""
    print(text)
    if is_page:
        page_path(name, device).write_text(text, encoding="utf-8")
