"""What a record says, what it keeps to itself, and the request that it turns into again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import everyframe
from everyframe.core.errors import InputError
from everyframe.core.plan import BatchPlan
from everyframe.core.quality import LossyMethod
from everyframe.engine.records.comparison import differences
from everyframe.engine.records.file_identity import file_identities, find_files
from everyframe.engine.records.provenance import make_record
from everyframe.engine.records.recorded_request import (
    record_in,
    recorded_threads,
    request_from,
    threads_to_repeat,
)
from everyframe.media.output_path import RECORD_SCHEMA
from helpers.tiny_checkpoints import opensora as tiny_opensora

SIZES: dict[str, Any] = {"size": "16x16", "num_frames": 17, "num_inference_steps": 2, "seed": 5}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_opensora.opensora_1_2(tmp_path_factory.mktemp("secret-folder") / "tiny")


def record_of(model: Path, **options: Any) -> dict[str, Any]:
    request = everyframe.Request(**{"prompt": "a", "model": str(model), **SIZES, **options})
    plan = everyframe.plan(request)
    return make_record(plan, request, [str(model / "model.safetensors")])


def test_it_says_what_it_takes_and_survives_json(model: Path) -> None:
    record = record_of(model, aesthetic=5.0, guidance_scale=3)
    assert json.loads(json.dumps(record)) is not None
    assert record["request"] == {
        "prompt": "a", "model": "tiny", **SIZES, "guidance_scale": 3.0, "aesthetic": 5.0,
    }  # fmt: skip
    assert record["settings"]["height"] == 16
    assert record["plan"]["num_threads"] >= 1
    assert record["plan"]["device"]["name"]
    assert {"torch", "diffusers", "transformers", "python"} <= record["versions"].keys()
    assert len(record["model"]["sha256"]) == 64
    assert record["provenance"]["ai_generated"] is True


def test_what_batches_gain_is_not_in_it(model: Path) -> None:
    """It is measured while a server runs, and files of one request have the same bytes."""
    request = everyframe.Request(prompt="a", model=str(model), **SIZES)
    plan = everyframe.plan(request)
    batches = (None, BatchPlan(1, "the first batch tries it"), BatchPlan(4, "measured", 2.0))
    one, *others = (make_record(replace(plan, batch=each), request, []) for each in batches)
    assert others == [one, one]


def test_it_names_no_folder_of_this_machine(model: Path, tmp_path: Path) -> None:
    picture = tmp_path / "first.png"
    Image.fromarray(np.zeros((16, 16, 3), np.uint8)).save(picture)
    text = json.dumps(
        record_of(
            model, image=str(picture), vae=str(model / "vae"),
            text_encoder=str(model / "text_encoder"),
        )
    )  # fmt: skip
    assert "secret-folder" not in text
    assert str(tmp_path) not in text
    assert '"first.png"' in text


def test_a_model_in_the_home_folder_is_named_without_it(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(model.parent))
    request = everyframe.Request(prompt="a", model="~/tiny", **SIZES)
    record = make_record(everyframe.plan(request), request, [str(model / "model.safetensors")])
    assert "~" not in json.dumps(record)
    assert record["request"]["model"] == "tiny"


@pytest.mark.parametrize(
    "latents",
    [np.ones((1, 4, 5, 2, 2), np.float32), torch.ones(1, 4, 5, 2, 2),
     torch.ones(1, 4, 5, 2, 2, dtype=torch.bfloat16, requires_grad=True)],
)  # fmt: skip
def test_start_noise_is_known_by_its_hash(model: Path, latents: Any) -> None:
    expected = record_of(model, latents=np.ones((1, 4, 5, 2, 2), np.float32))
    assert record_of(model, latents=latents)["request"] == expected["request"]
    with pytest.raises(InputError, match=r"made from latents given in Python; give it again"):
        request_from(expected, {"model": str(model)})


def test_weights_are_kept_as_they_were_unless_something_else_is_asked_for(model: Path) -> None:
    record = record_of(model)
    parts = record["plan"]["components"]
    next(part for part in parts if part["name"] == "denoiser")["precision"]["weight_dtype"] = "int8"
    here = {"model": str(model)}
    assert request_from(record, here).quantized == {"denoiser": "int8"}
    anew = request_from(record, {"quantize": "none"} | here)
    assert (anew.quantize, anew.quantized) == ("none", None)


def test_an_earlier_option_name_in_a_record_is_read_and_overridden(model: Path) -> None:
    record = record_of(model)
    record["request"]["without"] = ["compile"]
    here = {"model": str(model)}
    assert request_from(record, here).disable == ("compile",)
    for name in ("disable", "without"):
        assert request_from(record, {name: "bf16"} | here).disable == ("bf16",)


def test_it_becomes_the_same_request(model: Path) -> None:
    record = record_of(model, aesthetic=5.0)
    again = request_from(record, {"model": str(model)})
    # It begins with the repairs of the recorded run, which are none, and runs by its fast paths.
    paths = {part["name"]: tuple(part["fast_paths"]) for part in record["plan"]["components"]}
    asked = {"prompt": "a", "aesthetic": 5.0, "repairs": (), "fast_paths": paths, **SIZES}
    asked["quantized"] = {}  # nothing was, so nothing will be
    asked["method"] = LossyMethod()  # nor will a step be left out
    assert again == everyframe.Request(model=str(model), **asked)


@pytest.mark.parametrize(
    ("override", "gone"),
    [
        ({"seconds": 2.0}, "num_frames"),
        ({"height": 24, "width": 24}, "size"),
        ({"resolution": "144p"}, "size"),
    ],
)
def test_an_override_displaces_what_says_the_same(
    model: Path, override: dict[str, Any], gone: str
) -> None:
    here = {"model": str(model)}
    again = request_from(record_of(model), override | here)
    assert getattr(again, gone) is None
    assert again.seed == 5
    assert request_from(record_of(model), {"seed": 6, "fps": None} | here).seed == 6


@pytest.mark.parametrize(
    ("override", "size"),
    [({"size": "24x24"}, (24, 24)), ({"height": 32, "width": 24}, (32, 24))],
)
def test_a_size_displaces_a_named_one_with_its_aspect(
    model: Path, override: dict[str, Any], size: tuple[int, int]
) -> None:
    record = record_of(model, size=None, resolution="144p", aspect="1:1")
    record["request"].pop("size")
    here = {"model": str(model)}
    assert request_from(record, override | here).asked_size() == size
    other = request_from(record, {"aspect": "4:3"} | here)
    assert (other.resolution, other.aspect) == ("144p", "4:3")
    other = request_from(record, {"resolution": "240p"} | here)
    assert (other.resolution, other.aspect) == ("240p", "1:1")


def test_a_height_goes_with_the_recorded_width(model: Path) -> None:
    record = record_of(model, size=None, height=24, width=32)
    record["request"].pop("size")
    assert request_from(record, {"height": 32, "model": str(model)}).asked_size() == (32, 32)


def test_a_folder_called_as_a_known_model_is_not_that_model(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shapes").mkdir()
    request = everyframe.Request(prompt="a", model=str(model), **SIZES)
    plan = replace(everyframe.plan(request), model="shapes")
    record = make_record(plan, request, [str(model / "model.safetensors")])
    assert record["model"]["name"] == "shapes"
    assert record["model"]["is_local"] is False
    assert record_of(model)["model"]["is_local"] is True


def test_a_given_folder_of_frames_must_hold_the_same_pictures(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "frames"
    folder.mkdir()
    for number in range(2):
        Image.new("RGB", (16, 16), (number, 0, 0)).save(folder / f"frame_{number:05d}.png")
    record = record_of(model, num_frames=34, extend=str(folder))
    here = {"model": str(model)}
    assert request_from(record, here).extend == "frames"
    Image.new("RGB", (16, 16), (9, 0, 0)).save(folder / "frame_00001.png")
    with pytest.raises(InputError, match=r"its hash differs.*--extend FILE"):
        request_from(record, here)


def test_a_given_picture_must_be_the_same_file(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    picture = tmp_path / "first.png"
    Image.fromarray(np.zeros((16, 16, 3), np.uint8)).save(picture)
    record = record_of(model, image=str(picture))
    here = {"model": str(model)}
    assert request_from(record, here).image == "first.png"
    Image.fromarray(np.ones((16, 16, 3), np.uint8)).save(picture)
    with pytest.raises(InputError, match=r"its hash differs.*--image FILE"):
        request_from(record, here)
    picture.unlink()
    with pytest.raises(InputError, match=r"made from the file 'first.png'; .*--image FILE"):
        request_from(record, here)
    record["request"]["image"]["file"] = "../../etc/first.png"
    with pytest.raises(InputError, match="made from the file"):
        request_from(record, here)


@pytest.mark.parametrize("record", [{}, {"schema": "everyframe.record/99", "request": {}}])
def test_what_is_no_record(record: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="this record is of schema"):
        request_from(record, {})


@pytest.mark.parametrize(
    ("threads", "found"), [(3, 3), (0, None), ("3", None), (None, None), (True, None), (1e3, None)]
)
def test_recorded_threads(threads: Any, found: int | None) -> None:
    assert recorded_threads({"plan": {"num_threads": threads}}) == found
    assert recorded_threads({}) is None


def test_threads_are_repeated_where_the_machine_can_bear_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("everyframe.engine.records.recorded_request.num_usable_cores", lambda: 8)
    assert threads_to_repeat({"plan": {"num_threads": 12}}) == 12
    assert threads_to_repeat({"plan": {"num_threads": 33}}) is None
    assert threads_to_repeat({"plan": {"num_threads": 100_000}}) is None


def test_differences_are_reported(model: Path) -> None:
    record = record_of(model)
    assert differences(record, record) == ()
    other = json.loads(json.dumps(record))
    other["model"]["sha256"] = "0"
    other["versions"]["torch"] = "1.0"
    other["plan"]["device"]["name"] = "abacus"
    other["everyframe"] = "0.0.1"
    lines = differences(other, record)
    assert len(lines) == 4
    assert "everyframe was 0.0.1" in lines[1]
    assert "torch was 1.0" in lines[2]


def test_a_default_that_is_another_now_is_reported(model: Path) -> None:
    record = record_of(model)
    before = json.loads(json.dumps(record))
    before["settings"]["guidance_scale"] = 9.5
    before["settings"]["options"] = [
        [name, 3 if name == "aesthetic" else value] for name, value in before["settings"]["options"]
    ]
    lines = differences(before, record)
    assert len(lines) == 2
    assert lines[0].startswith("the default of guidance_scale was 9.5, is ")
    assert lines[1].startswith("the default of aesthetic was 3, is ")
    # Another request has other settings, and nobody wonders.
    assert differences(before, record_of(model, guidance_scale=4)) == ()


def test_a_model_of_ones_own_disk_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = {
        "schema": RECORD_SCHEMA,
        "request": {"prompt": "a", "model": "mine", "seed": 1},
        "model": {"name": "mine", "is_local": True},
    }
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"'mine'.*--model FOLDER"):
        request_from(record, {})
    assert request_from(record, {"model": "elsewhere"}).model == "elsewhere"
    # Also where a folder of that name lies here: the record's maker may have put it there.
    (tmp_path / "mine").mkdir()
    with pytest.raises(InputError, match=r"'mine'.*--model FOLDER"):
        request_from(record, {})


def test_files_among_a_pipelines_own_parameters_are_known_by_name_and_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "walk.mp4").write_bytes(b"a walk")
    (tmp_path / "fox.png").write_bytes(b"a fox")
    own = {
        "video": str(tmp_path / "walk.mp4"), "strength": 0.5, "prompt_2": "snow, far away",
        "conditions": [{"frames": str(tmp_path / "fox.png"), "index": 8}],
    }  # fmt: skip
    kept = json.loads(json.dumps(file_identities(own)))
    assert str(tmp_path) not in json.dumps(kept)
    assert kept["video"]["file"] == "walk.mp4"
    assert (kept["strength"], kept["prompt_2"]) == (0.5, "snow, far away")
    monkeypatch.chdir(tmp_path)
    assert find_files("option", kept) == {
        **own, "video": "walk.mp4", "conditions": [{"frames": "fox.png", "index": 8}],
    }  # fmt: skip
    (tmp_path / "fox.png").write_bytes(b"another fox")
    with pytest.raises(InputError, match=r"fox\.png"):
        find_files("option", kept)


def test_a_record_of_the_first_schema_is_read_by_its_names(model: Path) -> None:
    """Fields of its plan had other names until schema 2."""
    record = record_of(model)
    plan = record["plan"]
    part = next(part for part in plan["components"] if part["name"] == "denoiser")
    part["precision"]["weight_dtype"] = "int8"
    repair = {"component": "denoiser", "module": "x", "to": "float32", "dtype": "float16"}
    part["repairs"] = [repair]
    now = request_from(record, {"model": str(model)})
    assert now.repairs is not None
    assert [each.module for each in now.repairs] == ["x"]
    earlier = {
        "repairs": "remedies", "fast_paths": "paths", "block_offload": "offload",
        "from_disk": "streams", "model_offload": "by_turns", "num_weight_shards": "holders",
    }  # fmt: skip
    old = [
        {earlier.get(name, name): value for name, value in each.items()}
        for each in plan["components"]
    ]
    for each in old:
        each["precision"]["weights"] = each["precision"].pop("weight_dtype")
    first = {**record, "schema": "everyframe.record/1", "plan": {**plan, "components": old}}
    assert request_from(record_in(first), {"model": str(model)}) == now
