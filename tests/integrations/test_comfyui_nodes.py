"""The node pack's nodes on the stand-in for ComfyUI, with made-up frames."""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from everyframe.core import option_values
from everyframe.core.errors import RunStoppedError, WorkerDiedError
from everyframe.core.events import AudioDecoded, Events, FramesDecoded, Preview
from everyframe.core.options import facts_of
from everyframe.core.request import Request
from everyframe.engine.records.recorded_request import record_in
from everyframe.engine.workers.stop_switch import StopSwitch
from everyframe.engine.workers.worker_process import WorkerJob
from everyframe.engine.workers.worker_start import IN_PROCESS
from everyframe.media.preview_picture import encode_preview
from everyframe.media.video import Video
from everyframe.runs.folder import list_runs, runs_folder
from everyframe.runtime.previews.latent_previews import scale_frame
from everyframe.server.requests.client_options import option_owners
from helpers import comfyui_stand_in as stand_in
from helpers.fake_engine import plan_of
from helpers.fake_executor import FakeExecutor, frames_of

PROMPT = "a red circle moves to the right"


class PreviewingExecutor(FakeExecutor):
    """The made-up executor with a preview after each step, and sound.

    `asked` are the requests; the run folder holds plain data alone, so it gets prompt and seed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Request] = []

    def run(self, job: WorkerJob, place: Any = None, stop: StopSwitch | None = None) -> Events:
        assert job.request is not None
        self.asked.append(job.request)
        plain = Request(prompt=job.request.prompt, seed=job.request.seed)
        for event in super().run(replace(job, request=plain), place, stop):
            if isinstance(event, FramesDecoded):
                yield AudioDecoded(event.seed, 8000, 0.5, np.zeros((1, 4000), np.float32))
                event = replace(event, frames=event.frames.astype(np.float32) / 255)
            yield event
            if event.type == "step":
                frame = scale_frame(torch.from_numpy(frames_of(3)[0])).numpy()
                picture, (height, width) = encode_preview(frame), frame.shape[:2]
                yield Preview(event.seed, event.step, event.num_steps, width, height, picture)


@pytest.fixture
def executor(pack: Any, monkeypatch: pytest.MonkeyPatch) -> PreviewingExecutor:
    monkeypatch.delenv(IN_PROCESS, raising=False)
    made = PreviewingExecutor()
    pack.local_run.WORKERS._executor = made
    return made


def _inputs(pack: Any, **given: Any) -> dict[str, Any]:
    """The values of a new node's inputs, as the page has them."""
    inputs = pack.nodes["EveryframeGenerate"].define_schema().inputs
    values = {each.id: each.default for each in inputs if hasattr(each, "default")}
    return {**values, "prompt": PROMPT, "seed": 3, **given}


def _interrupt_soon(seconds: float = 0.3) -> None:
    threading.Timer(seconds, lambda: setattr(stand_in.Interrupt, "is_set", True)).start()


def test_generate_gives_frames_audio_video_and_record(pack: Any, executor: Any) -> None:
    node = pack.nodes["EveryframeGenerate"]
    frames, audio, fps, video, record = node.execute(**_inputs(pack)).args
    assert frames.dtype == torch.float32
    assert torch.equal(frames, torch.from_numpy(frames_of(3).astype(np.float32) / 255))
    assert audio["waveform"].shape == (1, 1, 4000)
    assert audio["sample_rate"] == 8000
    read = Video.load(video.file)
    assert (float(read.fps), read.frames.shape) == (fps, frames_of(3).shape)
    assert json.loads(record)["request"] == record_in(video.file)["request"]
    assert stand_in.Interrupt.num_unloads == 1


def test_progress_never_falls_and_shows_previews(pack: Any, executor: Any) -> None:
    pack.nodes["EveryframeGenerate"].execute(**_inputs(pack))
    values = [value for value, _, _ in stand_in.ProgressBar.shown]
    assert values == sorted(values)
    assert values[-1] == 100
    assert {total for _, total, _ in stand_in.ProgressBar.shown} == {100}
    previews = [preview for *_, preview in stand_in.ProgressBar.shown if preview]
    assert len(previews) == 6  # one after each step
    kind, picture, side = previews[0]
    assert (kind, picture.size, side) == ("JPEG", (256, 256), 512)


def test_only_inputs_that_are_set_become_options(pack: Any, executor: Any) -> None:
    pack.nodes["EveryframeGenerate"].execute(**_inputs(pack))
    request = executor.asked[-1]
    assert request.given() == {"prompt": PROMPT, "seed": 3, "preview": True}
    given = {
        "negative": "dark", "width": 64, "height": 32, "frames": 4, "fps": 8.0, "steps": 5,
        "guidance": 0.0,
    }  # fmt: skip
    image = torch.full((2, 4, 4, 4), 0.5)
    inputs = _inputs(pack, **given, image=image, options='{"quality": "32dB"}')
    pack.nodes["EveryframeGenerate"].execute(**inputs)
    asked = executor.asked[-1]
    assert (asked.negative_prompt, asked.width, asked.height, asked.num_frames) == (
        "dark", 64, 32, 4,
    )  # fmt: skip
    assert (asked.fps, asked.num_inference_steps, asked.guidance_scale) == (8.0, 5, 0.0)
    assert asked.quality == "32dB"
    assert (asked.image == np.full((4, 4, 3), 128, np.uint8)).all()


