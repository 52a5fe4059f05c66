"""One table of error codes: each that is raised is in it, and each in it is raised."""

from __future__ import annotations

import ast
import base64
import time
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra [server] is not installed")

import everyframe.server
from everyframe.core.errors import (
    CannotRunError,
    EveryframeError,
    MediaError,
    NumericsError,
    QueueFullError,
    StoreError,
    WorkerDiedError,
)
from everyframe.core.plan import Plan
from everyframe.core.request import Request
from everyframe.server.errors import CODES, ApiError, api_error, param_of
from helpers.fake_executor import FakeExecutor
from helpers.server_app import ServedApp, png

SOURCES = sorted(Path(everyframe.server.__file__).parent.rglob("*.py"))


class PathsExecutor(FakeExecutor):
    """Names the upload by its path, as a worker does that can't read it."""

    def plan(self, request: Request) -> Plan:
        if request.prompt == "a red square":
            raise MediaError(f"image {request.image!r} can't be read to its end")
        return super().plan(request)


def test_clients_learn_no_path_of_the_data_folder(tmp_path: Path) -> None:
    """Neither by the answer to a request nor by the error of a job."""
    with ServedApp(tmp_path / "server", PathsExecutor()) as app:
        place = str(app.folder.path)
        url = f"data:image/png;base64,{base64.b64encode(png()).decode()}"
        body = {"prompt": "a red square", "image": url, "model": "shapes"}
        answer = app.client.post("/v1/videos", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith("image 'DATA/inputs/")
        app.executor.failures = [(1, WorkerDiedError(place)), (1, NumericsError(f"{place}/x"))]
        app.dispatcher.start()
        job = app.client.post("/v1/videos", json={"prompt": "a red circle"}).json()["id"]
        ends = time.monotonic() + 10
        while app.store.get(job).status != "failed":
            assert time.monotonic() < ends
            time.sleep(0.02)
        shown = app.client.get(f"/v1/videos/{job}")
        assert shown.json()["error"]["message"] == "DATA/x"
        assert place not in shown.text


def codes_in(source: str) -> set[str]:
    """Every text that can be the code of an `ApiError`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        given: list[ast.expr] = []
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "ApiError":
            given = node.args[:1]
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in (
            "code",
            "codes",
        ):
            given = [node.value]
        for each in given:
            texts = [n.value for n in ast.walk(each) if isinstance(n, ast.Constant)]
            # Of a condition such as `"x" in text` only what it chooses is a code.
            if isinstance(each, ast.IfExp):
                texts = [n.value for n in (each.body, each.orelse) if isinstance(n, ast.Constant)]
            found |= {text for text in texts if isinstance(text, str)}
    return found


def raised() -> set[str]:
    return set().union(*(codes_in(path.read_text(encoding="utf-8")) for path in SOURCES))


def test_each_code_that_is_raised_is_registered() -> None:
    assert raised() <= set(CODES)


def test_each_registered_code_is_raised() -> None:
    assert set(CODES) <= raised()


def test_a_planted_code_is_found() -> None:
    assert codes_in('raise ApiError("strange", "x")') == {"strange"}
    assert codes_in('code = "a" if "b" in text else "c"') == {"a", "c"}
    with pytest.raises(AssertionError):
        ApiError("strange", "x")


def test_every_error_of_the_library_has_its_answer() -> None:
    expected = {
        QueueFullError: 429, StoreError: 503, CannotRunError: 422, EveryframeError: 500,
    }  # fmt: skip
    for kind, status in expected.items():
        answer = api_error(kind("what happened"))
        assert answer.status == status
        assert answer.headers["x-should-retry"] == "false"
        assert answer.to_json()["error"]["message"] == "what happened"


def test_the_parameter_is_that_of_the_message() -> None:
    names = ("height", "num_frames", "seconds")
    assert param_of("height must be a multiple of 16, got 500", names) == "height"
    assert param_of("num_frames=3 and seconds=2 both set the length", names) == "num_frames"
    assert param_of("nothing of these", names) is None
