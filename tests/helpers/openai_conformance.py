"""Check a server of the videos API with OpenAI's own client, 27 checks; exit 1 on a failure.

``python openai_conformance.py ADDRESS KEY``, for example ``http://127.0.0.1:8000 secret``. It needs
the `openai` package alone (2.2 or newer) and runs against any server of that API; the model is to
make short videos. Prints a line a check.
"""

from __future__ import annotations

import io
import struct
import sys
import time
import urllib.error
import urllib.request
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import openai

PROMPT = "a red circle moves to the right on a blue background"
OTHER = "a blue square stays still on a grey background"
#: Fields that make the videos short; a server of another model may refuse them.
SHORT = {"num_inference_steps": 4, "num_frames": 9, "seed": 7}
#: A prompt that the model's tokenizer refuses, once the job runs.
REFUSED = PROMPT + " and then" * 600
SECONDS = 120.0


def png(side: int = 16) -> bytes:
    """A small red picture."""
    rows = b"".join(b"\0" + b"\xff\0\0" * side for _ in range(side))
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)),
              (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]  # fmt: skip
    data = b"\x89PNG\r\n\x1a\n"
    for name, body in chunks:
        data += struct.pack(">I", len(body)) + name + body
        data += struct.pack(">I", zlib.crc32(name + body))
    return data


