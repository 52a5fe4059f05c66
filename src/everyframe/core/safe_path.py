"""How Python is started without the current folder on its path.

``-m`` and ``-c`` put that folder before the standard library, so that a ``queue.py`` in it would
run in place of Python's own. Every process of ours is started with these; read next:
`everyframe.engine.worker_process`, `everyframe.hardware.isolation`.
"""

from __future__ import annotations

#: The beginning of what is run with ``-c``; `sys` is part of the interpreter.
SAFE_PATH = "import sys; sys.path[:] = [each for each in sys.path if each]; "

#: The environment variable that says the same to every Python that is started from there. Before
#: 3.11 it is not known.
SAFE_PATH_VARIABLE = "PYTHONSAFEPATH"
