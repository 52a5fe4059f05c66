"""The C++ compiler as torch gets it: a file is there when it is whole, whatever ends the compiler.

torch looks for a library in its cache by its name alone. The linker writes it under that name, so
one that is killed leaves half a library, and every later process that wants it fails. Here the
compiler stands behind a script that lets it write under another name and gives what is done its
own. Not here: what is compiled (`compiling.py`), and whether there is a compiler (`tools.py`).
"""

from __future__ import annotations

import hashlib
import logging
import os
import shlex
import shutil
from pathlib import Path
from typing import Any

from everyframe.checkpoints.places import cache_folder

_log = logging.getLogger(__name__)

#: In the environment: where torch keeps what it compiles.
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
    """Have this process's torch compile in a cache of ours, by a compiler that leaves no halves.

    A cache that the environment names is used as it is named. Nothing changes where there is no
    such compiler (torch tells so itself, and on Windows it has another one).
    """
    import torch._inductor.config

    config: Any = torch._inductor.config
    found = _found(config.cpp.cxx) if os.name == "posix" else None
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


def _found(asked: Any) -> str | None:
    """The path of the compiler that torch would take, or of another one that it knows."""
    names = [asked] if isinstance(asked, str) else [name for name in asked if name]
    return next((path for name in (*names, "clang++") if (path := shutil.which(name))), None)


def _cache() -> Path:
    """The folder that torch keeps it in, which is there. Raises `OSError`."""
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
