"""Chromium tabs that record their console output and their requests."""

from __future__ import annotations

import base64
import os
import re
import shutil
from typing import Any

#: Chromium by the names of Debian, Ubuntu and Fedora, and of Google's own package.
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")

_VIEW = {"width": 1280, "height": 800}

_DROP = """([text, name, type]) => {
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const dataTransfer = new DataTransfer();
    dataTransfer.items.add(new File([bytes], name, { type }));
    for (const event of ["dragenter", "dragover", "drop"]) {
        const options = { dataTransfer, bubbles: true, cancelable: true };
        document.body.dispatchEvent(new DragEvent(event, options));
    }
}"""


def find_chromium() -> str | None:
    """Path of a Chromium: ``EVERYFRAME_CHROMIUM``, else one on the path; None without one."""
    named = os.environ.get("EVERYFRAME_CHROMIUM")
    return named or next(filter(None, map(shutil.which, _BROWSERS)), None)


class Tabs:
    """Tabs of one browser at a server's address."""

    def __init__(self, browser: Any, url: str) -> None:
        self._browser, self._url = browser, url
        self._contexts: list[Any] = []
        self.problems: list[str] = []

    def open(self, path: str = "/", **options: Any) -> Any:
        """A page in a context of its own: cookies and storage of nobody else."""
        context = self._browser.new_context(**{"viewport": _VIEW, **options})
        self._contexts.append(context)
        return self.tab(context, path)

    def tab(self, context: Any, path: str = "/") -> Any:
        """One more tab of a context."""
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.on("console", self._take)
        page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        page.on("request", lambda request: self._check(request.url))
        page.goto(self._url + path)
        return page

    def _take(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(f"{message.type}: {message.text}")

    def _check(self, url: str) -> None:
        if not url.startswith((f"{self._url}/", "data:", f"blob:{self._url}/")):
            self.problems.append(f"asked elsewhere: {url}")

    def forgive(self, pattern: str) -> None:
        """Forget the lines that a test means to cause; fail if there are none."""
        left = [line for line in self.problems if not re.search(pattern, line)]
        assert len(left) < len(self.problems), f"no line with {pattern!r} in {self.problems}"
        self.problems = left

    def close(self) -> None:
        """Close all."""
        for context in self._contexts:
            context.close()


def drop(page: Any, data: bytes, name: str, kind: str) -> None:
    """Drop a file onto the page, as a file manager does."""
    page.evaluate(_DROP, [base64.b64encode(data).decode(), name, kind])
