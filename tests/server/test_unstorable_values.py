"""Values that JSON and forms can hold and the queue can't are refused by their name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra [server] is not installed")

from helpers.server_app import ServedApp

PROMPT = '"prompt": "a red circle"'


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedApp]:
    with ServedApp(tmp_path_factory.mktemp("app") / "server") as app:
        yield app


def refused(answer: Any, app: ServedApp) -> dict[str, Any]:
    error: dict[str, Any] = answer.json()["error"]
    assert answer.status_code == 400, error
    assert app.store.list() == []
    return error


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        (r'"disable": ["\ud800"]', "disable", "not UTF-8 text"),
        (r'"option": {"a": "\ud800"}', "option", "not UTF-8 text"),
        (r'"option": {"\ud800": 1}', "option", "not UTF-8 text"),
        (r'"image": "data:,\ud800"', "image", "data URL"),
        (r'"\ud800": 1', r"\ud800", "no field"),
        ('"option": {"a": [1e400]}', "option", "finite"),
        (r'"extra_body": "{\"option\": {\"a\": NaN}}"', "option", "finite"),
    ],
)
@pytest.mark.parametrize("route", ["/v1/videos", "/v1/plan"])
def test_half_letters_and_numbers_without_end_are_named(
    app: ServedApp, route: str, fields: str, param: str, words: str
) -> None:
    answer = app.client.post(
        route, content=f"{{{PROMPT}, {fields}}}", headers={"content-type": "application/json"}
    )
    error = refused(answer, app)
    assert error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize("name", ["prompt", "negative_prompt", "quality", "option", "seed"])
def test_a_file_is_no_text(app: ServedApp, name: str) -> None:
    """Else a prompt in a file would have no limit, and its bytes no place in the queue."""
    fields = {"model": "shapes", **({} if name == "prompt" else {"prompt": "a red circle"})}
    answer = app.client.post("/v1/videos", data=fields, files={name: ("x", b"7" * 40_000)})
    error = refused(answer, app)
    assert (error["param"], "not a file" in error["message"]) == (name, True)
