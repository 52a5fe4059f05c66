"""What a pipeline in memory is given is passed on as it is: frames are diffusers' own, bit for bit.

The same keywords go to ``pipe(...)`` and to ``everyframe.run(pipe, ...)``. Attention is torch's own
in both, so no rounding is allowed for.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

import everyframe
from everyframe.cli.main import main
from everyframe.core.errors import EveryframeError, InputError
from everyframe.core.events import Event, Note, Step
from everyframe.diffusers_pipelines.inputs.image_forms import form_of, num_frames_of, sides_of
from everyframe.diffusers_pipelines.inputs.signature import OWN_SEED, of_class, of_pipeline
from everyframe.media.pixels import to_uint8
from everyframe.media.read import read_image
from everyframe.ops.attention import PLAIN, by_kernel
from helpers.slow_rows import slow_unless
from helpers.tiny_checkpoints import svd as tiny_svd
from helpers.tiny_checkpoints.diffusers import CASES
from helpers.tiny_checkpoints.diffusers.cases import PROMPT, SEED, STEPS, as_python
from helpers.tiny_checkpoints.pipeline_components import cogvideox_parts
from helpers.tiny_checkpoints.pipelines import loaded

PICTURED = [name for name, each in CASES.items() if "image" in each.asked and each.class_name]
#: One that encodes the picture twice.
FAST = ("WanImageToVideoPipeline",)

#: What diffusers raises for pictures that it can't take; Wan-Animate divides by a side of 0.
REFUSALS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)

_made: dict[str, Any] = {}


def pipeline(name: str) -> Any:
    """A tiny one, made once."""
    if name not in _made:
        _made[name] = CASES[name].build()
    return _made[name]


def call_of(name: str) -> dict[str, Any]:
    """What a tiny one is called with, by diffusers' own names; its picture is left out."""
    asked = {"prompt": PROMPT, "num_inference_steps": STEPS, **CASES[name].asked}
    width, height = map(int, asked.pop("size", "16x16").split("x"))
    taken = of_pipeline(pipeline(name)).parameters
    call = as_python(asked.pop("option", {}), height, width)
    call |= {key: value for key, value in asked.items() if key in taken and key != "image"}
    return call | ({"height": height, "width": width} if "height" in taken else {})


def theirs(pipe: Any, call: dict[str, Any]) -> np.ndarray[Any, Any]:
    """diffusers' frames."""
    # By its own seed where it has one, as here: each of its windows is then seeded apart.
    has_seed = OWN_SEED in of_pipeline(pipe).parameters
    seed = {OWN_SEED: SEED} if has_seed else {"generator": torch.Generator().manual_seed(SEED)}
    seeded = {**call, **seed}
    if hasattr(pipe, "blocks"):
        found = pipe(**seeded, output_type="np", output=["videos"])["videos"]
    else:
        found = pipe(**seeded, output_type="np")
        found = found.frames if hasattr(found, "frames") else found.video
    frames = np.asarray(found)
    return frames[0] if frames.ndim == 5 else frames


def ours(pipe: Any, call: dict[str, Any], events: list[Event] | None = None) -> Any:
    """The frames of the same call here."""
    seen = [] if events is None else events
    renamed = {{"cond_image": "image"}.get(name, name): value for name, value in call.items()}
    video = everyframe.run(pipe, seed=SEED, output="float", on_event=seen.append, **renamed)
    assert isinstance(video, everyframe.Video)
    return video.frames


def picture(height: int, width: int, mode: str = "RGB") -> Image.Image:
    """Noise."""
    noise = np.random.default_rng(7).random((height, width, 4)) * 255
    return Image.fromarray(noise.astype(np.uint8)).convert(mode)