def test_extend_takes_a_video_or_frames(pack: Any, executor: Any, tmp_path: Path) -> None:
    node = pack.nodes["EveryframeGenerate"]
    frames = torch.from_numpy(frames_of(5)) / 255
    node.execute(**_inputs(pack, extend=frames, fps=8.0))
    video = Video.load(executor.asked[-1].extend)
    assert (video.num_frames, float(video.fps)) == (4, 8.0)
    node.execute(**_inputs(pack, extend=stand_in.VideoFromFile(executor.asked[-1].extend)))
    assert Video.load(executor.asked[-1].extend).num_frames == 4


def test_interrupt_stops_within_two_seconds_and_leaves_no_run(pack: Any, executor: Any) -> None:
    executor.pause = 30.0
    before = [each.run for each in list_runs(runs_folder())]
    _interrupt_soon()
    began = time.monotonic()
    with pytest.raises(stand_in.InterruptProcessingException):
        pack.nodes["EveryframeGenerate"].execute(**_inputs(pack))
    assert time.monotonic() - began < 2
    executor.pause = 0.0
    # The next job waits for the end of this one.
    pack.nodes["EveryframeGenerate"].execute(**_inputs(pack, seed=4))
    assert [seed for seed, _ in executor.steps] == [4] * 5
    assert [each.run for each in list_runs(runs_folder())] == before


def test_crash_is_its_message_and_the_next_video_is_made(pack: Any, executor: Any) -> None:
    executor.failures = [(2, WorkerDiedError("killed by SIGSEGV in step 3; resume RUN goes on"))]
    with pytest.raises(WorkerDiedError, match="resume RUN goes on"):
        pack.nodes["EveryframeGenerate"].execute(**_inputs(pack))
    pack.nodes["EveryframeGenerate"].execute(**_inputs(pack))


def test_model_is_unloaded_where_it_is_not_kept(pack: Any, executor: Any) -> None:
    workers = pack.local_run.WORKERS
    pack.nodes["EveryframeGenerate"].execute(**_inputs(pack, keep_loaded=True))
    assert workers._executor is executor
    pack.nodes["EveryframeGenerate"].execute(**_inputs(pack, keep_loaded=False))
    assert workers._executor is None


def test_wrong_option_is_refused_before_models_are_unloaded(pack: Any, executor: Any) -> None:
    with pytest.raises(ValueError, match="guidance_scale"):
        pack.nodes["EveryframeGenerate"].execute(**_inputs(pack, guidance=-0.5))
    assert stand_in.Interrupt.num_unloads == 0


def test_missing_everyframe_says_what_to_install(
    pack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "everyframe.engine.workers.worker_start", None)
    with pytest.raises(RuntimeError, match="pip install everyframe, or connect an Everyframe"):
        pack.nodes["EveryframeGenerate"].execute(**_inputs(pack))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("{", "options must be a JSON object"),
        ("[1]", r"options must be a JSON object .*, got \[1\]"),
        ('{"seed": 3}', "use the node's input seed"),
        ('{"num_frames": 3}', "use the node's input frames"),
        ('{"trust_remote_code": true}', "workflows come from others"),
        ('{"family_options": {"trust_remote_code": true}}', "set in Python alone"),
        ('{"qualty": "32dB"}', "did you mean 'quality'"),
        ('{"edit_strength": 3}', "edit_strength"),
    ],
)
@pytest.mark.parametrize("name", ["EveryframeGenerate", "EveryframePlan"])
def test_options_are_checked_before_the_queue(
    pack: Any, name: str, options: str, text: str
) -> None:
    import re

    answer = pack.nodes[name].validate_inputs(options)
    assert isinstance(answer, str)
    assert re.search(text, answer)


def test_a_workflow_sets_nothing_that_python_alone_sets(pack: Any) -> None:
    """Neither where the page checks it nor where another node gives it."""
    names = [
        name for name, owner in option_owners().items() if facts_of(owner, name)["python_only"]
    ]
    assert "family_options" in names
    names += [old for old, name in option_values._RENAMED.items() if name in names]
    assert "paths" in names
    node = pack.nodes["EveryframeGenerate"]
    for name in (*names, "trust_remote_code"):
        options = json.dumps({name: {}})
        assert "options can't hold" in str(node.validate_inputs(options))
        with pytest.raises(ValueError, match=f"options can't hold {name}"):
            node.execute(**_inputs(pack, options=options))


@pytest.mark.parametrize("options", ["", None, '{"quality": "32dB", "aesthetic": 6.5}'])
def test_right_options_pass(pack: Any, options: str | None) -> None:
    assert pack.nodes["EveryframeGenerate"].validate_inputs(options) is True


def test_validation_names_one_input(pack: Any) -> None:
    """ComfyUI repeats the text for each input that is named, and checks no range of it."""
    import inspect

    for node in pack.nodes.values():
        if hasattr(node, "validate_inputs"):
            assert len(inspect.signature(node.validate_inputs).parameters) == 1


