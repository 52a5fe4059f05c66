"""`extend` in the pipelines that continue a clip: one name, and the frames that diffusers makes."""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.pipelines.ltx.pipeline_ltx_condition import LTXVideoCondition
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition
from PIL import Image

import everyframe
from everyframe.core.errors import InputError
from everyframe.core.events import Event, Step
from everyframe.core.plan import Settings
from everyframe.core.request import Request
from everyframe.diffusers_pipelines.inputs.clip_continuation import CONTINUATIONS, continuation_of
from everyframe.diffusers_pipelines.inputs.defaults import PipelineDefaults
from everyframe.diffusers_pipelines.inputs.options import PipelineOptions
from everyframe.diffusers_pipelines.inputs.settings import resolve_settings
from everyframe.diffusers_pipelines.inputs.signature import (
    VIDEO_RESULT,
    of_blocks,
    of_class,
    of_pipeline,
)
from helpers.slow_rows import slow_unless
from helpers.tiny_checkpoints.diffusers import CASES

Frames = np.ndarray[Any, Any]
PROMPT, SEED, STEPS = "a fox runs on", 3, 2

#: Parameters that take a video, or something with one in it.
_TAKES_VIDEO = re.compile(
    r"(\w+_)?(video|videos|conditions|references|controls|conditioning_frames)"
)
#: Classes that have one and continue nothing: what they do with it.
NOT_CONTINUED = {
    "AnimateDiffControlNetPipeline": "control signal",
    "AnimateDiffSparseControlNetPipeline": "keyframes as control signal",
    "AnimateDiffVideoToVideoControlNetPipeline": "repaints",
    "AnimateDiffVideoToVideoPipeline": "repaints",
    "CogVideoXFunControlPipeline": "control signal",
    "CogVideoXVideoToVideoPipeline": "repaints",
    "Cosmos2_5_TransferPipeline": "control signal",
    "EasyAnimateControlPipeline": "control signal",
    "EasyAnimateInpaintPipeline": "repaints what a mask says",
    "Kandinsky6SRPipeline": "enlarges",
    "LTX2DFRTemporalRefinePipeline": "refines latents that another call left",
    "LTX2HDRPipeline": "a reference beside the video",
    "LTX2LatentUpsamplePipeline": "enlarges",
    "LTXLatentUpsamplePipeline": "enlarges",
    "LucyEditPipeline": "repaints",
    "MiniMaxH3ModularPipeline": "a reference beside the video",
    "VideoToVideoSDPipeline": "repaints",
    "Wan22VaceModularPipeline": "repaints what a mask says",
    "WanAnimate2DistilledModularPipeline": "control signal",
    "WanAnimate2ModularPipeline": "control signal",
    "WanAnimatePipeline": "control signal",
    "WanVACEPipeline": "repaints what a mask says",
    "WanVideoToVideoPipeline": "repaints",
}


def _interface(name: str) -> Any:
    cls = getattr(diffusers, name)
    return of_blocks(name, cls().blocks, {}) if name.endswith("ModularPipeline") else of_class(cls)


@pytest.mark.slow
def test_no_pipeline_that_continues_a_clip_is_forgotten() -> None:
    seen = set()
    for name in dir(diffusers):
        is_pipeline = name.endswith("Pipeline") and name not in ("ModularPipeline",)
        if not is_pipeline or not inspect.isclass(getattr(diffusers, name)):
            continue
        interface = _interface(name)
        if interface.makes_video and any(map(_TAKES_VIDEO.fullmatch, interface.parameters)):
            seen.add(name)
    assert seen == {*CONTINUATIONS, *NOT_CONTINUED}
    assert not {*CONTINUATIONS} & {*NOT_CONTINUED}


@pytest.mark.parametrize(
    "name", [name for name in CONTINUATIONS if not name.endswith("ModularPipeline")]
)
def test_its_call_has_the_parameters_of_the_table(name: str) -> None:
    _check_parameters(name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in CONTINUATIONS if name.endswith("ModularPipeline")]
)
def test_its_blocks_have_the_parameters_of_the_table(name: str) -> None:
    _check_parameters(name)


