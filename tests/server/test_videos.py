"""Routes of videos: every form of body makes the same job, and every error has the envelope."""

from __future__ import annotations

import base64
import errno
import io
import os
import time
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

pytest.importorskip("fastapi", reason="the extra [server] is not installed")

from everyframe.checkpoints.locate import Location
from everyframe.server.data_folder import DataFolder
from everyframe.server.requests.request_parser import _give_to_pipeline
from helpers.server_app import ServedApp, mp4, png

PROMPT = "a red circle"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedApp]:
    with ServedApp(tmp_path / "server") as app:
        yield app


def error_of(answer: Any, status: int) -> dict[str, Any]:
    """The error of an answer with the envelope."""
    assert answer.status_code == status, answer.text
    assert answer.headers["x-should-retry"] == "false"
    error = answer.json()["error"]
    assert {"message", "type", "param", "code"} <= error.keys()
    return error


FIELDS = {"prompt": PROMPT, "seconds": "2.5", "size": "64x32", "seed": "7"}


@pytest.mark.parametrize("form", ["json", "multipart", "form"])
def test_every_form_of_body_makes_the_same_job(served: ServedApp, form: str) -> None:
    send: dict[str, Any] = {
        "json": {"json": {**FIELDS, "seed": 7, "seconds": 2.5}},
        "multipart": {"files": {name: (None, value) for name, value in FIELDS.items()}},
        "form": {"data": FIELDS},
    }[form]
    answer = served.client.post("/v1/videos", **send)
    assert answer.status_code == 200, answer.text
    video = answer.json()
    assert (video["status"], video["progress"], video["object"]) == ("queued", 0, "video")
    assert (video["size"], video["seed"], video["prompt"]) == ("64x32", 7, PROMPT)
    assert (video["error"], video["expires_at"], video["queue_position"]) == (None, None, 0)
    assert answer.headers["openai-poll-after-ms"] == "250"
    job = served.store.get(video["id"])
    assert job is not None
    assert job.request == {"prompt": PROMPT, "seconds": job.request["seconds"],
                           "size": "64x32", "seed": job.request["seed"]}  # fmt: skip
    assert float(job.request["seconds"]) == 2.5


def test_a_job_far_back_in_the_queue_is_asked_for_less_often(served: ServedApp) -> None:
    answers = [served.client.post("/v1/videos", json={**FIELDS, "seed": n}) for n in range(8)]
    assert [a.headers["openai-poll-after-ms"] for a in answers[4:]] == ["250", "250", "300", "350"]


def test_an_upload_is_named_by_its_content(served: ServedApp) -> None:
    files = {"input_reference": ("../../../etc/x.sh", png(), "text/x-sh")}
    answer = served.client.post("/v1/videos", data={"prompt": PROMPT}, files=files)
    assert answer.status_code == 200, answer.text
    job = served.store.get(answer.json()["id"])
    assert job is not None
    assert job.request["image"].startswith("inputs/")
    assert job.request["image"].endswith(".png")
    assert (served.folder.path / job.request["image"]).read_bytes() == png()
    assert answer.json()["request"]["image"] is True
    url = "data:image/jpeg;base64," + base64.b64encode(png()).decode()
    fields = {"prompt": PROMPT, "image_reference": {"image_url": url}}
    again = served.client.post("/v1/videos", json=fields)
    second = served.store.get(again.json()["id"])
    assert second is not None
    assert second.request["image"] == job.request["image"]
    assert len(list(served.folder.inputs.iterdir())) == 1


