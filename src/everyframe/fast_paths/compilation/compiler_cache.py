"""The C++ compiler that torch's compiler uses, and its cache, in which nothing is half written.

Compilation needs a C++ compiler and takes minutes, so it runs on request only; `toolchain` checks
for the compiler, and `compilation` compiles.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shlex
import shutil
from pathlib import Path
from typing import Any

from everyframe.checkpoints.folder import cache_folder

_log = logging.getLogger(__name__)

#: Environment variable of torch's compile cache folder.
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"

_SCRIPT = """\
#!/bin/sh
# Made by Everyframe: the compiler writes under another name, and what it has done gets its own.
out= part= is_out=
for given do
  shift
  if [ -n "$is_out" ]; then
    is_out=
    case $given in
      /dev/*) ;;
      *) out=$given part=$given.$$.part given=$part ;;
    esac
  elif [ "$given" = -o ]; then
    is_out=1
  fi
  set -- "$@" "$given"
done
{compiler} "$@"
code=$?
[ -n "$out" ] || exit $code
if [ $code -eq 0 ]; then
  mv -f -- "$part" "$out"
else
  rm -f -- "$part"
  exit $code
fi
"""


def prepare() -> None:
    """Set up torch's compile cache in our folder, with a compiler wrapper that writes atomically.

    A cache folder set in the environment is used as it is. Nothing changes without a known
    compiler: torch reports that itself, and on Windows it uses another one.
    """
    import torch._inductor.config

    config: Any = torch._inductor.config
    found = _find_compiler(config.cpp.cxx) if os.name == "posix" else None
    if found is None:
        return
    try:
        folder = _cache() / "everyframe" / hashlib.blake2b(found.encode()).hexdigest()[:12]
        if Path(found).parent.parent == folder.parent:
            return  # it stands behind the script already
        script = folder / Path(found).name  # by which torch knows its kind
        _write(script, _SCRIPT.format(compiler=shlex.quote(found)))
    except OSError as error:
        _log.warning(
            "%s: what is compiled is kept as torch does it, and a run that is killed while it "
            "compiles may leave half a library there", error,
        )  # fmt: skip
        return
    config.cpp.cxx = (None, str(script))


def _find_compiler(asked: Any) -> str | None:
    """Path of the compiler that torch would use, or of another one that it knows."""
    names = [asked] if isinstance(asked, str) else [name for name in asked if name]
    return next((path for name in (*names, "clang++") if (path := shutil.which(name))), None)


def _cache() -> Path:
    """Create and return torch's cache folder. Raises `OSError`."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # torch names its own there as soon as its compiler is imported.
    named = os.environ.get(CACHE_VARIABLE)
    is_torchs = not named or named == default_cache_dir()
    folder = cache_folder() / "inductor" if is_torchs else Path(named or "")
    folder.mkdir(parents=True, exist_ok=True)
    os.environ[CACHE_VARIABLE] = str(folder.absolute())
    return folder.absolute()


def _write(path: Path, text: str) -> None:
    if path.exists() and path.read_text() == text and os.access(path, os.X_OK):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_text(text)
    unfinished.chmod(0o755)
    os.replace(unfinished, path)
