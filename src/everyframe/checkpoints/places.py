"""Where things lie on this machine: our cache folder, the hub's cache, the embedded model.

Only paths: nothing is made or read here. Read next: `find`, `digest`.
"""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """``EVERYFRAME_CACHE``, else ``XDG_CACHE_HOME/everyframe``, else in ``~/.cache``."""
    own = os.environ.get("EVERYFRAME_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    base = Path(shared).expanduser() if shared else Path.home() / ".cache"
    return base / "everyframe"


def hub_cache_folder() -> Path:
    """The Hugging Face hub's cache, as ``huggingface_hub`` itself resolves it (``HF_HOME`` …)."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def package_folder(relative: str) -> Path:
    """A folder that ships inside this package, such as ``checkpoints/shapes``."""
    return Path(__file__).resolve().parent.parent / relative