@pytest.mark.parametrize(
    ("fields", "code", "param", "words"),
    [
        ({}, "missing_required_parameter", "prompt", "prompt"),
        ({"prompt": " "}, "invalid_value", "prompt", "empty"),
        ({"prompt": PROMPT, "size": "huge"}, "invalid_value", "size", "WIDTHxHEIGHT"),
        ({"prompt": PROMPT, "promt": "x"}, "unknown_parameter", "promt", "'prompt'"),
        ({"prompt": PROMPT, "seed": True}, "invalid_value", "seed", "whole number"),
        ({"prompt": PROMPT, "device": "cuda"}, "not_supported", "device", "runs the server"),
        ({"prompt": PROMPT, "output_path": "/x"}, "not_supported", "output_path", "paths"),
        ({"prompt": PROMPT, "model": "sora-2"}, "invalid_value", "model", "shapes"),
        ({"prompt": PROMPT, "model": "a/b"}, "invalid_value", "model", "not served"),
        ({"prompt": PROMPT, "num_frames": 7}, "invalid_value", "num_frames", "multiple of 4"),
        ({"prompt": PROMPT, "size": "16384x64"}, "plan_does_not_fit", None, "900 GB"),
        ({"prompt": "a cat"}, "invalid_value", "prompt", "can't draw"),
        ({"prompt": PROMPT, "image": "/etc/passwd"}, "invalid_value", "image", "data URL"),
        ({"prompt": PROMPT, "image": "inputs/x.png"}, "invalid_value", "image", "data URL"),
        ({"prompt": PROMPT, "image": "http://x/y.png"}, "not_supported", "image", "URLs"),
        ({"prompt": PROMPT, "loras": ["x"]}, "invalid_value", "loras", "no LoRA"),
        ({"prompt": PROMPT, "lora": {"path": "/x"}}, "not_supported", "loras", "paths"),
        ({"prompt": "x" * 40_000}, "invalid_value", "prompt", "32000"),
        ({"prompt": PROMPT, "motion_score": "x"}, "invalid_value", "motion_score", "number"),
        ({"prompt": PROMPT, "extra_params": {"option": {"a": "/etc/passwd"}}},
         "not_supported", "option", "name a file"),
    ],
)  # fmt: skip
def test_wrong_fields_are_named(
    served: ServedApp, fields: dict[str, Any], code: str, param: str | None, words: str
) -> None:
    answer = served.client.post("/v1/videos", json=fields)
    error = error_of(answer, 422 if code == "plan_does_not_fit" else 400)
    assert (error["code"], error["param"]) == (code, param), error
    assert words in error["message"]
    assert served.store.list() == []


def test_fields_of_peers_are_noted(served: ServedApp) -> None:
    fields = {"prompt": PROMPT, "quality": "high", "user": "me", "enable_teacache": True, "n": 1}
    video = served.client.post("/v1/videos", json=fields).json()
    assert [note.partition(" ")[0] for note in video["warnings"]] == [
        "quality", "user", "enable_teacache",
    ]  # fmt: skip
    asked = served.client.post("/v1/videos", json={"prompt": PROMPT, "quality": "32dB"}).json()
    assert asked["warnings"] == []
    assert asked["request"]["quality"] == "32dB"


def test_lists_have_pages_without_repeats(served: ServedApp) -> None:
    made = [
        served.client.post("/v1/videos", json={"prompt": PROMPT}).json()["id"] for _ in range(5)
    ]
    seen, after = [], None
    while True:
        page = served.client.get(
            "/v1/videos", params={"limit": 2, "order": "asc", **({"after": after} if after else {})}
        ).json()
        seen += [video["id"] for video in page["data"]]
        assert (page["first_id"], page["last_id"]) == (seen[-len(page["data"])], seen[-1])
        after = page["last_id"]
        if not page["has_more"]:
            break
    assert seen == made
    assert error_of(served.client.get("/v1/videos?after=video_x"), 400)["param"] == "after"
    assert error_of(served.client.get("/v1/videos?limit=0"), 400)["param"] == "limit"
    assert error_of(served.client.get("/v1/videos?order=up"), 400)["param"] == "order"


