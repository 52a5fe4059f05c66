"""A record is data: what it asks is checked whole, and never grants what a person has to say."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import everyframe
from everyframe.cli.main import main
from everyframe.core.errors import InputError
from everyframe.core.options import facts_of
from everyframe.core.request import Request
from everyframe.engine.records.comparison import differences
from everyframe.engine.records.file_identity import file_identities, find_files
from everyframe.engine.records.provenance import make_record
from everyframe.engine.records.recorded_request import record_in, request_from
from everyframe.engine.tracing import model_of
from everyframe.families.registry import all_options
from everyframe.media.output_path import RECORD_SCHEMA
from everyframe.media.write import write


def record(**request: Any) -> dict[str, Any]:
    return {"schema": RECORD_SCHEMA, "request": {"prompt": "a red circle", "seed": 1, **request}}


def edited(edit: str) -> dict[str, Any]:
    """A record with one value changed: ``plan.num_threads=true``."""
    place, _, value = edit.partition("=")
    whole: Any = {
        **record(), "model": {"name": "shapes"}, "plan": {"components": [], "num_threads": 1},
        "settings": {"options": []}, "versions": {}, "repairs": [],
    }  # fmt: skip
    *above, last = place.split(".")
    inner = whole
    for name in above:
        inner = inner[name]
    inner[last] = json.loads(value)
    return dict(whole)


BROKEN = [
    "plan=[]", 'plan="x"', "model=[]", "versions=[]", "repairs=[1]", "plan.components=5",
    "plan.components=[1]", "settings=[]", 'settings={"options":5}', "plan.num_threads=true",
    "plan.num_threads=-1", 'plan.num_threads="3"', 'plan.components=[{"name":5}]',
    'plan.components=[{"name":"a","fast_paths":"b"}]',
    'plan.components=[{"name":"a","repairs":[5]}]',
    'plan.components=[{"name":"a","repairs":[{"no":"x"}]}]', 'settings.guidance_scale="g"',
    'settings.fps="f"', "settings.num_videos=[]", 'plan.device="cpu"', "model.sha256=5",
    'model.is_local="no"', "versions.torch=[]", "everyframe=1", "request=[]", "schema=5",
    'request.image={"file":5,"sha256":"00"}', 'request.image={"file":"a.png","sha256":"00"}',
    'request.image={"file":"..","sha256":"%s"}' % ("0" * 64), 'request.image="/etc/passwd"',
    "request.latents=[[1.0]]", "request.num_frames=true", "request.num_frames=100000000",
    'request.size="99999999x2"', "request.num_inference_steps=1e9", 'request.extend="clip.mp4"',
    'settings.num_frames=1%s' % ("0" * 400),
    'request.prompt=["a"]', "request.seed=-1", 'request.option={"video":"/etc/passwd"}',
    'request.option={"a":[{"frames":"/etc/passwd"}]}', 'request.mask="/etc/passwd"',
    'request.mask="canny,/etc/passwd"', 'request.no_such_option="x"',
]  # fmt: skip


@pytest.mark.parametrize("edit", BROKEN)
def test_a_broken_record_is_one_line_and_wrong_input(
    tmp_path: Path, edit: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "r.json"
    file.write_text(json.dumps(edited(edit)), encoding="utf-8")
    assert main(["generate", "--from", str(file), "--dry-run"]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("error: ")
    assert shown.err.count("\n") == 1
    assert "bug" not in shown.err
    assert main(["inspect", str(file)]) in (0, 2)
    assert "bug" not in capsys.readouterr().err


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_a_number_without_end_is_in_no_record(
    tmp_path: Path, number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither JSON has one, nor what `inspect --json` would print."""
    file = tmp_path / "r.json"
    file.write_text(json.dumps(record()).replace('"seed": 1', f'"seed": 1, "fps": {number}'))
    assert main(["inspect", str(file), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["type"] == "error"


@pytest.mark.parametrize("name", ["fps", "guidance_scale", "num_inference_steps", "num_frames"])
@pytest.mark.parametrize("value", ["null", "1e-320", "0"])
def test_whatever_a_record_can_hold_is_shown(tmp_path: Path, name: str, value: str) -> None:
    file = tmp_path / "r.json"
    file.write_text(json.dumps(edited(f"settings.{name}={value}")), encoding="utf-8")
    assert main(["inspect", str(file)]) in (0, 2)


def test_the_unbroken_record_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert request_from(edited("plan.num_threads=1"), {}).prompt == "a red circle"


#: What a stranger may write, by option; a person has to give each again.
ASKED: dict[str, Any] = {
    "trust_remote_code": True, "report": "/tmp/anywhere", "force": True, "forget_repairs": True,
    "preview": True, "preview_decoder": "/tmp/anywhere",
    "num_devices": 256, "devices": "cpu,cpu", "device": "cuda", "parallel": "cfg=2",
    "shares": "1,2", "shard_weights": True, "max_memory": "1GB", "max_host_memory": "1GB",
    "attention": "flash", "compile": True, "compiled": "/tmp/anywhere",
    "fast_paths": {"denoiser": ["compile"]},
    "quantized": {"denoiser": "fp8"}, "repairs": [{"component": "x"}],
    "method": {"name": "ab2", "num_computed": 2},
    "family_options": {"trust_remote_code": True, "vae": "/etc"},
}  # fmt: skip


@pytest.mark.parametrize("name", ASKED)
def test_what_a_person_has_to_say_is_not_taken_and_reported(name: str) -> None:
    asked = request_from(record(**{name: ASKED[name]}), {})
    plain = request_from(record(), {})
    assert asked == plain
    assert asked.family_options == {}
    other = {**record(), "model": {"sha256": "0"}, "everyframe": "", "versions": {},
             "plan": {"device": {"name": "cpu"}, "num_threads": 1, "components": []}}  # fmt: skip
    found = differences(record(**{name: ASKED[name]}), other)
    lines = [each for each in found if f"its {name}=" in each]
    assert len(lines) == 1
    assert "is not taken from a record; give it again: --" in lines[0]


def test_every_option_of_the_machine_was_thought_of() -> None:
    """One that is added later is taken from records only if it is put on this list."""
    harmless = {"dtype", "quantize", "disable"}
    of_machine = {
        name for name in Request.model_fields if facts_of(Request, name)["group"] == "Machine"
    }
    marked = {
        name
        for options in (Request, *all_options().values())
        for name in options.model_fields
        if facts_of(options, name).get("person_only")
    }
    assert of_machine - harmless <= marked
    assert marked == set(ASKED)


def test_what_a_person_says_counts() -> None:
    asked = request_from(
        record(trust_remote_code=False, num_devices=2), {"trust_remote_code": True, "force": True}
    )
    assert asked.family_options == {"trust_remote_code": True}
    assert (asked.force, asked.num_devices) == (True, None)


@pytest.mark.parametrize("name", ["model", "vae", "text_encoder", "base", "controlnet"])
@pytest.mark.parametrize("value", ["stranger/model", "here", "/etc", "../here", ["a"], 5])
def test_models_are_named_by_the_person(
    name: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    with pytest.raises(InputError, match=rf"so name it: --{name.replace('_', '-')} FOLDER"):
        request_from(record(**{name: value}), {})
    given = request_from(record(**{name: value}), {name: "mine"})
    assert given.given() | given.family_options != {}


@pytest.mark.parametrize(
    ("name", "value"),
    [("model", "shapes"), ("model", "opensora-1.2"), ("model", "hpcai-tech/OpenSora-STDiT-v3"),
     ("controlnet", "canny"), ("vae", "hpcai-tech/OpenSora-VAE-v1.2")],
)  # fmt: skip
def test_models_of_our_own_tables_are_taken(name: str, value: str) -> None:
    asked = request_from(record(**{name: value}), {})
    assert {**asked.given(), **asked.family_options}[name] == value


@pytest.mark.parametrize(
    "options",
    [{"option": "image={}"}, {"option": ["fps=8", "image={}"]}, {"option": ['shot=[1, "{}"]']},
     {"option": {"image": "{}"}}, {"source": "{}"}, {"mask": "{}"}, {"control": "canny,{}"}],
)  # fmt: skip
@pytest.mark.parametrize("place", ["{home}/cat.png", "~/cat.png"])
def test_a_file_is_named_by_no_path_whatever_its_form(
    options: dict[str, Any], place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A family takes texts as a command line has them, and `~` too."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "cat.png").write_bytes(b"")
    path = place.format(home=tmp_path)
    asked = json.loads(json.dumps(options).replace("{}", path))
    with pytest.raises(InputError, match=r"names .* by its path for"):
        request_from(record(**asked), {})


def test_code_does_not_run_for_a_video(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way: a video that says that its model's code is trusted, and where that lies."""
    folder = tmp_path / "codemodel"
    folder.mkdir()
    (folder / "mypipe.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n", encoding="utf-8")
    index = {"_class_name": ["mypipe", "Pipe"], "_diffusers_version": "0.42.0"}
    (folder / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    frames = np.zeros((2, 16, 16, 3), np.uint8)
    asked = record(model=str(folder), trust_remote_code=True, size="16x16", num_frames=2)
    monkeypatch.chdir(tmp_path)
    for kind in ("mp4", "gif", "webp", "png"):
        file = write(tmp_path / f"evil.{kind}", [frames[:1] if kind == "png" else frames], 8, asked)
        assert main(["generate", "--from", str(file)]) == 2
        assert main(["generate", "--from", str(file), "--model", str(folder)]) == 2
        with pytest.raises(InputError, match="so name it: --model"):
            everyframe.generate(from_record=file)
        with pytest.raises(everyframe.EveryframeError, match="trust-remote-code"):
            everyframe.generate(from_record=file, model=str(folder))
    about = {"record": json.dumps(asked)}
    with pytest.raises(InputError, match="so name it: --model"):
        model_of(about)("unet")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("text", ["{", "[]", "5", '{"schema": "x"}'])
def test_the_record_of_a_trace_is_data_too(text: str) -> None:
    with pytest.raises(InputError):
        model_of({"record": text})("unet")


@pytest.mark.parametrize("given", [5, ["a"], object()])
def test_what_holds_no_record(given: Any) -> None:
    with pytest.raises(InputError, match="from_record must be a video, its file, or a record"):
        record_in(given)


def test_a_video_that_was_made_is_its_record() -> None:
    frames = np.zeros((1, 16, 16, 3), np.uint8)
    assert record_in(everyframe.Video(frames, 8, {"a": 1})) == {"a": 1}


def test_words_are_words_whatever_lies_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long ones too, which are no name that a file can have."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "winter").write_bytes(b"a file")
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save("fox.png")
    long = "a fox runs through the snow, cinematic light, " * 8
    own = {"prompt_2": "winter", "prompt_3": long, "style": long, "video": "fox.png"}
    kept = json.loads(json.dumps(file_identities(own)))
    assert kept["prompt_2"] == "winter"
    assert (kept["prompt_3"], kept["style"]) == (long, long)
    assert kept["video"]["file"] == "fox.png"
    again = request_from(record(option=kept), {})
    assert again.family_options["option"] == own
    assert find_files("option", kept) == own
    options = {"pos_magic": long, "camera_motion": "winter"}
    request = everyframe.Request(prompt="a red circle", negative_prompt=long, seed=1, **options)
    made = make_record(everyframe.plan("a red circle", size="16x16", seed=1), request, [])
    assert made["request"]["pos_magic"] == long
    assert made["request"]["camera_motion"] == "winter"


def test_a_given_file_is_hashed_in_pieces(tmp_path: Path) -> None:
    file = tmp_path / "long.mp4"
    content = bytes(range(256)) * 40_000
    file.write_bytes(content)
    assert file_identities(str(file)) == {
        "file": "long.mp4", "sha256": hashlib.sha256(content).hexdigest(),
    }  # fmt: skip
