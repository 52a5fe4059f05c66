"""Make standard streams safe: closed, full, unread, or of an encoding that lacks characters.

A closed stream is replaced by the null device, so that no file opened later gets its descriptor and
is overwritten by output.
"""

from __future__ import annotations

import codecs
import io
import os
import sys
from pathlib import Path
from traceback import extract_tb
from typing import Any

#: Python's surrogates for undecodable bytes of file names.
_BYTES = range(0xDC80, 0xDD00)


class _LossyFile(io.FileIO):
    """A file that loses what it can't write.

    Standard error is a log. On a full disk, or on a terminal that was closed, it must not end hours
    of work, nor change the exit code: Python has one of its own for that, 120.
    """

    def write(self, data: Any, /) -> int:
        try:
            written: int | None = super().write(data)
        except OSError:
            written = None
        return memoryview(data).nbytes if written is None else written


def prepare_streams() -> None:
    """Make all three streams usable, and able to print any character."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:  # closed; the lowest number that is free is given to what is opened
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            mode = "w" if number else "r"
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))
    if isinstance(sys.stdout, io.TextIOWrapper):
        codecs.register_error("everyframe.printed", _encode_lacking)
        sys.stdout.reconfigure(errors="everyframe.printed")
    if sys.stderr is sys.__stderr__ and sys.stderr is not None:  # nobody else's
        sys.stderr = io.TextIOWrapper(
            io.BufferedWriter(_LossyFile(sys.stderr.fileno(), "w", closefd=False)),
            encoding=sys.stderr.encoding,
            errors=sys.stderr.errors,
            line_buffering=True,
        )


def _encode_lacking(error: UnicodeError) -> tuple[bytes, int]:
    """Encode what standard output lacks: raw bytes of a file name, escapes for other characters.

    Otherwise the path of a finished video, or a prompt in it, would crash the program. Escaped
    bytes would give the path of no existing file.
    """
    assert isinstance(error, UnicodeEncodeError)
    letters = error.object[error.start : error.end]
    return b"".join(_bytes_of(letter) for letter in letters), error.end


def _bytes_of(letter: str) -> bytes:
    if ord(letter) in _BYTES:
        return bytes([ord(letter) - 0xDC00])
    return letter.encode("ascii", "backslashreplace")


def is_of_output(error: OSError) -> bool:
    """Whether the error comes from printing rather than from a file.

    Only this package prints, directly or through these libraries, which open no file.
    """
    last = Path(extract_tb(error.__traceback__)[-1].filename)
    prints = last.parent == Path(__file__).parent or {"rich", "cyclopts"} & {*last.parts}
    return error.filename is None and bool(prints)


def mute_output() -> None:
    """Redirect standard output to the null device, so that Python doesn't fail on exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_message(text: str) -> None:
    """Print a line on standard error."""
    print(text, file=sys.stderr, flush=True)
