"""Limits on what clients send: sizes, numbers, pace, and files that unpack to more."""

from __future__ import annotations

import asyncio
import base64
import gzip
import io
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra [server] is not installed")

from fastapi import Request
from PIL import Image, features

from everyframe.server.errors import ApiError
from everyframe.server.http.rate_limits import RateLimit
from everyframe.server.requests.body import read_body
from everyframe.server.settings import Limits
from helpers.hostile_videos import larger_than_its_header
from helpers.server_app import ServedApp, key, mp4, png

PROMPT = {"prompt": "a red circle"}


@pytest.fixture
def small(tmp_path: Path) -> Any:
    limits = Limits(
        body_bytes=200_000, num_files=2, num_fields=8, field_bytes=1000, picture_pixels=10_000,
        video_seconds=2.0, queued=3,
    )  # fmt: skip
    with ServedApp(tmp_path / "server", limits=limits) as app:
        yield app
        assert app.store.count()["queued"] <= 3
        stray = {path.name for path in tmp_path.iterdir()} - {"server"}
        assert not stray, "nothing is written outside of the data folder"


def refused(answer: Any, status: int, code: str, words: str = "") -> dict[str, Any]:
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code), error
    assert words in error["message"]
    return error


def post(app: ServedApp, **body: Any) -> Any:
    return app.client.post("/v1/videos", **body)


def test_bodies_have_a_size(small: ServedApp) -> None:
    large = {**PROMPT, "negative_prompt": "x" * 300_000}
    refused(post(small, json=large), 413, "too_large")
    files = {"image": ("x.png", b"x" * 300_000)}
    refused(post(small, files=files, data=PROMPT), 413, "too_large")
    chunks = (b"x" * 50_000 for _ in range(8))
    answer = post(small, content=chunks, headers={"content-type": "application/json"})
    refused(answer, 413, "too_large")


def test_a_login_is_small(tmp_path: Path) -> None:
    """Anybody may send one."""
    with ServedApp(tmp_path / "server", keys=(key("ann", "secret"),)) as app:
        answer = app.client.post("/v1/session", json={"key": "x" * 5000})
        refused(answer, 413, "too_large", "larger than 4 kB")
        assert app.client.post("/v1/session", json={"key": "secret"}).status_code == 200


def test_a_long_form_field_is_read(tmp_path: Path) -> None:
    """As long as one of JSON: a picture as a data URL has millions of letters."""
    with ServedApp(tmp_path / "server") as app:
        fields = {**PROMPT, "negative_prompt": "x" * 2_000_000}
        refused(post(app, data=fields), 400, "invalid_value", "2000000 letters")


def test_forms_have_a_number_of_fields_and_files(small: ServedApp) -> None:
    many = {f"field{number}": "x" for number in range(20)}
    refused(post(small, data=many), 413, "too_large")
    refused(post(small, files=dict.fromkeys(many, (None, "x"))), 413, "too_large")
    files = [(f"image{number}", ("x.png", png())) for number in range(3)]
    refused(post(small, data=PROMPT, files=files), 413, "too_large")
    for form in (b"a=1&" * 40_000, b"&" * 160_000):  # refused before it is parsed
        headers = {"content-type": "application/x-www-form-urlencoded"}
        answer = post(small, content=form, headers=headers)
        refused(answer, 413, "too_large", "at most 8 fields")
    long = {"prompt": (None, "x" * 2000)}
    refused(post(small, files=long), 413, "too_large")
    twice = [("image", ("x.png", png())), ("image", ("y.png", png()))]
    refused(post(small, data=PROMPT, files=twice), 400, "invalid_value", "two files")


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("application/json", b"{"),
        ("application/json", b"[1]"),
        ("application/json", b'{"prompt": NaN}'),
        ("application/json", b"\xff"),
        ("application/json", b"[" * 100_000),
        ("application/json", b'{"seed": ' + b"9" * 50_000 + b"}"),
        ("application/x-www-form-urlencoded", b"prompt=%ff"),
        ("application/x-www-form-urlencoded", b"prompt=\xff"),
        ("multipart/form-data", b"x"),
        ("multipart/form-data; boundary=x", b"--x\r\nbroken"),
        ("multipart/form-data; boundary=x", b"x"),
    ],
)
def test_broken_bodies_are_refused(small: ServedApp, kind: str, body: bytes) -> None:
    answer = post(small, content=body, headers={"content-type": kind})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] in ("invalid_value", "missing_required_parameter")


def test_other_kinds_of_bodies_are_not_supported(small: ServedApp) -> None:
    for kind in ("text/plain", "application/xml", "application/octet-stream"):
        answer = post(small, content=b"x", headers={"content-type": kind})
        refused(answer, 400, "not_supported", "application/json")


