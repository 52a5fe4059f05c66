"""The plans that the server remembers: what it keeps of requests has a bound."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra [server] is not installed")

from everyframe.server.requests import plans
from helpers.server_app import ServedApp


def test_nothing_is_kept_of_plans_that_fail(tmp_path: Path) -> None:
    """A client may ask for any number of kinds, and each is wrong in a way of its own."""
    with ServedApp(tmp_path / "server") as app:
        for number in range(1, 20):
            fields = {"prompt": "a red circle", "num_frames": 7, "guidance_scale": number}
            assert app.client.post("/v1/plan", json=fields).status_code == 400
        gc.collect()
        assert not app.context.plans._locks
        assert not app.context.plans._plans


def test_the_oldest_plans_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_MOST_PLANS", 3)
    with ServedApp(tmp_path / "server") as app:
        for number in (1, 2, 3, 1, 4, 1, 2):
            fields = {"prompt": "a red circle", "guidance_scale": number}
            assert app.client.post("/v1/plan", json=fields).status_code == 200
        assert len(app.context.plans._plans) == 3
        asked = [request.guidance_scale for request in app.executor.requests]
    assert asked == [1, 2, 3, 4, 2]
