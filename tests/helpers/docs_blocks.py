"""Code blocks of the docs: find them, and run one.

A fenced block runs if it is marked ``sh`` or ``python``, unless ``<!-- not run: why -->`` is on the
line above. All blocks of a page share one folder and run in order, as a reader runs them. The
tutorial's Python is one session: a block is preceded by those above it, and each of its commands
is a new process. Other programs are forks of this process (see `forked`),
which saves seconds of imports. Read next: `test_docs.py`.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from helpers.forked_process import forked

#: What is run, and how.
COMMANDS = {"sh": ("sh", "-eu"), "python": (sys.executable,)}

#: What is only shown: output, files, pictures of folders.
SHOWN = ("text", "json", "toml", "yaml", "makefile")

_FENCE = re.compile(r"^```(.*)$")
#: A command of ours with nothing in it that a shell would have to do.
_PLAIN = re.compile(r"everyframe [^|&;<>$`\\#*?~()]+")
#: Pages whose commands are processes of their own from the beginning.
_AS_TYPED = ("tutorial.md",)
#: Pages whose blocks of Python are typed into one session.
_ONE_SESSION = ("tutorial.md",)
_NOT_RUN = re.compile(r"^<!-- not run: (\S.*) -->$")
TIMEOUT = 180


@dataclass(frozen=True)
class Block:
    """One fenced block: the page and line where its text begins, its language, its text."""

    page: Path
    line: int
    language: str
    text: str
    not_run: str | None = None


def blocks_of(page: Path, text: str) -> list[Block]:
    """Every fenced block. Raises `ValueError` for one that nobody could tell how to take."""
    blocks = []
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        fence = _FENCE.match(lines[number])
        number += 1
        if not fence:
            continue
        language, first = fence[1].strip(), number
        while number < len(lines) and lines[number] != "```":
            number += 1
        if number == len(lines):
            raise ValueError(f"{page}:{first}: the block has no end")
        if language not in (*COMMANDS, *SHOWN):
            known = ", ".join((*COMMANDS, *SHOWN))
            raise ValueError(f"{page}:{first}: block of {language!r}; say one of {known}")
        above = _NOT_RUN.match(lines[first - 2]) if first > 1 else None
        text_of_block = "\n".join(lines[first:number]) + "\n"
        reason = above[1] if above else None
        blocks.append(Block(page, first + 1, language, text_of_block, reason))
        number += 1
    return blocks


def environment(source: Path, shims: Path) -> dict[str, str]:
    """This process's environment, with an `everyframe` command that runs the code in `source`."""
    shims.mkdir(exist_ok=True)
    command = shims / "everyframe"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m everyframe "$@"\n')
    command.chmod(0o755)
    path = os.pathsep.join([str(shims), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "PYTHONPATH": str(source), "COLUMNS": "100"}


def run(block: Block, folder: Path, env: dict[str, str]) -> None:
    """Run a block in `folder`. Raises `AssertionError` with its output if it fails."""
    is_typed = block.language == "sh" and block.page.name in _AS_TYPED
    programs = None if is_typed else plain_programs(block)
    if programs is None or not hasattr(os, "fork"):
        done = subprocess.run(
            COMMANDS[block.language],
            input=block.text,
            cwd=folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT,
        )
        code, printed = done.returncode, done.stdout
    else:
        code, printed = _forked(programs, folder, env)
    assert code == 0, f"{block.page}:{block.line}: exit status {code}\n{block.text}\n{printed}"


def plain_programs(block: Block) -> list[str | list[str]] | None:
    """A program of Python, or the words of commands of ours; None for what needs a shell."""
    if block.language == "python":
        return [block.text]
    lines = [line for line in block.text.splitlines() if line.strip()]
    if not all(_PLAIN.fullmatch(line) for line in lines):
        return None
    return [shlex.split(line)[1:] for line in lines]


def _forked(
    programs: Sequence[str | list[str]], folder: Path, env: dict[str, str]
) -> tuple[int, str]:
    """The programs, each in a fork of this process, up to one that fails: its code, and output."""
    # Here, and not in each of them.
    from everyframe.cli import generate  # noqa: F401
    from everyframe.engine import run as engine  # noqa: F401
    from everyframe.families.opensora import stages  # noqa: F401

    printed = ""
    for program in programs:
        process = forked(
            partial(_run, program), folder, env,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            printed += process.communicate(timeout=TIMEOUT)[0]
        finally:
            process.kill()
        if process.returncode:
            return process.returncode, printed
    return 0, printed


def _run(program: str | list[str]) -> int:
    if isinstance(program, str):
        exec(compile(program, "<page>", "exec"), {"__name__": "__main__"})
        return 0
    from everyframe.cli.main import main

    return main(program)


class Reader:
    """Reads a page from the top: a block is run once, after those above it."""

    def __init__(self, blocks: list[Block], folder: Path, env: dict[str, str]) -> None:
        self._rest = [block for block in blocks if block.language in COMMANDS and not block.not_run]
        self._folder = folder
        self._env = env
        self._session = ""

    def read_to(self, block: Block) -> None:
        """Run what is left up to and with `block`. A block that fails is not run again."""
        while self._rest and self._rest[0].line <= block.line:
            run(self._with_session(self._rest.pop(0)), self._folder, self._env)

    def close(self) -> None:
        """End servers whose page was not read to its end, where it ends them."""
        for file in self._folder.glob("*.pid") if self._rest else ():
            with suppress(ProcessLookupError):
                os.kill(int(file.read_text()), signal.SIGTERM)

    def _with_session(self, block: Block) -> Block:
        """The block after the Python above it, where the page is one session."""
        if block.language != "python" or block.page.name not in _ONE_SESSION:
            return block
        self._session += block.text
        return replace(block, text=self._session)
