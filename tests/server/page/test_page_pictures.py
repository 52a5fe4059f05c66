"""The pictures of the page in the docs: light, dark and on a phone.

    EVERYFRAME_WRITE_PICTURES=1 pytest --slow tests/server/page/test_page_pictures.py

writes them to docs/pictures.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from helpers.browser_tabs import Tabs
from helpers.page_server import PageServer

api = pytest.importorskip(
    "playwright.sync_api", reason="needs the extra web-test: pip install 'everyframe[web-test]'"
)
expect = api.expect
expect.set_options(timeout=90_000)
pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[3] / "docs" / "pictures"
MOST_BYTES = 150_000
VIDEOS = {
    "a white square moves up on a navy background": 4,
    "a yellow triangle grows on a grey background": 2,
    "a purple star turns on a black background": 1,
    "a red circle moves to the right on a blue background": 7,
}
RUNNING = "a red circle moves to the left on a black background"
WAITING = "a green square turns on a grey background"
DRAFT = "a cyan circle shrinks on a black background"

#: The later ones of its previews show something.
STEPS = 240

#: Name -> settings of the browser.
LOOKS: dict[str, dict[str, Any]] = {
    "serve-light": {"viewport": {"width": 1180, "height": 860}, "color_scheme": "light"},
    "serve-dark": {"viewport": {"width": 1180, "height": 860}, "color_scheme": "dark"},
    "serve-phone": {
        "viewport": {"width": 390, "height": 1180},
        "color_scheme": "light",
        "has_touch": True,
        "is_mobile": True,
    },
}


@pytest.fixture(scope="module")
def filled(server: PageServer) -> Iterator[PageServer]:
    """A server with finished videos."""
    for prompt, seed in VIDEOS.items():
        server.make_video(prompt, seed)
    yield server
    server.delete_all()


@pytest.mark.parametrize("name", LOOKS)
def test_a_picture_is_taken(name: str, browser: Any, filled: PageServer, tmp_path: Path) -> None:
    running = filled.create(RUNNING, seed=5, num_inference_steps=STEPS)
    waiting = filled.create(WAITING, seed=8)
    tabs = Tabs(browser, filled.url)
    page = tabs.open(reduced_motion="reduce", **LOOKS[name])
    page.get_by_label("What should the video show?").fill(DRAFT)
    expect(page.locator(".plan-line")).to_contain_text("float32")
    expect(page.locator(".card")).to_have_count(len(VIDEOS))
    job = page.get_by_role("article", name=RUNNING)
    expect(job.get_by_role("img", name=re.compile(r"Preview after step 1[5-9]\d"))).to_be_visible()
    expect(job.get_by_role("listitem"), "routine notes warn of nothing").to_have_count(0)
    page.wait_for_function("() => [...document.images].every((each) => each.complete)")
    file = tmp_path / f"{name}.png"
    page.evaluate("document.activeElement.blur()")
    page.screenshot(path=file)
    with Image.open(file) as picture:
        small = picture.convert("RGB").quantize(256, dither=Image.Dither.NONE)
        small.save(file, optimize=True)
        colours = len(picture.convert("RGB").getcolors(1 << 24) or [])
    assert colours > 100, "the page is drawn"
    assert file.stat().st_size < MOST_BYTES
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "fits the width"
    if os.environ.get("EVERYFRAME_WRITE_PICTURES"):
        (DOCS / file.name).write_bytes(file.read_bytes())
    tabs.close()
    for made in (waiting, running):
        filled.ask(f"/v1/videos/{made}", method="DELETE")
    assert tabs.problems == []