def test_compressed_bodies_are_not_unpacked(small: ServedApp) -> None:
    bomb = gzip.compress(b'{"prompt": "' + b"x" * 50_000_000 + b'"}')
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    refused(post(small, content=bomb, headers=headers), 400, "not_supported", "compressed")


def slow_request(pauses: list[float], chunk: bytes) -> Request:
    """A request whose body comes in chunks with these pauses, and never ends."""
    waiting = iter(pauses)

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(next(waiting, 60))
        return {"type": "http.request", "body": chunk, "more_body": True}

    headers = [(b"content-type", b"application/json")]
    return Request({"type": "http", "headers": headers, "method": "POST"}, receive)


@pytest.mark.parametrize("pauses", [[], [0.0, 60], [0.02] * 1000])
def test_slow_bodies_are_given_up(pauses: list[float]) -> None:
    """One that stops, and one that drips: neither holds its connection for long."""

    async def read() -> None:
        await read_body(slow_request(pauses, b"x"), Limits(body_seconds=0.2))

    with pytest.raises(ApiError) as caught:
        asyncio.run(asyncio.wait_for(read(), 5))
    assert (caught.value.code, caught.value.status) == ("too_slow", 408)
    assert caught.value.headers["connection"] == "close"


def bomb_png(side: int) -> bytes:
    """A picture whose header says that it is huge."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        )

    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.parametrize("side", [101, 30_000, 2**31 - 1])
def test_a_small_file_of_many_pixels_is_not_decoded(small: ServedApp, side: int) -> None:
    files = {"image": ("x.png", bomb_png(side))}
    answer = post(small, data=PROMPT, files=files)
    error = answer.json()["error"]
    assert (error["code"], error["param"]) in (("too_large", "image"), ("invalid_value", "image"))
    assert not list(small.folder.inputs.iterdir())


def test_a_picture_of_unpacked_text_is_refused(small: ServedApp) -> None:
    """A compressed text chunk that unpacks to 100 MB."""
    text = b"x\0\0" + zlib.compress(bytes(100_000_000))
    chunk = struct.pack(">I", len(text)) + b"zTXt" + text
    chunk += struct.pack(">I", zlib.crc32(b"zTXt" + text))
    good = png()
    answer = post(small, data=PROMPT, files={"image": ("x.png", good[:33] + chunk + good[33:])})
    refused(answer, 400, "invalid_value", "damaged")


def test_videos_have_a_length_and_a_size(small: ServedApp) -> None:
    long = small.client.post("/v1/videos/extensions", files={"video": ("x.mp4", mp4(3))},
                             data=PROMPT)  # fmt: skip
    refused(long, 413, "too_large", "3 seconds")
    wide = small.client.post("/v1/videos/extensions", files={"video": ("x.mp4", mp4(1, 128))},
                             data=PROMPT)  # fmt: skip
    refused(wide, 413, "too_large", "128x128")
    fine = small.client.post("/v1/videos/extensions", files={"video": ("x.mp4", mp4(1))},
                             data=PROMPT)  # fmt: skip
    assert fine.status_code == 200, fine.text


def test_a_damaged_picture_or_an_unknown_codec_is_the_clients_error(small: ServedApp) -> None:
    url = (
        "data:application/octet-stream;base64,"
        + base64.b64encode(mp4(seconds=1).replace(b"avc1", b"none")).decode()
    )
    refused(post(small, json={**PROMPT, "extend": url}), 400, "invalid_value", "no video")
    if not features.check("avif"):
        return
    file = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(file, "AVIF")
    damaged = file.getvalue().replace(b"pitm", b"none")  # it doesn't say which item is the picture
    answer = post(small, data=PROMPT, files={"image": ("x", damaged)})
    refused(answer, 400, "invalid_value", "image is damaged")


def test_a_video_larger_than_its_header_says_is_not_decoded(small: ServedApp) -> None:
    """FFmpeg decodes a frame to find the size, in the server's process."""
    path = larger_than_its_header(small.folder.path / "x.avi", 101)
    files = {"video": ("x.avi", path.read_bytes())}
    answer = small.client.post("/v1/videos/extensions", files=files, data=PROMPT)
    refused(answer, 400, "invalid_value", "damaged, or larger than 0.01 megapixels")


@pytest.mark.parametrize("name", ["image", "extend", "source"])
def test_files_are_pictures_and_videos_alone(small: ServedApp, name: str) -> None:
    """Playlists name other files, PostScript is a program, arrays may be pickles."""
    for content in (
        b"", b"x", b"%!PS-Adobe-3.0 EPSF-3.0\n", b"#EXTM3U\n#EXTINF:1,\nhttp://127.0.0.1/x\n",
        b"ffconcat version 1.0\nfile /etc/passwd\n", png()[:40], b"\x93NUMPY\x01\x00",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"\x80\x04\x95.",
    ):  # fmt: skip
        answer = post(small, data=PROMPT, files={name: ("x.png", content, "image/png")})
        assert refused(answer, 400, "invalid_value")["param"] == name, content
        assert not list(small.folder.inputs.iterdir())


