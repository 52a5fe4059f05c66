"""Start Python without the current folder on `sys.path`.

``-m`` and ``-c`` put that folder before the standard library, so a ``queue.py`` in it would run in
place of Python's own. Every process of ours starts this way
(`everyframe.engine.workers.worker_process`, `everyframe.hardware.isolation`).
"""

from __future__ import annotations

#: Prefix of code for ``-c``; `sys` is part of the interpreter.
SAFE_PATH = "import sys; sys.path[:] = [each for each in sys.path if each]; "

#: Environment variable with the same effect on child Pythons; ignored before Python 3.11.
SAFE_PATH_VARIABLE = "PYTHONSAFEPATH"
