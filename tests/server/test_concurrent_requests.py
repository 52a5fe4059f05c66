"""Routes of one video that two clients ask for at once: between a look and a change, it changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra [server] is not installed")

from helpers.server_app import ServedApp


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedApp]:
    with ServedApp(tmp_path / "server") as app:
        yield app


def cancelled_video(served: ServedApp) -> str:
    video = served.client.post("/v1/videos", json={"prompt": "a red circle"}).json()["id"]
    served.store.request_cancel(video)
    return str(video)


def before(monkeypatch: pytest.MonkeyPatch, target: Any, name: str, act: Callable[[], Any]) -> None:
    """Have somebody else act right before the method of that name does."""
    method = getattr(target, name)

    def later(*args: Any, **named: Any) -> Any:
        monkeypatch.undo()
        act()
        return method(*args, **named)

    monkeypatch.setattr(target, name, later)


@pytest.mark.parametrize(
    ("method", "path", "name"),
    [("DELETE", "", "delete"), ("POST", "/cancel", "cancel"), ("POST", "/retry", "retry")],
)
def test_a_video_that_another_client_deletes_meanwhile_is_not_found(
    served: ServedApp, monkeypatch: pytest.MonkeyPatch, method: str, path: str, name: str
) -> None:
    video = cancelled_video(served)
    target = served.dispatcher if name == "cancel" else served.store
    before(monkeypatch, target, name, lambda: served.store.delete(video))
    answer = served.client.request(method, f"/v1/videos/{video}{path}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


def test_of_two_retries_one_is_a_conflict(
    served: ServedApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one's job has begun by then; it must not be begun twice."""
    video = cancelled_video(served)

    def first() -> None:
        served.store.retry(video)
        assert served.store.claim("default") is not None

    before(monkeypatch, served.store, "retry", first)
    answer = served.client.post(f"/v1/videos/{video}/retry")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "conflict")
    job = served.store.get(video)
    assert job is not None
    assert job.status == "in_progress"


def test_of_two_retries_at_once_in_the_store_one_counts(
    served: ServedApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    video = cancelled_video(served)
    store = served.store
    before(monkeypatch, store, "retry", lambda: (store.retry(video), store.claim("default")))
    with pytest.raises(Exception, match="is in_progress"):
        served.store.retry(video)
    assert store.count()["in_progress"] == 1