NAMES = [
    "../../../etc/passwd",
    "/etc/passwd",
    "..\\x",
    "x\0y",
    "~root",
    "a/b.png",
    "CON",
    "." * 300,
]


@pytest.mark.parametrize("name", NAMES)
def test_no_name_of_a_client_becomes_a_path(small: ServedApp, name: str) -> None:
    answer = post(small, data=PROMPT, files={"image": (name, png())})
    if answer.status_code == 200:
        assert [path.suffix for path in small.folder.inputs.iterdir()] == [".png"]
    for field in ("image", "last_image", "extend", "source", "control", "mask", "model", "loras"):
        refused_or_unknown = post(small, json={**PROMPT, field: name})
        assert refused_or_unknown.status_code == 400, field
    for place in (f"/v1/videos/{name}", f"/v1/videos/{name}/content", f"/v1/models/{name}"):
        quoted = place.replace("\0", "%00").replace("\\", "%5c").replace("../", "..%2f")
        assert small.client.get(quoted).status_code == 404
    variant = small.client.get(
        "/v1/videos/video_" + "0" * 32 + "/content", params={"variant": name}
    )
    assert variant.status_code == 404


def test_loras_are_registered_names_alone(tmp_path: Path) -> None:
    folder = tmp_path / "loras"
    folder.mkdir()
    (folder / "style.safetensors").write_bytes(b"x")
    (folder / "notes.txt").write_bytes(b"x")
    (tmp_path / "other.safetensors").write_bytes(b"x")
    with ServedApp(tmp_path / "server", loras=folder) as app:
        answer = post(app, json={**PROMPT, "loras": ["style:0.5@denoiser"]})
        job = app.store.get(answer.json()["id"])
        assert job is not None
        assert job.request["loras"] == [
            {"file": str(folder / "style.safetensors"), "strength": 0.5, "component": "denoiser"}
        ]
        assert answer.json()["request"]["loras"] == ["style:0.5@denoiser"]
        named = post(app, json={**PROMPT, "lora": {"name": "style", "scale": 2}})
        assert named.json()["request"]["loras"] == ["style:2"]
        for name in ("../other", "other", "notes", str(folder / "style.safetensors"), "styl"):
            refused(post(app, json={**PROMPT, "loras": [name]}), 400, "invalid_value", "no LoRA")


def test_the_queue_has_an_end(small: ServedApp) -> None:
    for _ in range(3):
        assert post(small, json=PROMPT).status_code == 200
    answer = post(small, json=PROMPT)
    refused(answer, 429, "queue_full", "3 jobs")
    assert answer.headers["retry-after"] == "10"


def test_retries_are_counted_like_new_jobs(small: ServedApp) -> None:
    first = post(small, json=PROMPT).json()["id"]
    assert small.client.post(f"/v1/videos/{first}/cancel").json()["status"] == "cancelled"
    for _ in range(3):
        assert post(small, json=PROMPT).status_code == 200
    answer = small.client.post(f"/v1/videos/{first}/retry")
    refused(answer, 429, "queue_full", "3 jobs")
    assert answer.headers["retry-after"] == "10"
    assert small.client.get(f"/v1/videos/{first}").json()["status"] == "cancelled"


def test_each_key_has_its_share(tmp_path: Path) -> None:
    keys = (key("ann", "a"), key("bob", "b"))
    limits = Limits(queued_of_key=1, creations_a_minute=2)
    ann, bob = ({"authorization": f"Bearer {each}"} for each in "ab")
    with ServedApp(tmp_path / "server", keys=keys, limits=limits) as app:
        assert post(app, json=PROMPT, headers=ann).status_code == 200
        refused(post(app, json=PROMPT, headers=ann), 429, "queue_full", "of this key")
        answer = post(app, json=PROMPT, headers=ann)
        refused(answer, 429, "rate_limited")
        assert int(answer.headers["retry-after"]) > 0
        assert post(app, json=PROMPT, headers=bob).status_code == 200


def test_a_bucket_fills_again() -> None:
    now = 0.0
    limit = RateLimit(2, lambda: now)
    limit.take("a")
    limit.take("a")
    with pytest.raises(ApiError, match="wait 30 seconds"):
        limit.take("a")
    limit.take("b")
    now = 30.0
    limit.take("a")
    with pytest.raises(ApiError):
        limit.take("a")
