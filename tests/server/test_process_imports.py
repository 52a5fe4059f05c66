"""The server's process imports no torch, whatever it is asked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra [server] is not installed")

TESTS = Path(__file__).parent.parent

#: Asks every route of a running application, with a job that runs and one with a picture.
PROGRAM = """
import sys, time
from pathlib import Path
from helpers.fake_executor import FakeExecutor
from helpers.server_app import ServedApp, png
import io, av, numpy
def video():
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("h264", rate=4)
        stream.width = stream.height = 16
        for _ in range(4):
            frame = av.VideoFrame.from_ndarray(numpy.zeros((16, 16, 3), "uint8"), "rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()

with ServedApp(Path(sys.argv[1]), FakeExecutor(), runs=True) as app:
    ask = app.client.request
    made = ask("POST", "/v1/videos", json={"prompt": "a red circle"}).json()
    files = {"image": ("x.png", png()), "extend": ("x.mp4", video())}
    for name in files:
        answer = ask("POST", "/v1/videos", data={"prompt": "a"*9, "model": "shapes"},
                     files={name: files[name]})
        assert answer.status_code == 200, answer.text
    ask("POST", "/v1/videos", json={"prompt": "a cat"})
    while ask("GET", f"/v1/videos/{made['id']}").json()["status"] != "completed":
        time.sleep(0.05)
    own = f"/v1/videos/{made['id']}"
    for method, path in (
        ("GET", own + "/content"), ("GET", own + "/content?variant=thumbnail"),
        ("GET", own + "/events"), ("GET", "/v1/videos"), ("GET", "/v1/models"),
        ("GET", "/v1/models/shapes"), ("GET", "/v1/queue"), ("GET", "/health"),
        ("GET", "/ready"), ("GET", "/metrics"), ("GET", "/openapi.json"),
        ("GET", "/"), ("DELETE", own),
    ):
        answer = ask(method, path)
        assert answer.status_code == 200, (path, answer.text)
    for path in ("/v1/plan", own + "/remix", "/v1/videos/sync"):
        ask("POST", path, json={"prompt": "a red circle"})
    if "--machine" in sys.argv:
        for path in ("/v1/system", "/v1/doctor"):
            assert ask("GET", path).status_code == 200
    if "--import" in sys.argv:
        import torch
heavy = {"torch", "diffusers", "transformers"} & set(sys.modules)
print("imported:", *sorted(heavy))
"""


def imported(folder: Path, *arguments: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), *arguments],
        capture_output=True, text=True, timeout=180, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.rsplit("imported:", 1)[1].split()


def test_no_route_imports_torch(tmp_path: Path) -> None:
    assert imported(tmp_path / "server") == []


@pytest.mark.slow
def test_questions_about_the_machine_import_no_torch(tmp_path: Path) -> None:
    assert imported(tmp_path / "server", "--machine") == []


@pytest.mark.slow
def test_an_import_would_be_seen(tmp_path: Path) -> None:
    assert "torch" in imported(tmp_path / "server", "--import")