def _check_parameters(name: str) -> None:
    interface = _interface(name)
    taken = continuation_of(interface)
    assert taken is not None
    assert {taken.parameter, *taken.beside} <= {*interface.parameters}
    assert interface.name_of("num_frames")
    record = interface.parameters[taken.parameter].record
    assert bool(taken.clip_field) == (record is not None)
    if record is not None:
        record(**{taken.clip_field: []}, **taken.fields)


def _pictures(clip: Frames) -> list[Image.Image]:
    return [Image.fromarray(frame) for frame in clip]


def _tensor(clip: Frames) -> torch.Tensor:
    return torch.from_numpy(clip / np.float32(255)).permute(0, 3, 1, 2)[None]


#: Each class' own call with a clip, as diffusers' documentation has it; not by our table.
THEIRS: dict[str, Callable[[Frames], dict[str, Any]]] = {
    "AnyFlowFARPipeline": lambda clip: {"video": _tensor(clip)},
    "AnyFlowPipeline": lambda clip: {"video": _tensor(clip)},
    "LTX2ConditionPipeline": lambda clip: {"conditions": LTX2VideoCondition(_pictures(clip))},
    "LTX2DFRPipeline": lambda clip: {"conditions": LTX2VideoCondition(_pictures(clip))},
    "LTX2InContextPipeline": lambda clip: {"conditions": LTX2VideoCondition(_pictures(clip))},
    "LTX2ModularPipeline": lambda clip: {"conditions": LTX2VideoCondition(_pictures(clip))},
    "LTXConditionPipeline": lambda clip: {"conditions": LTXVideoCondition(video=_pictures(clip))},
    **dict.fromkeys(
        ("Cosmos3OmniModularPipeline", "Cosmos3OmniPipeline"),
        lambda clip: {"video": _pictures(clip), "condition_video_keep": "last"},
    ),
    **dict.fromkeys(
        (
            "Cosmos2VideoToWorldPipeline", "Cosmos2_5_PredictBasePipeline",
            "CosmosVideoToWorldPipeline", "HeliosModularPipeline", "HeliosPipeline",
            "HeliosPyramidModularPipeline", "HeliosPyramidPipeline",
            "SkyReelsV2DiffusionForcingVideoToVideoPipeline",
        ),
        lambda clip: {"video": _pictures(clip)},
    ),
}  # fmt: skip
#: No tiny checkpoint was made of the first two; that of LTX-2.5 has no encoder for a clip.
UNTRIED = {
    "Cosmos3DistilledModularPipeline", "HeliosPyramidDistilledModularPipeline",
    "LTX25ModularPipeline",
}  # fmt: skip
#: Quick enough for each run of the tests.
QUICK = ("AnyFlowPipeline", "Cosmos3OmniPipeline", "LTXConditionPipeline")


def test_every_class_of_the_table_is_run() -> None:
    assert {*THEIRS} == {*CONTINUATIONS} - UNTRIED
    assert {*THEIRS} <= {*CASES}


def _clip(name: str) -> Frames:
    """Noise of another size than the video's, and of a length that fits no autoencoder."""
    num_frames = 5 if name == "AnyFlowFARPipeline" else 14  # the former refuses other lengths
    return np.random.default_rng(5).integers(0, 256, (num_frames, 24, 40, 3), np.uint8)


def _asked(name: str) -> dict[str, Any]:
    given = {
        key: value
        for key, value in CASES[name].asked.items()
        if key not in ("image", "num_frames", "option") and value is not None
    }
    taken = ("video", "conditions", "reference_conditions")
    own = {k: v for k, v in CASES[name].asked.get("option", {}).items() if k not in taken}
    frames = 9 if name == "AnyFlowFARPipeline" else 17
    steps = (
        {}
        if CASES[name].asked.get("num_inference_steps", 1) is None
        else {"num_inference_steps": STEPS}
    )
    return {"prompt": PROMPT, **steps, **given, "num_frames": frames, "option": own}


