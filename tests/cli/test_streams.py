"""Standard streams that are closed, full, or of another encoding: no traceback, nothing lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from everyframe.cli.tables import error_line
from helpers.diagonals import diagonal

FULL = Path("/dev/full")
#: Prints on both, opens a file in between, and says on exit whether that had a number of its own.
PROGRAM = """
import os, sys
from everyframe.cli.streams import prepare_streams, print_message
prepare_streams()
with open({path!r}, "w") as file:
    number = file.fileno()
    print("to output", flush=True)
    print_message("to error")
    file.write("whole" if sys.stdin.read() == "" else "given")
    child = "import sys; sys.exit(None in (sys.stdin, sys.stdout, sys.stderr))"
    lacks = os.spawnl(os.P_WAIT, sys.executable, sys.executable, "-c", child)
sys.exit(int(number < 3 or lacks))
"""


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_takes_no_files_place(tmp_path: Path, closed: str) -> None:
    file = tmp_path / "file"
    program = PROGRAM.format(path=str(file))
    command = ["bash", "-c", f'"$0" -c "$1" {closed}', sys.executable, program]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=60, check=False)
    assert done.returncode == 0
    assert file.read_text() == "whole"


@pytest.mark.parametrize(
    ("words", "streams", "code"),
    [
        (["models"], ">&-", 0),
        pytest.param(["models"], "2>&-", 0, marks=pytest.mark.slow),
        (["plan", "-"], "<&-", 2),
        pytest.param(["plan", "--nonsense"], "2>&-", 2, marks=pytest.mark.slow),
        (["plan", "--nonsense"], ">&- 2>&-", 2),
        (["models"], ">/dev/full", 1),
        pytest.param(["models", "--json"], ">/dev/full", 1, marks=pytest.mark.slow),
        (["plan", "--nonsense"], "2>/dev/full", 2),
        (["plan", "--nonsense", "--json"], ">/dev/full", 2),
    ],
)
def test_commands_end_in_one_line_at_most(words: list[str], streams: str, code: int) -> None:
    if "full" in streams and not FULL.exists():
        pytest.skip("this system has no full device")
    command = ["bash", "-c", f'"$0" -m everyframe "$@" {streams}', sys.executable, *words]
    # Else nothing is left that Python fails to write as it ends.
    own = {name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env=own
    )
    assert done.returncode == code, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) <= 1
    assert all(line.startswith("error: ") and "bug" not in line for line in lines)
    if code == 1:
        assert "standard output can't be written to" in done.stderr


@pytest.mark.parametrize(
    ("columns", "words"), diagonal([0, 1, 30], [["generate", "--help"], ["cache", "list"]])
)
def test_a_terminal_may_have_any_width(columns: int, words: list[str]) -> None:
    """A terminal whose size nobody set has none, and help was written without end."""
    done = subprocess.run(
        [sys.executable, "-m", "everyframe", *words], capture_output=True, timeout=60,
        check=True, env={**os.environ, "COLUMNS": str(columns)},
    )  # fmt: skip
    assert done.stdout.strip()


@pytest.mark.skipif(os.name != "posix", reason="terminals are planted by pty")
def test_a_terminal_that_was_closed_ends_no_run() -> None:
    import pty

    program = (
        "from everyframe.cli.streams import prepare_streams; prepare_streams()\n"
        "from everyframe.cli.progress import Bar, Note\n"
        "with Bar() as bar:\n"
        "    bar._progress.start(); input()\n"
        "    bar.show(Note(text='nobody reads this'))\n"
        "print('done')\n"
    )
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=theirs, env={**os.environ, "TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    os.read(ours, 1)  # the bar is there
    os.close(ours)
    output, _ = process.communicate(b"\n", timeout=60)
    assert (output, process.returncode) == (b"done\n", 0)


def test_a_message_is_one_line_that_steers_no_terminal() -> None:
    assert error_line("unknown\n  'é\x1b[2J\u202e\udcff'") == "unknown 'é\\x1b[2J\\u202e\\udcff'"
    assert error_line(f"no file {'/x' * 500}") == f"no file {'/x' * 500}"
    assert len(error_line(f"unknown model {'x' * 5000}, known are")) < 200


def test_the_path_that_is_printed_is_the_files_own() -> None:
    """Also where it is no text, and where the terminal's encoding lacks its letters."""
    program = (
        "from everyframe.cli.streams import prepare_streams; prepare_streams();"
        "import os; print(os.fsdecode(bytes([100, 255])), chr(0xe9), chr(0xd800))"
    )
    for encoding, e in (("utf-8", b"\xc3\xa9"), ("ascii", b"\\xe9")):
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, timeout=60, check=False,
            env={"PYTHONPATH": ":".join(sys.path), "PYTHONIOENCODING": encoding},
        )  # fmt: skip
        assert done.stdout == b"d\xff " + e + b" \\ud800\n", done.stderr
