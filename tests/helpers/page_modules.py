"""Run the page's modules in Node.js, without a browser."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import everyframe

STATIC = Path(everyframe.__file__).parent / "server" / "static"
NODE = shutil.which("node")

needs_node = pytest.mark.skipif(NODE is None, reason="no Node.js here runs the page's modules")


def run_page_script(folder: Path, script: str, value: str) -> Any:
    """The value of a JavaScript expression after a script, which imports from ``./static/``."""
    shutil.copytree(STATIC, folder / "static", dirs_exist_ok=True)
    (folder / "package.json").write_text('{"type": "module"}')
    whole = f"""
        globalThis.document = {{ baseURI: "http://127.0.0.1:8000/" }};
        {script};
        console.log(JSON.stringify({value}));
    """
    assert NODE is not None
    done = subprocess.run(
        [NODE, "--input-type=module", "-e", whole],
        cwd=folder, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
