"""``python -m everyframe``: the same as the command ``everyframe``.

Python puts the current folder first on the path of a module that it runs; from here on it is not
searched, so that a ``queue.py`` there changes nothing.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

with suppress(FileNotFoundError):  # that folder was removed, and nothing is found in it
    if sys.path[:1] in ([""], [os.getcwd()]) and __name__ == "__main__":
        del sys.path[0]

from everyframe.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