def _theirs(pipe: Any, name: str, **clip: Any) -> Frames:
    call = _asked(name)
    width, height = map(int, call.pop("size").split("x"))
    call |= {**call.pop("option"), "height": height, "width": width, **clip}
    call["generator"] = torch.Generator().manual_seed(SEED)
    parameters = of_pipeline(pipe).parameters
    if "seed" in parameters:
        call["seed"] = SEED
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(SEED)
    if hasattr(pipe, "blocks"):
        found = pipe(**call, output_type="np", output=[VIDEO_RESULT])[VIDEO_RESULT]
    else:
        result = pipe(**call, output_type="np")
        found = result.frames if hasattr(result, "frames") else result.video
    frames = np.asarray(found)
    return frames[0] if frames.ndim == 5 else frames


def _ours(pipe: Any, name: str, **more: Any) -> Any:
    asked = _asked(name)
    option = {**asked.pop("option"), **more.pop("option", {})}
    return everyframe.run(pipe, seed=SEED, output="float", option=option, **asked, **more)


def _pipe(name: str) -> Any:
    pipe = CASES[name].build()
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.parametrize("name", slow_unless(QUICK, THEIRS))
def test_it_gives_what_diffusers_makes_of_the_same_clip(name: str) -> None:
    clip = _clip(name)
    with CASES[name].within():
        pipe = _pipe(name)
        wanted = _theirs(pipe, name, **THEIRS[name](clip))
        found = _ours(pipe, name, extend=clip)
        assert found.frames.shape == wanted.shape
        assert np.array_equal(found.frames, wanted), np.abs(found.frames - wanted).max()
        # Its end is what is continued: another last-but-one frame gives another video.
        other = clip.copy()
        other[-3] = 255 - other[-3]
        assert not np.array_equal(_ours(pipe, name, extend=other).frames, wanted)


@pytest.mark.slow
def test_of_a_folder_it_loads_and_of_files(tmp_path: Path) -> None:
    name, clip = "LTXConditionPipeline", _clip("LTXConditionPipeline")
    pipe = _pipe(name)
    pipe.save_pretrained(tmp_path / "model")
    (tmp_path / "clip").mkdir()
    for number, frame in enumerate(clip):
        Image.fromarray(frame).save(tmp_path / "clip" / f"{number:05d}.png")
    wanted = _theirs(pipe, name, **THEIRS[name](clip))
    asked = {
        **_asked(name), "model": str(tmp_path / "model"), "seed": SEED, "dtype": "fp32",
        "output": "float",
    }  # fmt: skip
    video = everyframe.generate(**asked, extend=str(tmp_path / "clip"))
    assert isinstance(video, everyframe.Video)
    assert np.abs(video.frames - wanted).max() <= 1e-4
    recorded = video.record["request"]["extend"]
    assert recorded["file"] == "clip"
    assert len(recorded["sha256"]) == 64
    # As source it is the parameter of that name: a list of videos, of which this is one.
    as_source = everyframe.generate(**asked, source=str(tmp_path / "clip"))
    assert np.array_equal(as_source.frames, video.frames)


class _EnoughError(Exception):
    pass


@pytest.mark.slow
def test_a_broken_run_goes_on_with_its_clip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERYFRAME_RUNS", str(tmp_path / "runs"))
    from everyframe.runs.folder import all_runs

    name, clip = "LTXConditionPipeline", _clip("LTXConditionPipeline")
    pipe = _pipe(name)

    def stop(event: Event) -> None:
        if isinstance(event, Step) and event.step == 1:
            raise _EnoughError

    with pytest.raises(_EnoughError):
        _ours(pipe, name, extend=clip, on_event=stop)
    (run,) = all_runs()
    resumed = everyframe.resume(run.name, pipe=pipe, output="float")
    assert np.array_equal(resumed.frames, _ours(pipe, name, extend=clip).frames)


