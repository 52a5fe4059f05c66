"""A long benchmark runs on a copy of the package, so that a change on the disk does it no harm.

Modules are imported when they are first needed, in every process again; half an hour after the
start that may be another version. Not here: what is measured.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

#: Set in the process that runs on the copy: what the copy is of.
_OF = "EVERYFRAME_BENCHMARK_COPY"


def on_a_copy() -> str:
    """What the copy is of, a commit if that is known; in the first process it never returns.

    That one copies the package, starts the same command on the copy, and ends as that does.
    """
    if _OF in os.environ:
        return os.environ[_OF]
    import everyframe

    package = Path(everyframe.__file__).parent
    with tempfile.TemporaryDirectory(prefix="everyframe-copy-") as folder:
        left_out = shutil.ignore_patterns("__pycache__")
        shutil.copytree(package, Path(folder, package.name), ignore=left_out)
        paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), _OF: _commit(package)}
        # Not written: they would be read by whoever gets this folder's name next.
        command = [sys.executable, "-B", *sys.argv]
        sys.exit(subprocess.run(command, env=env, check=False).returncode)


def _commit(package: Path) -> str:
    """Such as ``1a2b3c4``, with ``+`` behind it where files were changed since."""
    answers = [
        subprocess.run(["git", "-C", package, *words], capture_output=True, text=True, check=False)
        for words in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "."])
    ]
    if answers[0].returncode:
        return everyframe_version()
    return answers[0].stdout.strip() + ("+" if answers[1].stdout.strip() else "")


def everyframe_version() -> str:
    """For a package that is in no repository."""
    import everyframe

    return everyframe.__version__