def numbers(*shape: int) -> torch.Tensor:
    """In 0..1, as floats have them and 8 bits do not."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(1))


def forms(height: int, width: int) -> Iterator[tuple[str, Any]]:
    """A picture in every form that some pipeline of diffusers takes."""
    yield "another shape", picture(24, 60)
    yield "twice as large", picture(2 * height, 2 * width)
    yield "a tensor", numbers(1, 3, height, width)
    yield "a larger tensor, bfloat16", numbers(1, 3, height + 8, width + 16).bfloat16()
    yield "a tensor in float64", numbers(3, height, width).double()
    yield "a tensor beyond 0 to 1", 4 * numbers(1, 3, height, width) - 2
    yield "an array", numbers(height, width, 3).numpy()
    yield "arrays in a batch", numbers(1, height, width, 3).numpy()
    yield "a list of one", [picture(20, 24)]
    yield "a list of tensors", [numbers(3, height, width)]
    yield "grey", picture(20, 24, "L")
    yield "transparent", picture(20, 24, "RGBA")


@pytest.mark.parametrize("name", slow_unless(FAST, PICTURED))
def test_pictures_of_every_form_are_handed_on_as_they_are(name: str) -> None:
    with CASES[name].within():
        pipe, call, same = pipeline(name), call_of(name), 0
        taken = "image" if "image" in of_pipeline(pipe).parameters else "cond_image"
        for form, value in forms(call.get("height", 16), call.get("width", 16)):
            given = {**call, taken: value}
            try:
                wanted = theirs(pipe, given)
            except REFUSALS as error:
                # What diffusers refuses may be served, and is refused in its words where it isn't.
                try:
                    assert ours(pipe, given).std() > 0
                except EveryframeError as refused:
                    assert " ".join(str(error).split())[:40] in str(refused), form  # noqa: PT017
                continue
            assert np.array_equal(ours(pipe, given), wanted, equal_nan=True), form
            same += 1
    assert same >= 2


@pytest.mark.parametrize("form", ["grey", "transparent", "an array", "16 bits"])
def test_what_diffusers_takes_no_picture_in_is_given_in_rgb(form: str) -> None:
    pipe, call = pipeline("WanImageToVideoPipeline"), call_of("WanImageToVideoPipeline")
    values = dict(forms(16, 16))
    wide = np.asarray(picture(20, 24)).astype(np.uint16) * 257
    value = wide if form == "16 bits" else values[form]
    events: list[Event] = []
    frames = ours(pipe, {**call, "image": value}, events)
    plain = Image.fromarray(read_image(value))
    assert np.array_equal(frames, theirs(pipe, {**call, "image": plain}))
    notes = [each.text for each in events if isinstance(each, Note) and "RGB instead" in each.text]
    assert len(notes) == (form != "16 bits"), "integers are a picture wherever they are given"


def test_a_plan_follows_what_is_given_again_in_rgb(tmp_path: Path) -> None:
    """LTX-2 compresses a picture as a video would, which it does to Pillow's alone."""
    pipeline("LTX2ImageToVideoPipeline").save_pretrained(tmp_path / "ltx2")
    call = call_of("LTX2ImageToVideoPipeline")
    asked = {
        "model": str(tmp_path / "ltx2"), "seed": SEED, "size": "32x32", "num_frames": 5,
        "num_inference_steps": STEPS, "prompt": PROMPT,
        "option": {key: call[key] for key in CASES["LTX2ImageToVideoPipeline"].asked["option"]},
    }  # fmt: skip
    plan = everyframe.plan(image=numbers(1, 3, 40, 32), **asked)
    assert not [note for note in plan.notes if "no dry run can follow" in note]
    refused = numbers(2, 2, 2, 2, 2)
    with pytest.raises(InputError, match=r"refuses: .*PIL\.Image\.Image"):
        everyframe.generate(image=refused, **asked)


def test_the_steps_of_a_call_that_was_refused_once_are_not_reported_twice() -> None:
    events: list[Event] = []
    call = {**call_of("LTXImageToVideoPipeline"), "image": picture(20, 24, "L")}
    ours(pipeline("LTXImageToVideoPipeline"), call, events)
    assert [each.step for each in events if isinstance(each, Step)] == [1, 2]


