"""The page of a server with keys asks for one, once, and keeps it out of sight."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.browser_tabs import Tabs
from helpers.page_server import PageServer

api = pytest.importorskip(
    "playwright.sync_api", reason="needs the extra web-test: pip install 'everyframe[web-test]'"
)
expect = api.expect
pytestmark = pytest.mark.slow

KEY = "correct horse battery staple"


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[PageServer]:
    keys = tmp_path / "keys"
    keys.write_text(f"ana {hashlib.sha256(KEY.encode()).hexdigest()} admin\n")
    server = PageServer(tmp_path / "data", "--api-keys", str(keys))
    yield server
    server.stop()


def test_the_key_is_asked_for_and_becomes_a_cookie(browser: Any, locked: PageServer) -> None:
    tabs = Tabs(browser, locked.url)
    page = tabs.open()
    dialog = page.get_by_role("dialog", name="This server asks for a key")
    key = dialog.get_by_label("API key")
    expect(key).to_be_visible()
    key.fill("wrong")
    page.keyboard.press("Enter")
    expect(dialog).to_contain_text("the key is wrong")
    key.fill(KEY)
    page.keyboard.press("Enter")
    expect(dialog).to_be_hidden()
    expect(page.get_by_label("Steps")).to_be_visible()
    expect(page.locator("#connection")).to_be_empty()

    again = tabs.tab(page.context)
    expect(again.get_by_label("Steps")).to_be_visible()
    expect(again.get_by_role("dialog")).to_have_count(0)
    stored = "JSON.stringify([document.cookie, {...localStorage}, {...sessionStorage}])"
    assert KEY not in page.evaluate(stored), "no script can read it"
    tabs.forgive("status of 401")
    assert tabs.problems == []
    tabs.close()
