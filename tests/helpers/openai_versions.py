"""Run `openai_conformance.py` with several versions of OpenAI's package; ``make test-openai``.

Each version has an environment of its own in ``build/openai`` and a server over a new data folder.
Exit 1 on a miss.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.server_process import ServerProcess

ROOT = Path(__file__).parents[2]
#: The first version with videos, the last that sends JSON, the last before 3, and the newest.
VERSIONS = ("openai==2.2.0", "openai==2.26.0", "openai>=2.27,<3", "openai")
KEY = "a key of the tests"


def python_with(requirement: str) -> Path:
    """The interpreter of an environment with that package."""
    name = requirement.replace("=", "").replace(">", "").replace("<", "").replace(",", "-")
    folder = ROOT / "build" / "openai" / name
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    words = ["-m", "pip", "install", "--quiet", "--upgrade", requirement]
    subprocess.run([str(python), *words], check=True)
    return python


def run(requirement: str) -> bool:
    """Whether every check holds with that version."""
    python, script = python_with(requirement), Path(__file__).with_name("openai_conformance.py")
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder, "keys")
        keys.write_text(f"tests {hashlib.sha256(KEY.encode()).hexdigest()}\n")
        with ServerProcess(Path(folder, "server"), "--api-keys", str(keys)) as server:
            done = subprocess.run([str(python), str(script), server.url, KEY], check=False)
            server.stop(60)
    return done.returncode == 0


if __name__ == "__main__":
    results = [run(each) for each in sys.argv[1:] or VERSIONS]
    sys.exit(int(not all(results)))