class Conformance:
    """The checks, in an order in which later ones use the videos of earlier ones."""

    def __init__(self, address: str, key: str) -> None:
        self.address, self.key = address.rstrip("/"), key
        self.client = openai.OpenAI(base_url=f"{self.address}/v1", api_key=key, timeout=60)
        self.misses: list[str] = []
        self.number = 0

    def check(self, name: str, is_so: bool, seen: Any = "") -> None:
        """Note one check."""
        self.number += 1
        print(f"{'ok  ' if is_so else 'MISS'} {self.number:2} {name}{'' if is_so else f': {seen}'}")
        if not is_so:
            self.misses.append(name)

    def create(self, prompt: str = PROMPT, **fields: Any) -> Any:
        """A short video."""
        extra = {**SHORT, **fields.pop("extra_body", {})}
        return self.client.videos.create(prompt=prompt, extra_body=extra, **fields)

    def wait(self, id: str) -> Any:  # noqa: A002
        """The video once it has ended."""
        ends = time.monotonic() + SECONDS
        while (video := self.client.videos.retrieve(id)).status in ("queued", "in_progress"):
            if time.monotonic() > ends:
                raise TimeoutError(f"{id} is {video.status} after {SECONDS:.0f} seconds")
            time.sleep(0.1)
        return video

    def error(self, call: Callable[[], Any]) -> Any:
        """The client's error of a call, or what the call gave."""
        try:
            return call()
        except openai.APIStatusError as error:
            return error

    def open(self, path: str, **headers: str) -> tuple[int, bytes, Any]:
        """Status, body and headers of a plain request."""
        given = {"authorization": f"Bearer {self.key}", **headers}
        request = urllib.request.Request(f"{self.address}{path}", headers=given)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read(), answer.headers
        except urllib.error.HTTPError as error:
            return error.code, error.read(), error.headers

    def groups(self) -> tuple[Callable[[], None], ...]:
        """The checks, by subject."""
        return (
            self.auth, self.create_and_life, self.content, self.bodies, self.lists, self.remix,
            self.errors, self.failure, self.retries, self.delete,
        )  # fmt: skip

    def run(self) -> int:
        """All checks; the number of misses."""
        for group in self.groups():
            try:
                group()
            except Exception as error:
                self.check(f"{group.__name__} ends", False, f"{type(error).__name__}: {error}")
        print(f"openai {openai.__version__}: {self.number - len(self.misses)} of {self.number}")
        return len(self.misses)

    def auth(self) -> None:
        """A wrong key is an AuthenticationError; health is open."""
        wrong = openai.OpenAI(base_url=f"{self.address}/v1", api_key="wrong", max_retries=0)
        seen = self.error(wrong.videos.list)
        self.check("a wrong key", isinstance(seen, openai.AuthenticationError), seen)
        status = urllib.request.urlopen(f"{self.address}/health", timeout=10).status
        self.check("health is open", status == 200, status)

    def create_and_life(self) -> None:
        """Fields and their types; progress rises and is 100 at the end alone."""
        self.create()  # the first of its kind waits for its plan
        began = time.monotonic()
        video = self.create(extra_body={"seed": 8})
        took = time.monotonic() - began
        fields = {"id": str, "object": str, "created_at": int, "model": str, "progress": int,
                  "size": str, "seconds": str, "status": str}  # fmt: skip
        wrong = [name for name, kind in fields.items() if type(getattr(video, name)) is not kind]
        self.check("a created video has every field", not wrong and video.object == "video", wrong)
        is_new = (video.status, video.progress) == ("queued", 0)
        self.check("it is queued at 0 %", is_new, (video.status, video.progress))
        self.check("it is answered within 2 s", took < 2, f"{took:.1f} s")
        self.check("fields of ours are there", getattr(video, "seed", None) == 8, video)
        seen = list(self.progress(video.id))
        self.check("progress never falls", seen == sorted(seen), seen)
        is_early = any(each >= 100 for each in seen[:-1])
        self.check("it is 100 at the end alone", seen[-1] == 100 and not is_early, seen)
        self.video = self.client.videos.retrieve(video.id)
        is_done = self.video.status == "completed" and type(self.video.completed_at) is int
        self.check("it is completed, with the time", is_done, self.video)
        polled = self.client.videos.create_and_poll(
            prompt=PROMPT, extra_body={**SHORT, "seed": 9}, poll_interval_ms=100
        )
        self.check("create_and_poll ends", polled.status == "completed", polled.status)

    def progress(self, id: str) -> Iterator[int]:  # noqa: A002
        """The progress of a video, each time that it is asked for."""
        while (video := self.client.videos.retrieve(id)).status in ("queued", "in_progress"):
            yield video.progress
            time.sleep(0.05)
        yield video.progress

    def content(self) -> None:
        """MP4, variants, streaming, ranges; too early is 404 at once."""
        whole = self.client.videos.download_content(self.video.id).content
        self.check("content is MP4", whole[4:8] == b"ftyp", whole[:16])
        pictures = [
            self.client.videos.download_content(self.video.id, variant=variant).content
            for variant in ("thumbnail", "spritesheet")
        ]
        are_webp = all(each[:4] + each[8:12] == b"RIFFWEBP" for each in pictures)
        self.check("thumbnail and spritesheet are WebP", are_webp, [p[:12] for p in pictures])
        with self.client.videos.with_streaming_response.download_content(self.video.id) as answer:
            streamed = b"".join(answer.iter_bytes(1000))
        self.check("streaming gives the same", streamed == whole, len(streamed))
        path = f"/v1/videos/{self.video.id}/content"
        status, part, _ = self.open(path, Range="bytes=0-9")
        self.check("a range is 206", (status, part) == (206, whole[:10]), (status, part))
        early = self.create(extra_body={"seed": 10})
        began = time.monotonic()
        seen = self.error(lambda: self.client.videos.download_content(early.id))
        is_early = isinstance(seen, openai.NotFoundError) and seen.code == "not_ready"
        self.check("too early is 404 at once", is_early and time.monotonic() - began < 1, seen)
        self.wait(early.id)

    def bodies(self) -> None:
        """Multipart with a file of a hostile name, and JSON."""
        file = ("../../x.png", io.BytesIO(png()), "image/png")
        video = self.create(input_reference=file, size="32x32", extra_body={"edit_strength": 0})
        self.check("a file whose name is a path", video.size == "32x32", video)
        self.client.videos.delete(video.id)
        sent = self.client.post(
            "/videos",
            body={"prompt": PROMPT, "seconds": "0.75", "seed": 11},
            cast_to=dict[str, Any],
        )
        self.check("a JSON body", sent["seed"] == 11 and float(sent["seconds"]) > 0, sent)
        self.wait(sent["id"])

    def lists(self) -> None:
        """Pages without repeats, in both orders."""
        pages = [video.id for video in self.client.videos.list(limit=2)]
        is_whole = len(pages) == len(set(pages)) >= 5 and self.video.id in pages
        self.check("pages have no repeats", is_whole, pages)
        ascending = [video.id for video in self.client.videos.list(limit=3, order="asc")]
        self.check("asc is the other way round", ascending == pages[::-1], ascending)

    def remix(self) -> None:
        """A remix has the same seed and says where it is from."""
        remix = self.client.videos.remix(self.video.id, prompt=OTHER)
        is_of = remix.remixed_from_video_id == self.video.id and remix.prompt == OTHER
        self.check("a remix", is_of and getattr(remix, "seed", None) == 8, remix)
        self.wait(remix.id)

    def errors(self) -> None:
        """Each error has its code and its parameter."""
        unknown = "video_" + "0" * 32
        cases: list[tuple[str, tuple[str, ...], str, Callable[[], Any]]] = [
            # Some versions leave an empty text out.
            ("an empty prompt", ("invalid_value", "missing_required_parameter"), "prompt",
             lambda: self.create("")),
            ("a bad size", ("invalid_value",), "size", lambda: self.create(size="huge")),
            ("an unknown field", ("unknown_parameter",), "promt",
             lambda: self.create(extra_body={"promt": "x"})),
            ("an unknown id", ("not_found",), "id", lambda: self.client.videos.retrieve(unknown)),
        ]  # fmt: skip
        for name, codes, param, call in cases:
            seen = self.error(call)
            is_named = getattr(seen, "code", 0) in codes and getattr(seen, "param", 0) == param
            has_hint = param != "promt" or "'prompt'" in str(seen)
            self.check(name, is_named and has_hint, seen)

    def failure(self) -> None:
        """A job that fails is an answer, with its code."""
        video = self.wait(self.create(REFUSED).id)
        is_failed = video.status == "failed" and video.error is not None
        self.check("a failed job", is_failed and video.error.code == "input", video)

    def retries(self) -> None:
        """A repeated POST makes one job."""
        body = {"prompt": PROMPT, **SHORT, "seed": 12}
        first, second = (
            self.client.post("/videos", body=body, cast_to=dict[str, Any],
                             options={"headers": {"x-stainless-retry-count": str(count)}})["id"]
            for count in (0, 1)
        )  # fmt: skip
        self.check("a repeated POST makes one job", first == second, (first, second))

    def delete(self) -> None:
        """Videos in every state are deleted, and gone afterwards."""
        videos = [self.create(extra_body={"seed": 20 + n, "num_inference_steps": 200})
                  for n in range(2)]  # fmt: skip
        gone = []
        for id in (videos[1].id, videos[0].id, self.video.id):  # noqa: A001
            answer = self.client.videos.delete(id)
            is_deleted = (answer.id, answer.deleted, answer.object) == (id, True, "video.deleted")
            seen = self.error(lambda id=id: self.client.videos.retrieve(id))  # noqa: A006
            gone.append(is_deleted and isinstance(seen, openai.NotFoundError))
        self.check("deleted videos are gone: queued, running, done", all(gone), gone)


if __name__ == "__main__":
    warnings.simplefilter("ignore", DeprecationWarning)
    sys.exit(min(Conformance(*sys.argv[1:3]).run(), 1))
