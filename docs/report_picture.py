"""Photograph the tutorial's report page with Chromium: docs/pictures/report.png.

The page shows values of this machine, so no test compares the picture. Without Chromium the old
picture stays.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

DOCS = Path(__file__).parent
TARGET = DOCS / "pictures" / "report.png"
SIZE = (1040, 1240)


def main() -> None:
    """Run the tutorial up to its report, and photograph the top of the page."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print(f"Chromium is not installed; {TARGET} stays as it is", file=sys.stderr)
        return
    tutorial = (DOCS / "tutorial.md").read_text(encoding="utf-8")
    pipeline, overflow = re.findall(r"```python\n(.*?)```", tutorial, re.DOTALL)[:2]
    with tempfile.TemporaryDirectory() as folder:
        program = [sys.executable, "-W", "ignore", "-c", pipeline + overflow]
        subprocess.run(program, cwd=folder, check=True, capture_output=True)
        shot = Path(folder, "shot.png")
        subprocess.run(
            [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
             f"--user-data-dir={folder}/browser", f"--window-size={SIZE[0]},{SIZE[1]}",
             f"--screenshot={shot}", Path(folder, "overflow", "report.html").as_uri()],
            check=True, capture_output=True,
        )  # fmt: skip
        Image.open(shot).convert("RGB").quantize(48).save(TARGET, optimize=True)


if __name__ == "__main__":
    main()