def test_loras_chain(pack: Any, executor: Any, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "loras"
    folder.mkdir(parents=True)
    (folder / "a.safetensors").touch()
    node = pack.nodes["EveryframeLora"]
    assert node.define_schema().inputs[0].options == ["(other_name)", "a.safetensors"]
    (first,) = node.execute("a.safetensors", 0.5).args
    (both,) = node.execute("(other_name)", 1.0, "transformer_2", "style", first).args
    own = pack.nodes["EveryframeGenerate"]
    own.execute(**_inputs(pack, loras=first))
    (lora,) = executor.asked[-1].loras
    assert (lora.file, lora.strength) == (str(folder / "a.safetensors"), 0.5)
    with pytest.raises(ValueError, match="'style' is named for a server"):
        own.execute(**_inputs(pack, loras=both))
    (folder / "a.safetensors").unlink()
    with pytest.raises(ValueError, match="not in ComfyUI's folder models/loras any more"):
        own.execute(**_inputs(pack, loras=first))
    for name, other in (("(other_name)", ""), ("a.safetensors", "b")):
        with pytest.raises(ValueError, match="choose a name of the list"):
            node.execute(name, 1.0, "", other)


def test_plan_is_text(pack: Any, executor: Any) -> None:
    values = _inputs(pack)
    del values["keep_loaded"]
    result = pack.nodes["EveryframePlan"].execute(**values)
    assert "denoise" in result.args[0]
    assert result.ui == {"text": (result.args[0],)}
    with pytest.raises(ValueError, match="prompt must be good"):
        pack.nodes["EveryframePlan"].execute(**{**values, "prompt": "bad"})


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A video with a record, in ComfyUI's input folder."""
    request = Request(prompt=PROMPT, seed=3, model="shapes")
    settings = plan_of(request).to_json()["settings"]
    record = {"request": {"model": "shapes"}, "settings": settings}
    path = tmp_path / "input" / "made.mp4"
    Video(frames_of(3), settings["fps"], record).save(path, sidecar=False)
    return path


def test_load_record_gives_the_values_of_generate(pack: Any, recorded: Path) -> None:
    node = pack.nodes["EveryframeLoadRecord"]
    schema = node.define_schema()
    assert schema.inputs[0].options == ["made.mp4"]
    record, *values = node.execute("made.mp4").args
    assert json.loads(record) == record_in(recorded)
    named = dict(zip([each.display_name for each in schema.outputs[1:]], values, strict=True))
    settings = json.loads(record)["settings"]
    assert named["prompt"] == settings["prompt"]
    assert (named["width"], named["frames"], named["seed"]) == (
        settings["width"], settings["num_frames"], settings["seed"],
    )  # fmt: skip
    types = {each.display_name: each.io_type for each in schema.outputs}
    wanted = {each.id: each.io_type for each in
              pack.nodes["EveryframeGenerate"].define_schema().inputs}  # fmt: skip
    assert {name: wanted[name] for name in named} == {name: types[name] for name in named}


def test_a_playlist_has_no_record(pack: Any, recorded: Path) -> None:
    """It would be that of the file that it names."""
    (recorded.parent / "list.mp4").write_text("ffconcat version 1.0\nfile made.mp4\n", "utf-8")
    with pytest.raises(ValueError, match=r"list.mp4 can't be read as a video"):
        pack.nodes["EveryframeLoadRecord"].execute("list.mp4")


def test_video_of_others_has_no_record(pack: Any, tmp_path: Path) -> None:
    node = pack.nodes["EveryframeLoadRecord"]
    Video(frames_of(3), 8).save(tmp_path / "input" / "other.mp4", sidecar=False)
    (tmp_path / "input" / "none.mp4").write_bytes(b"none")
    with pytest.raises(ValueError, match=r"other.mp4 holds no record of Everyframe; give a video"):
        node.execute("other.mp4")
    with pytest.raises(ValueError, match=r"none.mp4 can't be read as a video"):
        node.execute("none.mp4")
    broken = {"request": 3, "settings": "x"}
    Video(frames_of(3), 8, broken).save(tmp_path / "input" / "broken.mp4", sidecar=False)
    with pytest.raises(ValueError, match=r"broken.mp4 holds no record of Everyframe"):
        node.execute("broken.mp4")
    assert node.validate_inputs("other.mp4") is True
    assert "is not there" in node.validate_inputs("missing.mp4")


def test_stopped_job_that_waits_does_not_begin(pack: Any, executor: Any) -> None:
    job = pack.local_run.LocalRun({"prompt": PROMPT}, stays_loaded=True)
    job.stop()
    with pytest.raises(RunStoppedError):
        job.run(lambda progress: None)
    assert executor.asked == []


def test_ids_of_a_node_are_unique(pack: Any) -> None:
    """ComfyUI compares the ids of inputs and outputs."""
    for node in pack.nodes.values():
        schema = node.define_schema()
        ids = [each.id for each in [*schema.inputs, *schema.outputs] if each.id is not None]
        assert len({*ids}) == len(ids)