def test_content_comes_when_it_is_there(served: ServedApp) -> None:
    video = served.client.post("/v1/videos", json={"prompt": PROMPT}).json()["id"]
    early = error_of(served.client.get(f"/v1/videos/{video}/content"), 404)
    assert early["code"] == "not_ready"
    files = served.finish(video)
    whole = served.client.get(f"/v1/videos/{video}/content")
    assert (whole.status_code, whole.content) == (200, files["video.mp4"])
    assert whole.headers["content-type"] == "video/mp4"
    assert whole.headers["content-disposition"].startswith("inline")
    part = served.client.get(f"/v1/videos/{video}/content", headers={"range": "bytes=0-9"})
    assert (part.status_code, part.content) == (206, files["video.mp4"][:10])
    thumbnail = served.client.get(f"/v1/videos/{video}/content?variant=thumbnail")
    assert (thumbnail.content, thumbnail.headers["content-type"]) == (
        files["thumbnail.webp"], "image/webp",
    )  # fmt: skip
    wrong = error_of(served.client.get(f"/v1/videos/{video}/content?variant=0"), 400)
    assert wrong["param"] == "variant"


def test_deleted_videos_are_gone(served: ServedApp) -> None:
    video = served.client.post("/v1/videos", json={"prompt": PROMPT}).json()["id"]
    answer = served.client.delete(f"/v1/videos/{video}")
    assert answer.json() == {"id": video, "object": "video.deleted", "deleted": True}
    for path in (f"/v1/videos/{video}", "/v1/videos/..%2f..%2fjobs.sqlite", "/v1/videos/x"):
        assert error_of(served.client.get(path), 404)["code"] == "not_found"


def test_a_remix_has_the_same_seed(served: ServedApp) -> None:
    first = served.client.post(
        "/v1/videos", json={"prompt": PROMPT, "size": "64x32", "num_frames": 8}
    ).json()
    answer = served.client.post(
        f"/v1/videos/{first['id']}/remix", json={"prompt": "a blue circle", "seconds": 1}
    )
    remix = answer.json()
    assert answer.status_code == 200, answer.text
    assert remix["seed"] == first["seed"]
    assert remix["remixed_from_video_id"] == first["id"]
    assert remix["request"] == {
        "prompt": "a blue circle", "size": "64x32", "seconds": 1, "seed": first["seed"],
    }  # fmt: skip
    missing = served.client.post(f"/v1/videos/{first['id']}/remix", json={})
    assert error_of(missing, 400)["code"] == "missing_required_parameter"


def test_a_remix_with_another_aspect_keeps_the_named_size(served: ServedApp) -> None:
    first = served.client.post(
        "/v1/videos", json={"prompt": PROMPT, "resolution": "144p", "num_frames": 8}
    ).json()
    changed = {"prompt": "a blue circle", "aspect": "1:1"}
    remix = served.client.post(f"/v1/videos/{first['id']}/remix", json=changed).json()
    assert (remix["request"]["resolution"], remix["request"]["aspect"]) == ("144p", "1:1")


def test_a_repeated_request_makes_one_job(served: ServedApp) -> None:
    def post(prompt: str = PROMPT, **headers: str) -> Any:
        return served.client.post("/v1/videos", json={"prompt": prompt}, headers=headers)

    first = post().json()["id"]
    assert post(**{"x-stainless-retry-count": "1"}).json()["id"] == first
    assert post(**{"x-stainless-retry-count": "0"}).json()["id"] != first
    named = post(**{"idempotency-key": "k"}).json()["id"]
    assert post(**{"idempotency-key": "k"}).json()["id"] == named
    other = post("a blue circle", **{"idempotency-key": "k"})
    assert error_of(other, 400)["code"] == "invalid_value"


def test_failed_jobs_are_answers_and_can_be_retried(served: ServedApp) -> None:
    video = served.client.post("/v1/videos", json={"prompt": PROMPT}).json()["id"]
    assert error_of(served.client.post(f"/v1/videos/{video}/retry"), 409)["code"] == "conflict"
    served.store.claim("default")
    error = {"code": "worker_died", "message": "a worker died"}
    served.store.finish(video, "failed", error=error)
    answer = served.client.get(f"/v1/videos/{video}")
    assert (answer.status_code, answer.json()["error"]) == (200, error)
    again = served.client.post(f"/v1/videos/{video}/retry").json()
    assert (again["id"], again["status"], again["error"]) == (video, "queued", None)
    cancelled = served.client.post(f"/v1/videos/{video}/cancel").json()
    assert cancelled["status"] == "cancelled"