def test_fit_is_done_where_it_is_asked_for() -> None:
    pipe, call = pipeline("LTXImageToVideoPipeline"), call_of("LTXImageToVideoPipeline")
    given = {**call, "image": picture(24, 60)}
    cut = picture(24, 60).resize((32, 32), Image.Resampling.LANCZOS, box=(18, 0, 42, 24))
    fitted = ours(pipe, {**given, "fit": "crop"})
    assert np.array_equal(fitted, theirs(pipe, {**call, "image": cut}))
    assert not np.array_equal(fitted, ours(pipe, given))


def test_pictures_in_a_list_with_their_places() -> None:
    pipe, call = pipeline("LTXConditionPipeline"), call_of("LTXConditionPipeline")
    del call["conditions"]
    given = {**call, "image": [picture(20, 24), picture(50, 40)], "frame_index": [0, 8]}
    assert np.array_equal(ours(pipe, given), theirs(pipe, given))


def test_a_call_that_begins_at_latents_needs_no_picture() -> None:
    pipe, call = pipeline("LTXImageToVideoPipeline"), call_of("LTXImageToVideoPipeline")
    packed = torch.randn(1, 2, 8, generator=torch.Generator().manual_seed(0))
    with pytest.raises(InputError, match="give one"):
        ours(pipe, call)
    with pytest.raises(EveryframeError) as raised:
        ours(pipe, {**call, "latents": packed})
    assert "give one" not in str(raised.value), "diffusers' own words on latents of that shape"


def test_embeddings_in_place_of_a_prompt_that_its_call_requires() -> None:
    """SkyReels V2's prompt has no default, and is None beside embeddings."""
    name = "SkyReelsV2DiffusionForcingPipeline"
    pipe, call = pipeline(name), {**call_of(name), "prompt": None}
    call |= {"prompt_embeds": numbers(1, 16, 32), "negative_prompt_embeds": numbers(1, 16, 32)}
    assert np.array_equal(ours(pipe, call), theirs(pipe, call))


@pytest.mark.parametrize("value", ["tensor", "picture"])
def test_an_image_encoder_of_another_size(tmp_path: Path, value: str) -> None:
    """Stable Video Diffusion resizes pictures for its encoder, and takes tensors as they are."""
    pipe = loaded(tiny_svd.svd(tmp_path / "svd"))
    image = numbers(1, 3, 224, 224) if value == "tensor" else picture(50, 90)
    call = {
        "image": image, "height": 64, "width": 64, "num_inference_steps": 2, "num_frames": 2,
    }  # fmt: skip
    assert np.array_equal(ours(pipe, call), theirs(pipe, call))


# Lengths and sizes.


@pytest.mark.parametrize(
    ("name", "frames", "made"),
    [
        ("WanPipeline", 6, 5),
        ("CogVideoXPipeline", 8, 8),
        pytest.param("HeliosPipeline", 34, 33, marks=pytest.mark.slow),
        pytest.param("HunyuanVideoFramepackPipeline", 11, 25, marks=pytest.mark.slow),
    ],
)
def test_lengths_are_those_that_the_pipeline_makes(name: str, frames: int, made: int) -> None:
    pipe, events = pipeline(name), list[Event]()
    call = {**call_of(name), "num_frames": frames}
    if "image" in CASES[name].asked:
        call["image"] = picture(20, 24)
    got = ours(pipe, call, events)
    assert np.array_equal(got, theirs(pipe, call))
    notes = [each.text for each in events if isinstance(each, Note) and "frames of" in each.text]
    assert len(notes) == (len(got) != frames)
    assert len(got) == made


def test_a_size_is_refused_in_the_pipelines_own_words() -> None:
    with pytest.raises(InputError, match=r"refuses: .* divisible by 16 but are 24 and 40"):
        ours(pipeline("WanPipeline"), {**call_of("WanPipeline"), "height": 24, "width": 40})


