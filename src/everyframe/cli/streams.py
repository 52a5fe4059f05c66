"""Standard streams as they may come: closed, full, or in an encoding that lacks letters.

A closed one is the empty one from then on, so that no file that is opened takes its number and is
written over by what is printed. Read next: `main.py`.
"""

from __future__ import annotations

import codecs
import io
import os
import sys
from pathlib import Path
from traceback import extract_tb

#: The bytes of a file's name that are no text are such letters in Python.
_BYTES = range(0xDC80, 0xDD00)


def prepare_streams() -> None:
    """Make all three streams such as can be written to and read, and print any letter."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:  # closed; the lowest number that is free is given to what is opened
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            mode = "w" if number else "r"
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))
    if isinstance(sys.stdout, io.TextIOWrapper):
        codecs.register_error("everyframe.printed", _printed)
        sys.stdout.reconfigure(errors="everyframe.printed")


def _printed(error: UnicodeError) -> tuple[bytes, int]:
    """What standard output's encoding lacks: a name's own bytes, and escapes for other letters.

    Else the path of a finished video, or a prompt in it, would end the program as a bug; and with
    escapes in place of its bytes the path would be that of no file.
    """
    assert isinstance(error, UnicodeEncodeError)
    letters = error.object[error.start : error.end]
    return b"".join(_bytes_of(letter) for letter in letters), error.end


def _bytes_of(letter: str) -> bytes:
    if ord(letter) in _BYTES:
        return bytes([ord(letter) - 0xDC00])
    return letter.encode("ascii", "backslashreplace")


def is_of_output(error: OSError) -> bool:
    """Whether it is of what a command printed, and not of a file that something opened.

    Printing happens in this package alone, by itself or by these libraries; it opens no file.
    """
    last = Path(extract_tb(error.__traceback__)[-1].filename)
    prints = last.parent == Path(__file__).parent or {"rich", "cyclopts"} & {*last.parts}
    return error.filename is None and bool(prints)


def mute_output() -> None:
    """Point standard output nowhere, or Python complains of it on its way out."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def tell(text: str) -> bool:
    """Print a line on standard error; whether that could be done.

    A log on a full disk is no reason to end hours of work, nor to end it in another way.
    """
    try:
        print(text, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        return False
    return True