def test_only_the_first_request_of_a_kind_is_planned(served: ServedApp) -> None:
    for prompt in ("a red circle", "a blue circle"):
        for size in ("64x32", "32x64"):
            fields = {"prompt": prompt, "size": size, "seed": 3}
            served.client.post("/v1/videos", json=fields)
    assert [request.size for request in served.executor.requests] == ["64x32", "32x64"]


def test_several_videos_of_a_job_are_counted(served: ServedApp) -> None:
    video = served.client.post("/v1/videos", json={"prompt": PROMPT, "n": 2}).json()
    assert video["num_videos"] == 2
    served.finish(video["id"], {"video-2.mp4": b"the second"})
    own = f"/v1/videos/{video['id']}/content"
    assert served.client.get(f"{own}?index=2").content == b"the second"
    assert error_of(served.client.get(f"{own}?index=3"), 400)["param"] == "index"


def test_previews_and_frames_are_made_of_the_file(served: ServedApp) -> None:
    video = served.client.post("/v1/videos", json={"prompt": PROMPT}).json()["id"]
    served.finish(video, {"video.mp4": mp4(seconds=1)})
    own = f"/v1/videos/{video}/content?variant="
    preview = served.client.get(f"{own}preview")
    with Image.open(io.BytesIO(preview.content)) as picture:
        assert (picture.format, picture.size, picture.n_frames) == ("WEBP", (16, 16), 4)
    frames = served.client.get(f"{own}frames")
    with zipfile.ZipFile(io.BytesIO(frames.content)) as archive:
        assert archive.namelist() == [f"frame_{number:05d}.png" for number in range(4)]
        with Image.open(io.BytesIO(archive.read("frame_00003.png"))) as frame:
            assert frame.size == (16, 16)
    assert served.client.get(f"{own}frames", headers={"range": "bytes=x"}).status_code == 400
    assert not list(served.folder.inputs.iterdir()), "no archive stays"


def test_a_plan_is_shown_before_the_run(served: ServedApp) -> None:
    plan = served.client.post("/v1/plan", json={"prompt": PROMPT, "size": "64x32"}).json()
    assert (plan["object"], plan["width"], plan["height"]) == ("plan", 64, 32)
    assert plan["details"]["settings"]["width"] == 64
    assert served.store.list() == []
    missing = served.client.post("/v1/plan", json={"size": "64x32"})
    assert (missing.status_code, missing.json()["size"]) == (200, "64x32")
    large = error_of(served.client.post("/v1/plan", json={"size": "16384x64"}), 422)
    assert large["details"]["infeasible"] == large["message"]


def test_models_have_cards(served: ServedApp) -> None:
    (row,) = served.client.get("/v1/models").json()["data"]
    assert (row["id"], row["object"], row["is_default"]) == ("shapes", "model", True)
    card = served.client.get("/v1/models/shapes").json()
    options = {option["name"]: option for option in card["options"]}
    assert card["defaults"]["num_frames"] == 4
    assert options["num_frames"]["exclusiveMinimum"] == 0
    assert options["image"]["type"] == "file"
    assert "motion_score" in options
    assert "mask" not in options, "of another family"
    assert "device" not in options, "the operator's"
    assert error_of(served.client.get("/v1/models/sora"), 404)["code"] == "not_found"


def test_the_default_model_is_planned_ahead(tmp_path: Path) -> None:
    with ServedApp(tmp_path / "server", plans_ahead=True) as app:
        ends = time.monotonic() + 5
        while not app.executor.requests:
            assert time.monotonic() < ends
            time.sleep(0.01)
        app.client.post("/v1/videos", json={"prompt": PROMPT, "model": "shapes"})
        assert len(app.executor.requests) == 1, "the first request waits for nothing"


