"""``python -m everyframe``: the same as the command ``everyframe``."""

from __future__ import annotations

import sys

from everyframe.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
