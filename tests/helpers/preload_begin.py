"""Imported before what processes are forked from imports the rest; see `preload_end.py`."""

from __future__ import annotations

import gc

gc.disable()
