"""The OpenAPI document says what the routes do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra [server] is not installed")

from everyframe.core.request import Request
from everyframe.server.errors import CODES
from everyframe.server.http.app import routed_app
from everyframe.server.requests.client_options import refused_fields
from helpers.server_app import ServedApp


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return routed_app().openapi()


def test_it_has_every_route(document: dict[str, Any]) -> None:
    expected = {
        "/v1/videos", "/v1/videos/{video_id}", "/v1/videos/{video_id}/content",
        "/v1/videos/{video_id}/remix", "/v1/videos/extensions", "/v1/videos/edits",
        "/v1/videos/{video_id}/cancel", "/v1/videos/{video_id}/retry",
        "/v1/videos/{video_id}/events", "/v1/events", "/v1/videos/sync", "/v1/plan", "/v1/models",
        "/v1/models/{name}", "/v1/queue", "/v1/system", "/v1/doctor", "/v1/session", "/health",
        "/ready", "/metrics",
    }  # fmt: skip
    assert set(document["paths"]) == expected


def test_its_fields_are_those_of_a_request(document: dict[str, Any]) -> None:
    fields = document["components"]["schemas"]["VideoFields"]["properties"]
    assert set(Request.model_fields) - set(refused_fields()) <= set(fields)
    assert not set(refused_fields()) & set(fields)
    assert fields["num_frames"]["exclusiveMinimum"] == 0
    assert fields["num_frames"]["type"] == "integer"
    assert "oneOf" in fields["image"]
    assert fields["fit"]["enum"] == ["crop", "pad", "stretch"]


def test_its_answers_are_those_of_the_server(document: dict[str, Any], tmp_path: Path) -> None:
    schemas = document["components"]["schemas"]
    with ServedApp(tmp_path / "server") as app:
        video = app.client.post("/v1/videos", json={"prompt": "a red circle"}).json()
        served = app.client.get("/openapi.json").json()
    assert set(video) == set(schemas["VideoResource"]["properties"])
    assert set(schemas["VideoResource"]["required"]) >= set(video) - {"object"}
    assert served == document
    code = schemas["Error"]["properties"]["error"]["properties"]["code"]
    assert code["enum"] == [*CODES]
    answers = [
        operation["responses"]["default"]["content"]["application/json"]["schema"]["$ref"]
        for methods in document["paths"].values()
        for operation in methods.values()
    ]
    assert set(answers) == {"#/components/schemas/Error"}
