"""Where things lie on this machine: our cache folder, the hub's cache, the embedded model.

And how a small file that several processes may write is put in its place. Nothing is read here.
Read next: `find`, `digest`.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from everyframe.core.paths import home_folder, path_of


def cache_folder() -> Path:
    """``EVERYFRAME_CACHE``, else ``XDG_CACHE_HOME/everyframe``, else in ``~/.cache``."""
    own = os.environ.get("EVERYFRAME_CACHE")
    if own:
        return path_of(own, "EVERYFRAME_CACHE")
    shared = os.environ.get("XDG_CACHE_HOME")
    base = path_of(shared, "XDG_CACHE_HOME") if shared else home_folder() / ".cache"
    return base / "everyframe"


def hub_cache_folder() -> Path:
    """The Hugging Face hub's cache, as ``huggingface_hub`` itself resolves it (``HF_HOME`` …)."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def package_folder(relative: str) -> Path:
    """A folder that ships inside this package, such as ``checkpoints/shapes``."""
    return Path(__file__).resolve().parent.parent / relative


def write_beside(path: Path, text: str) -> None:
    """Put `text` in the place of `path`: written beside it and renamed, so nobody reads half of it.

    Several may do so at once; the last one's stays. Raises `OSError`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