def test_other_forms_of_a_clip() -> None:
    name = "LTXConditionPipeline"
    pipe, clip = _pipe(name), _clip(name)
    wanted = _ours(pipe, name, extend=clip).frames
    for form in (_pictures(clip), everyframe.Video(clip, 24)):
        assert np.array_equal(_ours(pipe, name, extend=form).frames, wanted)
    floats = clip / np.float32(255)  # resized by another function of diffusers
    theirs = _theirs(pipe, name, conditions=LTXVideoCondition(video=floats))
    assert np.array_equal(_ours(pipe, name, extend=floats).frames, theirs)
    fitted = _ours(pipe, name, extend=clip, fit="crop").frames
    assert not np.array_equal(fitted, wanted)


def _resolved(name: str, **given: Any) -> tuple[Settings, tuple[str, ...]]:
    own = {key: given.pop(key) for key in ("option", "source") if key in given}
    sizes = PipelineDefaults(
        of_class(getattr(diffusers, name)),
        {"transformer": {}, "vae": {"scale_factor_spatial": 8, "scale_factor_temporal": 4}},
    )
    request = Request(**{"prompt": PROMPT, **given})
    return resolve_settings(sizes, "it", request, PipelineOptions(**own), 5)


CLIP = np.zeros((14, 8, 8, 3), np.uint8)


def test_the_plan_says_what_becomes_of_the_clip() -> None:
    settings, notes = _resolved("CosmosVideoToWorldPipeline", extend=CLIP, num_frames=41)
    assert settings.given_frames == ("extend",)
    assert settings.given_forms == (("extend", ("array", (14, 8, 8, 3), "uint8")),)
    assert "the video begins with the 13 frames of extend; num_frames counts them" in notes
    assert any("of the 14 frames of extend the last 1 are made again: 4n + 1" in n for n in notes)
    _, notes = _resolved("SkyReelsV2DiffusionForcingVideoToVideoPipeline", extend=CLIP)
    assert any("begins with all frames of extend" in note for note in notes)
    assert any("it has overlap_history=17" in note for note in notes)
    own = {"overlap_history": 37}
    _, notes = _resolved("SkyReelsV2DiffusionForcingVideoToVideoPipeline", extend=CLIP, option=own)
    assert not any("it has overlap_history" in note for note in notes)
    assert any(
        "continues where extend ends" in n for n in _resolved("HeliosPipeline", extend=CLIP)[1]
    )


@pytest.mark.parametrize("clip", [CLIP, torch.zeros(14, 3, 8, 8)])
def test_a_clip_may_be_given_as_the_parameter_of_the_pipeline(clip: Any) -> None:
    """numpy's and torch's errors on the truth of an array came of it."""
    _resolved("SkyReelsV2DiffusionForcingVideoToVideoPipeline", option={"video": clip})


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("CosmosVideoToWorldPipeline", {"num_frames": 13}, "none is left to be made.* 37"),
        ("CosmosVideoToWorldPipeline", {"source": CLIP}, r"option video \(source\); give one"),
        ("LTXConditionPipeline", {"option": {"conditions": []}}, "option conditions; give one"),
        ("CosmosVideoToWorldPipeline", {"extend": 7}, "extend must be a path, an array of frames"),
        ("CosmosVideoToWorldPipeline", {"extend": CLIP[0]}, r"extend must be .* got \(8, 8, 3\)"),
        ("CosmosVideoToWorldPipeline", {"extend": CLIP[:0]}, "extend must be"),
        ("CosmosVideoToWorldPipeline", {"extend": "none.mp4"}, "none.mp4"),
        ("WanVideoToVideoPipeline", {}, "extend has no effect on it: give the video as source"),
        ("WanPipeline", {}, "extend has no effect on it: it can't continue a video"),
        ("SkyReelsV2DiffusionForcingVideoToVideoPipeline", {"extend": None}, "give one .extend"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_reported_in_one_line(
    name: str, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message) as refused:
        _resolved(name, **{"extend": CLIP, **given})
    assert "\n" not in str(refused.value)
