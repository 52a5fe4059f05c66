"""The node pack against a server: a real process with a made-up executor."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from everyframe.media.video import Video
from helpers import comfyui_stand_in as stand_in
from helpers.fake_executor import frames_of
from helpers.server_process import ServerProcess

PROMPT = "a red circle moves to the right"
#: What the page sends of a new node.
UNSET = {
    "model": "", "negative": "", "width": 0, "height": 0, "frames": 0, "fps": 0.0, "steps": 0,
    "guidance": -1.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    loras = tmp_path_factory.mktemp("loras")
    (loras / "style.safetensors").touch()
    folder = tmp_path_factory.mktemp("server") / "data"
    with ServerProcess(folder, "--loras", str(loras), pause=0.3) as made:
        yield made


def _connection(pack: Any, url: str) -> Any:
    return pack.nodes["EveryframeServer"].execute(url).args[0]


def test_server_makes_the_video(pack: Any, server: ServerProcess) -> None:
    connection = _connection(pack, server.url)
    image = torch.zeros((1, 8, 8, 3))
    node = pack.nodes["EveryframeGenerate"]
    frames, audio, fps, video, record = node.execute(
        server=connection, prompt=PROMPT, seed=7, image=image, **UNSET
    ).args
    sent = server.ask("/v1/videos")[1]["data"][0]
    assert (sent["prompt"], sent["seed"], sent["status"]) == (PROMPT, 7, "completed")
    assert sent["request"]["image"] is True
    read = Video.load(video.file)
    assert torch.equal(frames, torch.from_numpy(read.frames) / 255)
    assert abs(frames - torch.from_numpy(frames_of(7)) / 255).max() < 0.03
    assert (audio, fps) == (None, float(read.fps))
    assert json.loads(record)["request"] == {"prompt": PROMPT, "seed": 7}
    values = [value for value, _, _ in stand_in.ProgressBar.shown]
    assert values == sorted(values)
    assert any(0 < value < 100 for value in values)
    assert stand_in.Interrupt.num_unloads == 0


def test_interrupt_cancels_the_job(pack: Any, server: ServerProcess) -> None:
    threading.Timer(0.4, lambda: setattr(stand_in.Interrupt, "is_set", True)).start()
    began = time.monotonic()
    with pytest.raises(stand_in.InterruptProcessingException):
        pack.nodes["EveryframeGenerate"].execute(
            server=_connection(pack, server.url), prompt=PROMPT, seed=11, **UNSET
        )
    assert time.monotonic() - began < 2
    until = time.monotonic() + 10
    while (job := server.ask("/v1/videos")[1]["data"][0])["status"] != "cancelled":
        assert time.monotonic() < until, job
        time.sleep(0.05)
    assert job["seed"] == 11


def test_refusals_are_the_servers_texts(pack: Any, server: ServerProcess) -> None:
    connection = _connection(pack, server.url)
    node = pack.nodes["EveryframeGenerate"]
    for change, text in (
        ({"model": "none"}, "model 'none' is not served here"),
        ({"options": '{"device": "cpu"}'}, "whoever runs the server decides this"),
        ({"prompt": ""}, "prompt is missing; say what to show"),
    ):
        with pytest.raises(pack.server_client.ServerError, match=text):
            node.execute(server=connection, **{**UNSET, "prompt": PROMPT, "seed": 1, **change})


def test_plan_of_a_server(pack: Any, server: ServerProcess) -> None:
    (text,) = pack.nodes["EveryframePlan"].execute(
        server=_connection(pack, server.url), prompt=PROMPT, seed=1, **UNSET
    ).args  # fmt: skip
    assert "steps: " in text
    assert "device memory: " in text


def test_videos_and_loras_travel(pack: Any, server: ServerProcess) -> None:
    frames = torch.from_numpy(frames_of(5)) / 255
    add, node = pack.nodes["EveryframeLora"].execute, pack.nodes["EveryframePlan"]
    given = {"server": _connection(pack, server.url), "prompt": PROMPT, "extend": frames, **UNSET}
    node.execute(**given, loras=add("(other_name)", 0.5, "transformer", "style").args[0])
    with pytest.raises(pack.server_client.ServerError, match="there is no LoRA 'other'"):
        node.execute(**given, loras=add("(other_name)", 0.5, "", "other").args[0])


def test_server_that_is_away_says_what_to_do(pack: Any) -> None:
    connection = _connection(pack, "http://127.0.0.1:9")
    with pytest.raises(
        pack.server_client.UnreachableError, match=r"start `everyframe serve` there"
    ):
        pack.nodes["EveryframePlan"].execute(server=connection, prompt=PROMPT, **UNSET)


FAILED = {"status": "failed", "error": {"code": "worker_died", "message": "killed; less memory"}}


class _Answers(BaseHTTPRequestHandler):
    """A server that breaks its stream once, and one that redirects."""

    seen: list[tuple[str, str | None, str | None]] = []  # noqa: RUF012 - of all requests

    def do_POST(self) -> None:
        self._answer(b'{"id": "video_1"}')

    def do_GET(self) -> None:
        last = self.headers.get("last-event-id")
        self.seen.append((self.path, last, self.headers.get("authorization")))
        if self.path.startswith("/v1/plan"):
            self.send_response(307)
            self.send_header("location", "/stolen")
            self.end_headers()
        elif last is None:
            self._answer(b': ping\n\nid: 4\nevent: progress\ndata: {"progress": 40}\n\n')
        else:
            self._answer(f"id: 5\nevent: done\ndata: {json.dumps(FAILED)}\n\n".encode())

    def _answer(self, body: bytes) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None: ...


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(_Answers, "seen", [])
    server = HTTPServer(("127.0.0.1", 0), _Answers)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_broken_stream_goes_on_and_a_failed_job_is_its_message(
    pack: Any, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack.server_run, "_PAUSE", 0.01)
    with pytest.raises(pack.server_client.ServerError, match="killed; less memory"):
        pack.nodes["EveryframeGenerate"].execute(
            server=_connection(pack, broken), prompt=PROMPT, seed=1, **UNSET
        )
    assert [last for _, last, _ in _Answers.seen] == [None, "4"]
    assert stand_in.ProgressBar.shown == [(40, 100, None)]


def test_key_goes_to_its_own_server_alone(
    pack: Any, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = pack.nodes["EveryframeServer"]
    with pytest.raises(ValueError, match="COMFYUI_EVERYFRAME_KEY_STUDIO="):
        node.execute(broken, "studio")
    monkeypatch.setenv("COMFYUI_EVERYFRAME_KEY_STUDIO", f"{broken} secret")
    with pytest.raises(ValueError, match=r"belongs to .* not sent to http://other:80"):
        node.execute("http://other", "studio")
    client = pack.server_client.ServerClient(node.execute(broken, "studio").args[0])
    assert "secret" not in repr(client)
    with pytest.raises(pack.server_client.ServerError, match="307"):
        client.ask("/v1/plan")
    assert _Answers.seen == [("/v1/plan", None, "Bearer secret")]


@pytest.mark.parametrize(
    "url", ["", "file:///etc/passwd", "127.0.0.1:8000", "http://", "http://a:b@c", "http://a:x"]
)
def test_url_is_checked_before_the_queue(pack: Any, url: str) -> None:
    assert "http://127.0.0.1:8000" in pack.nodes["EveryframeServer"].validate_inputs(url)
    assert pack.nodes["EveryframeServer"].validate_inputs("http://[::1]:8000") is True


def test_record_of_a_job_is_left_nowhere_else(pack: Any, server: ServerProcess) -> None:
    """The temporary folder holds the video alone."""
    pack.nodes["EveryframeGenerate"].execute(
        server=_connection(pack, server.url), prompt=PROMPT, seed=7, **UNSET
    )
    assert [each.suffix for each in Path(stand_in.get_temp_directory()).iterdir()] == [".mp4"]