def test_what_nobody_gave_is_left_to_the_pipeline() -> None:
    pipe, call = pipeline("CogVideoXPipeline"), call_of("CogVideoXPipeline")
    for name in ("height", "width", "num_frames"):
        del call[name]
    assert np.array_equal(ours(pipe, call), theirs(pipe, call))


def test_a_plan_tells_the_length_that_is_made(tmp_path: Path) -> None:
    """The dry run sees what the pipeline rounds to; what it is given stays what was asked for."""
    pipeline("WanPipeline").save_pretrained(tmp_path / "wan")
    asked = {"prompt": PROMPT, "size": "32x32", "num_frames": 7, "num_inference_steps": 2}
    plan = everyframe.plan(model=str(tmp_path / "wan"), option={"max_sequence_length": 16}, **asked)
    assert (plan.settings.num_frames, plan.settings.conditioned_length) == (5, 7)
    assert "the pipeline makes 5 frames of 32x32, not 7 of 32x32" in plan.notes


# Videos.


def of_frames(form: str) -> Any:
    """Nine frames of 32x32."""
    video = numbers(1, 9, 3, 32, 32)
    return {
        "a tensor": video,
        "an array": video.permute(0, 1, 3, 4, 2).numpy()[0],
        "pictures": [picture(32, 32)] * 9,
    }[form]


@pytest.mark.parametrize("form", ["a tensor", "an array", "pictures"])
def test_a_video_in_every_form(form: str) -> None:
    pipe = pipeline("LTXLatentUpsamplePipeline")
    call = {"video": of_frames(form), "height": 32, "width": 32}
    assert np.array_equal(ours(pipe, call), theirs(pipe, call))


def test_the_last_step_is_the_end_of_the_bar_where_a_video_is_given() -> None:
    """With `strength` the first steps are left out; the bar ended in its middle."""
    parts = cogvideox_parts()
    pipe = diffusers.CogVideoXVideoToVideoPipeline(**parts)
    events: list[Event] = []
    call = {"prompt": PROMPT, "height": 16, "width": 16, "max_sequence_length": 16}
    ours(
        pipe,
        {**call, "video": [picture(16, 16)] * 9, "strength": 0.5, "num_inference_steps": 4},
        events,
    )
    steps = [(each.step, each.num_steps) for each in events if isinstance(each, Step)]
    assert steps == [(1, 2), (2, 2)]


def test_forms_say_sizes_and_lengths() -> None:
    known = {
        (2, 3, 9, 16, 24): 9, (2, 9, 3, 16, 24): 9, (9, 3, 16, 24): 9, (9, 3, 3, 16, 24): 3,
    }  # fmt: skip
    for shape, frames in known.items():
        form = form_of(torch.zeros(shape))
        assert (num_frames_of(form), sides_of(form)) == (frames, (16, 24))
    form = form_of(np.zeros((5, 16, 24, 3)))
    assert (num_frames_of(form), sides_of(form)) == (5, (16, 24))
    nested = form_of([[picture(8, 12)] * 3])
    assert (num_frames_of(nested), sides_of(nested)) == (3, (8, 12))


# Classes and objects.


class Shifted(diffusers.WanPipeline):  # type: ignore[misc]
    """One of somebody's own, that hands on all that it is given."""

    def __call__(self, *args: Any, shift: float = 3.0, **kwargs: Any) -> Any:
        """As Wan's."""
        self.seen = shift
        return super().__call__(*args, **kwargs)


def test_a_subclass_that_hands_its_arguments_on() -> None:
    assert of_class(Shifted).parameters.keys() == {
        "shift", *of_class(diffusers.WanPipeline).parameters,
    }  # fmt: skip
    base, call = pipeline("WanPipeline"), call_of("WanPipeline")
    mine = Shifted(**base.components, expand_timesteps=base.config.expand_timesteps)
    assert np.array_equal(ours(mine, {**call, "shift": 2.0}), theirs(base, call))
    with pytest.raises(InputError, match="no parameter 'shif'; did you mean 'shift'"):
        ours(mine, {**call, "shif": 2.0})


