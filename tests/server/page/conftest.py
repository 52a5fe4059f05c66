"""A browser, and watched tabs at a server with real workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from helpers.browser_tabs import Tabs, find_chromium
from helpers.page_server import PageServer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    pytest.importorskip(
        "uvicorn", reason="needs the extra server: pip install 'everyframe[server]'"
    )
    server = PageServer(tmp_path_factory.mktemp("server") / "data")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip(
        "playwright.sync_api", reason="needs the extra web-test: pip install 'everyframe[web-test]'"
    )
    found = find_chromium()
    if found is None:
        pytest.skip("no Chromium here: install chromium, or name one in EVERYFRAME_CHROMIUM")
    with api.sync_playwright() as started:
        # The sandbox needs rights that containers rarely give; all pages are our own.
        browser = started.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def tabs(browser: Any, server: PageServer) -> Iterator[Tabs]:
    """Fails a test after whose way a line is in the console, or another origin was asked."""
    tabs = Tabs(browser, server.url)
    yield tabs
    tabs.close()
    server.delete_all()
    assert tabs.problems == []
