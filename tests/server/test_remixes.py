"""Jobs made from another video: remixes, also after a start with other models, and extensions."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra [server] is not installed")

from everyframe.server.queue.jobs import NewJob
from helpers.server_app import ServedApp, mp4

PROMPT = "a red circle"


def remix(app: ServedApp, request: dict[str, Any], **fields: Any) -> Any:
    """The answer to a remix of a job with this request."""
    job = app.store.add(NewJob({"prompt": PROMPT, **request}, model="earlier"))
    body = {"prompt": "a blue circle", **fields}
    return app.client.post(f"/v1/videos/{job.id}/remix", json=body)


def refusal(answer: Any) -> dict[str, Any]:
    error: dict[str, Any] = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "invalid_value")
    return error


def test_a_model_that_is_withdrawn_makes_no_remix(tmp_path: Path) -> None:
    with ServedApp(tmp_path / "server") as app:
        error = refusal(remix(app, {"model": "/models/withdrawn"}))
        assert "give model, one of shapes" in error["message"]
        assert error["param"] == "model"
        assert app.executor.requests == [], "it is not even planned"
        named = remix(app, {"model": "/models/withdrawn"}, model="shapes")
        assert (named.status_code, named.json()["model"]) == (200, "shapes")
        own = remix(app, {})
        assert (own.status_code, own.json()["model"]) == (200, "shapes")


def test_a_remix_has_its_own_model_and_not_todays_default(tmp_path: Path) -> None:
    """A request without a model means the embedded one, whatever is the default later."""
    (tmp_path / "other.safetensors").touch()
    other = f"other={tmp_path / 'other.safetensors'}"
    with ServedApp(tmp_path / "server", models=(other,)) as app:
        assert refusal(remix(app, {}))["param"] == "model"
    with ServedApp(tmp_path / "server", models=(other, "shapes")) as app:
        answer = remix(app, {})
        assert (answer.status_code, answer.json()["model"]) == (200, "shapes")


def test_a_lora_that_is_withdrawn_makes_no_remix(tmp_path: Path) -> None:
    folder = tmp_path / "loras"
    folder.mkdir()
    (folder / "style.safetensors").touch()
    with ServedApp(tmp_path / "server", loras=folder) as app:
        first = app.client.post("/v1/videos", json={"prompt": PROMPT, "loras": "style"})
        (lora,) = app.store.get(first.json()["id"]).request["loras"]
        assert remix(app, {"loras": [lora]}).json()["request"]["loras"] == ["style:1"]
        (folder / "style.safetensors").unlink()
        error = refusal(remix(app, {"loras": [lora]}))
        assert (error["param"], "'style'" in error["message"]) == ("loras", True)
        without = remix(app, {"loras": [lora]}, loras=[])
        assert without.json()["request"].get("loras", []) == []


@pytest.mark.parametrize("name", ["video", "extend", "video_url", "video_reference"])
def test_an_extension_takes_its_video_by_any_of_its_names(tmp_path: Path, name: str) -> None:
    url = f"data:video/mp4;base64,{base64.b64encode(mp4(seconds=1)).decode()}"
    with ServedApp(tmp_path / "server") as app:
        body = {"prompt": PROMPT, name: url}
        answer = app.client.post("/v1/videos/extensions", json=body)
        assert (answer.status_code, answer.json()["request"]["extend"]) == (200, True)