def test_a_run_with_condition_objects_is_kept_and_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers.pipelines.ltx.pipeline_ltx_condition import LTXVideoCondition

    monkeypatch.setenv("EVERYFRAME_RUNS", str(tmp_path))
    pipe, call = pipeline("LTXConditionPipeline"), call_of("LTXConditionPipeline")
    conditions = [
        LTXVideoCondition(image=picture(20, 24)),
        LTXVideoCondition(video=[picture(40, 40)] * 2, frame_index=8, strength=0.5),
    ]
    call["conditions"] = conditions
    wanted = theirs(pipe, call)
    size = {"size": f"{call.pop('width')}x{call.pop('height')}"}
    own = {name: call.pop(name) for name in ("conditions", "max_sequence_length")}
    request = everyframe.Request(seed=SEED, option=own, **size, **call)
    events = everyframe.stream(request, pipe=pipe)
    for event in events:
        assert not (isinstance(event, Note) and "can't be saved" in event.text), event
        if isinstance(event, Step):
            break
    events.close()  # type: ignore[attr-defined]
    video = everyframe.resume(pipe=pipe, output="float")
    assert isinstance(video, everyframe.Video)
    assert np.array_equal(video.frames, wanted)


def test_a_calls_own_names_are_taken() -> None:
    """``pipe(**call)`` and ``run(pipe, **call)`` take the same words; here it is `num_frames`."""
    pipe, call = pipeline("LattePipeline"), call_of("LattePipeline")
    call = {**call, "video_length": call.pop("num_frames", 2)}
    assert np.array_equal(ours(pipe, call), theirs(pipe, call))
    with pytest.raises(InputError, match="num_frames and video_length are the same"):
        ours(pipe, {**call, "num_frames": 2})


def test_numbers_of_numpy_are_numbers() -> None:
    pipe, call = pipeline("WanPipeline"), call_of("WanPipeline")
    given = {**call, "max_sequence_length": np.int64(16), "guidance_scale": np.float32(4.0)}
    assert np.array_equal(ours(pipe, given), theirs(pipe, {**call, "guidance_scale": 4.0}))


def test_latents_keep_their_dtype() -> None:
    """CogVideoX puts them beside what it computes in bfloat16, and casts neither."""
    pipe = diffusers.CogVideoXPipeline(**cogvideox_parts()).to(torch.bfloat16)
    call = call_of("CogVideoXPipeline")
    shape = (1, 3, pipe.vae.config.latent_channels, 2, 2)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    given = {**call, "latents": noise}
    assert np.array_equal(ours(pipe, given), theirs(pipe, given))


@pytest.mark.parametrize("fit", [None, pytest.param("stretch", marks=pytest.mark.slow)])
def test_a_picture_by_its_file_on_the_command_line(tmp_path: Path, fit: str | None) -> None:
    pipe, call = pipeline("WanImageToVideoPipeline"), call_of("WanImageToVideoPipeline")
    pipe.save_pretrained(tmp_path / "model")
    picture(24, 60).save(tmp_path / "fox.png")
    words = ["generate", PROMPT, "--model", str(tmp_path / "model"), "--size", "16x16"]
    words += ["--image", str(tmp_path / "fox.png"), "--num-frames", "5", "--steps", str(STEPS)]
    words += ["--option", "max-sequence-length=16", "--dtype", "fp32", "--attention", PLAIN]
    words += ["--seed", str(SEED), "-o", f"{tmp_path}/frames/", *(["--fit", fit] if fit else [])]
    assert main(words) == 0
    shown = picture(24, 60)
    given = {**call, "image": shown.resize((16, 16), Image.Resampling.LANCZOS) if fit else shown}
    with by_kernel(PLAIN):
        wanted = theirs(pipe, given)
    made = np.stack([read_image(each) for each in sorted((tmp_path / "frames").glob("*.png"))])
    assert np.array_equal(made, to_uint8(wanted))