def test_extensions_begin_with_a_video_of_ours(served: ServedApp) -> None:
    first = served.client.post("/v1/videos", json={"prompt": PROMPT}).json()["id"]
    body = {"prompt": "a blue circle", "video": {"id": first}}
    early = error_of(served.client.post("/v1/videos/extensions", json=body), 404)
    assert early["code"] == "not_ready"
    served.finish(first, {"video.mp4": mp4(seconds=1)})
    answer = served.client.post("/v1/videos/extensions", json=body)
    assert answer.status_code == 200, answer.text
    job = served.store.get(answer.json()["id"])
    assert job is not None
    assert (served.folder.path / job.request["extend"]).read_bytes() == mp4(seconds=1)
    assert answer.json()["remixed_from_video_id"] == first
    form = {"prompt": PROMPT, "video[id]": first}
    assert served.client.post("/v1/videos/extensions", data=form).status_code == 200
    lost = served.client.post("/v1/videos/extensions", json={"prompt": PROMPT})
    assert error_of(lost, 400)["param"] == "video"


def parsed(served: ServedApp, **fields: Any) -> dict[str, Any]:
    """The options of a job with these fields beside a prompt."""
    answer = served.client.post("/v1/videos", json={"prompt": PROMPT, **fields})
    assert answer.status_code == 200, answer.text
    job = served.store.get(answer.json()["id"])
    assert job is not None
    return {name: value for name, value in job.request.items() if name not in ("prompt", "seed")}


@pytest.mark.parametrize(
    ("given", "own"),
    [
        ({"num_outputs_per_prompt": 2}, {"num_videos": 2}),
        ({"n": "2"}, {"num_videos": "2"}),
        ({"short_edge": "360p", "aspect_ratio": "16:9"}, {"resolution": "360p", "aspect": "16:9"}),
        ({"steps": 5, "frames": 8, "cfg": 2}, {"num_inference_steps": 5, "num_frames": 8,
                                                "guidance_scale": 2}),
        ({"without": ["attention-flash"]}, {"disable": ["attention-flash"]}),
        ({"extra_body": {"num_frames": 8}}, {"num_frames": 8}),
        ({"extra_params": '{"motion_score": 3}'}, {"motion_score": 3}),
        ({"output_format": "mp4", "width": 64, "height": 32}, {"width": 64, "height": 32}),
        ({"input_reference": None, "negative_prompt": "x"}, {"negative_prompt": "x"}),
    ],
)  # fmt: skip
def test_names_of_other_servers_are_read(
    served: ServedApp, given: dict[str, Any], own: dict[str, Any]
) -> None:
    assert parsed(served, **given) == own


@pytest.mark.parametrize(
    ("given", "code"),
    [({"n": 2, "num_videos": 2}, "invalid_value"), ({"extra_body": "x"}, "invalid_value"),
     ({"output_format": "gif"}, "not_supported"), ({"guidance_scale_2": 3}, "not_supported"),
     ({"extra_body": {"device": "cuda"}}, "not_supported"),
     ({"extra_params": {"promt": 1}}, "unknown_parameter"),
     ({"upscaling_model_path": "x"}, "not_supported")],
)  # fmt: skip
def test_what_other_servers_take_and_this_one_does_not_is_named(
    served: ServedApp, given: dict[str, Any], code: str
) -> None:
    answer = served.client.post("/v1/videos", json={"prompt": PROMPT, **given})
    assert error_of(answer, 400)["code"] == code


def test_parameters_of_a_pipeline_are_its_options(served: ServedApp) -> None:
    model = replace(served.context.models.default, location=Location("x", "folder"))
    values: dict[str, Any] = {"guidance_scale_2": "3.5", "boundary_ratio": 0.9}
    _give_to_pipeline(values, model)
    assert values == {"option": {"guidance_scale_2": 3.5, "boundary_ratio": 0.9}}


def test_a_full_disk_is_reported(served: ServedApp, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: object, data: bytes, ending: str) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(DataFolder, "add_input", full)
    answer = served.client.post("/v1/videos", data={"prompt": PROMPT}, files={"image": png()})
    error = error_of(answer, 503)
    assert (error["code"], "No space" in error["message"]) == ("storage_unavailable", True)
    assert answer.headers["retry-after"] == "30"
