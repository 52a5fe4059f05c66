"""Requests resolved against pipeline classes: what each takes, and what is refused."""

from __future__ import annotations

from typing import Any

import diffusers
import numpy as np
import pytest

from everyframe.core.errors import CheckpointError, InputError
from everyframe.core.plan import Settings
from everyframe.core.request import Request
from everyframe.diffusers_pipelines.files.component_classes import checked
from everyframe.diffusers_pipelines.inputs.defaults import PipelineDefaults
from everyframe.diffusers_pipelines.inputs.options import PipelineOptions
from everyframe.diffusers_pipelines.inputs.settings import resolve_settings, smaller_settings
from everyframe.diffusers_pipelines.inputs.signature import of_class

PICTURE = np.zeros((8, 8, 3), np.uint8)
WAN_VAE = {"scale_factor_spatial": 8, "scale_factor_temporal": 4}
CONFIGS: dict[str, dict[str, Any]] = {
    "WanPipeline": {"transformer": {"patch_size": [1, 2, 2]}, "vae": WAN_VAE},
    "WanImageToVideoPipeline": {"transformer": {}, "vae": WAN_VAE},
    "LucyEditPipeline": {"transformer": {}, "vae": WAN_VAE},
    "CogVideoXPipeline": {
        "transformer": {"sample_height": 60, "sample_width": 90, "sample_frames": 49},
        "vae": {"block_out_channels": [1, 2, 3, 4], "temporal_compression_ratio": 4},
    },
    "MochiPipeline": {"transformer": {}, "vae": {"temporal_expansions": [1, 2, 3]}},
    "LattePipeline": {"transformer": {"sample_size": 64}, "vae": {"block_out_channels": [1] * 4}},
    "AnimateDiffPipeline": {"unet": {"sample_size": 64}, "vae": {"block_out_channels": [1] * 4}},
    "HunyuanVideoPipeline": {
        "transformer": {},
        "vae": {"spatial_compression_ratio": 8, "temporal_compression_ratio": 4},
    },
    "HunyuanVideo15Pipeline": {
        "transformer": {"target_size": 640},
        "vae": {"spatial_compression_ratio": 16, "temporal_compression_ratio": 4},
        "guider": {"guidance_scale": 7.5},
    },
    "LTX2Pipeline": {"transformer": {}, "vae": {"spatial_compression_ratio": 32}},
    # As it was released: the factors follow from what halves all sides, and from its patches.
    "LTXPipeline": {
        "transformer": {},
        "vae": {
            "block_out_channels": [128, 256, 512, 512],
            "patch_size": 4,
            "patch_size_t": 1,
            "spatio_temporal_scaling": [True, True, True, False],
        },
    },
    "StableVideoDiffusionPipeline": {"unet": {"num_frames": 14}, "vae": {}},
    "Cosmos3OmniPipeline": {"transformer": {}, "vae": WAN_VAE},
    "Cosmos2_5_TransferPipeline": {"transformer": {}, "vae": WAN_VAE},
    "AllegroPipeline": {
        "transformer": {"sample_height": 90, "sample_width": 160, "sample_frames": 22},
        "vae": {"block_out_channels": [1] * 4, "temporal_compression_ratio": 4},
    },
}


def sizes(name: str) -> PipelineDefaults:
    return PipelineDefaults(of_class(getattr(diffusers, name)), CONFIGS[name])


def resolved(name: str, **given: Any) -> tuple[Settings, tuple[str, ...]]:
    own = {key: given.pop(key) for key in ("option", "fit") if key in given}
    request = Request(**{"prompt": "a fox", **given})
    return resolve_settings(sizes(name), "it", request, PipelineOptions(**own), 5)


@pytest.mark.parametrize(
    ("name", "size", "frames", "fps", "steps", "guidance"),
    [
        # What diffusers' signatures, configs and documentation say of each.
        ("WanPipeline", (480, 832), 81, 16, 50, 5),
        ("CogVideoXPipeline", (480, 720), 49, 8, 50, 6),
        ("MochiPipeline", (480, 848), 19, 30, 64, 4.5),
        ("LattePipeline", (512, 512), 16, 8, 50, 7.5),
        ("AnimateDiffPipeline", (512, 512), 16, 8, 50, 7.5),
        ("HunyuanVideoPipeline", (720, 1280), 129, 24, 50, 6),
        ("HunyuanVideo15Pipeline", (480, 848), 121, 24, 50, 7.5),
        ("LTX2Pipeline", (512, 768), 121, 24, 30, 3),
        ("LTXPipeline", (512, 704), 161, 25, 50, 3),
        ("AllegroPipeline", (720, 1280), 88, 15, 100, 7.5),
    ],
)
def test_defaults_are_the_pipelines_own(
    name: str, size: tuple[int, int], frames: int, fps: float, steps: int, guidance: float
) -> None:
    settings, _ = resolved(name)
    assert (settings.height, settings.width, settings.num_frames) == (*size, frames)
    assert (settings.fps, settings.num_inference_steps) == (fps, steps)
    assert settings.guidance_scale == guidance


@pytest.mark.parametrize(
    ("name", "given", "size", "frames"),
    [
        ("StableVideoDiffusionPipeline", {"prompt": None, "image": PICTURE}, (576, 1024), 14),
        ("Cosmos3OmniPipeline", {}, (720, 1280), 189),
        ("Cosmos2_5_TransferPipeline", {"option": {"controls": [PICTURE]}}, (704, 1280), 93),
    ],
)
def test_what_only_its_code_or_its_model_knows_need_not_be_given(
    name: str, given: dict[str, Any], size: tuple[int, int], frames: int
) -> None:
    settings, _ = resolved(name, **given)
    assert (settings.height, settings.width, settings.num_frames) == (*size, frames)
    assert "num_frames" in settings.own_choices, "left to the pipeline"


@pytest.mark.parametrize(
    ("name", "given", "text"),
    [
        ("WanPipeline", {"prompt": None}, "makes a video of a text; give a prompt"),
        ("WanPipeline", {"image": PICTURE}, r"image .*\(WanPipeline\) takes"),
        ("WanImageToVideoPipeline", {}, r"makes a video of a picture; give one \(image\)"),
        ("WanImageToVideoPipeline", {"image": "nowhere.png"}, "does not exist"),
        ("CogVideoXPipeline", {"resolution": "360p"}, "it has no named sizes"),
        ("CogVideoXPipeline", {"edit_strength": 0.5}, "edit_strength has no effect"),
        ("CogVideoXPipeline", {"chain": 2}, "can't continue a clip"),
        ("WanPipeline", {"option": {"guidance_scal_2": 2}}, "no parameter 'guidance_scal_2'; did"),
        ("WanPipeline", {"option": {"height": 64}}, "give height by its own option"),
        # Diffusers' own arguments, of a model that is loaded here; `test_call_options.py` has them
        # for a pipeline in memory.
        ("WanPipeline", {"option": {"generator": 1}}, "is for a pipeline in memory.*here seed=7"),
        (
            "WanPipeline",
            {"option": {"output_type": "pt"}},
            'takes; here output="float"',
        ),
        ("WanPipeline", {"option": {"return_dict": True}}, r"its frames are video\.frames"),
        ("WanPipeline", {"option": {"num_videos_per_prompt": 2}}, "here num_videos=2 makes videos"),
        ("WanPipeline", {"option": {"callback_on_step_end": 1}}, "here everyframe.stream gives an"),
        (
            "WanPipeline",
            {"prompt": None, "option": {"prompt": ["a"]}},
            "here each prompt is a text",
        ),
        ("LTX2Pipeline", {"option": {"stg_scale": "a lot"}}, "stg_scale of .* must be float"),
        ("LTX2Pipeline", {"option": {"use_cross_timestep": 3}}, "must be bool, got 3"),
        ("LucyEditPipeline", {}, r"without 'video'; give it by --option video=FILE, a video or"),
        ("LucyEditPipeline", {"option": {"video": "no.mp4"}}, r"'no\.mp4' does not exist"),
        ("LTX2Pipeline", {"option": {"stg_scale": float("nan")}}, "at most 1,000,000, got nan"),
        ("WanPipeline", {"option": {"max_sequence_length": 10**11}}, "must be a number of at most"),
        ("WanPipeline", {"option": {"max_sequence_length": -5}}, "must be at least 1, got -5"),
        ("WanPipeline", {"fit": "crob"}, "did you mean 'crop'"),
        ("WanPipeline", {"seconds": 1e308}, "at most 100000"),
    ],
)
def test_what_a_pipeline_cannot_take_is_refused(
    name: str, given: dict[str, Any], text: str
) -> None:
    with pytest.raises(InputError, match=text):
        resolved(name, **given)


@pytest.mark.parametrize("name", ["WanPipeline", "LTXPipeline", "AllegroPipeline"])
def test_lengths_and_sizes_are_the_pipelines_to_refuse_or_to_round(name: str) -> None:
    """Which it takes is in its own code, and no config says it: a guess refused documented ones."""
    settings, _ = resolved(name, num_frames=14, size="500x302")
    assert (settings.num_frames, settings.height, settings.width) == (14, 302, 500)


def test_what_nobody_gave_is_the_pipelines_to_choose_where_its_default_is_none() -> None:
    assert resolved("CogVideoXPipeline")[0].own_choices == ("height", "width", "num_frames")
    assert resolved("CogVideoXPipeline", size="64x64")[0].own_choices == ("num_frames",)
    assert resolved("WanPipeline")[0].own_choices == ()
    for each in smaller_settings(sizes("CogVideoXPipeline"), resolved("CogVideoXPipeline")[0]):
        assert each.own_choices == ()


def test_seconds_become_the_nearest_length_that_can_be_had() -> None:
    assert resolved("WanPipeline", seconds=2)[0].num_frames == 33
    assert resolved("AllegroPipeline", seconds=2)[0].num_frames == 32


def test_a_guider_takes_the_guidance_that_the_call_does_not() -> None:
    assert resolved("HunyuanVideo15Pipeline", guidance_scale=3)[0].guidance_scale == 3


def test_own_parameters_stand_in_the_plan_and_whole_numbers_do_for_others() -> None:
    settings, _ = resolved("LTX2Pipeline", option={"stg_scale": 2, "decode_timestep": [0.1]})
    assert dict(settings.options) == {"stg_scale": 2.0, "decode_timestep": [0.1]}
    assert isinstance(dict(settings.options)["stg_scale"], float)


def test_options_of_the_command_line_are_read_as_json_or_words() -> None:
    given = PipelineOptions(option=["stg-scale=2.5", "a=true", "b=None", "c=[1, 2]", "d=words = x"])
    assert given.option == {"stg_scale": 2.5, "a": True, "b": None, "c": [1, 2], "d": "words = x"}
    with pytest.raises(InputError, match="NAME=VALUE"):
        PipelineOptions(option=["what"])


def test_notes_say_what_it_can_not_do() -> None:
    _, notes = resolved("WanPipeline")
    assert notes == (
        "only denoising steps are counted; text, pictures and decoding give no events",
    )
    _, notes = resolve_settings(
        PipelineDefaults(of_class(Plain), {}),
        "it",
        Request(prompt="a", size="64x64"),
        PipelineOptions(),
        0,
    )
    assert [note.split(":")[0] for note in notes] == [
        "it has no denoiser by a known name, so its steps give no events",
        "it takes no latents",
        "it names no frame rate; 24 a second are taken (fps)",
    ]


class Plain:
    """A pipeline of nobody."""

    def __call__(self, prompt: str, height: int, width: int, num_frames: int = 4) -> None:
        """Nothing."""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("StableDiffusionPipeline", "StableDiffusionPipeline is not a video pipeline; supported"),
        ("FluxPipeline", "FluxPipeline is not a video pipeline"),
        ("Cosmos2TextToImagePipeline", "is not a video pipeline"),
        ("LTX2VideoDiffusionDecodePipeline", "makes no video of a text, a picture or a video"),
        ("LTX2DFRTemporalRefinePipeline", "latents that a call of LTX2DFRPipeline left in memory"),
    ],
)
def test_other_pipelines_are_refused_by_name(name: str, text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        checked(of_class(getattr(diffusers, name)))


def test_smaller_ones_are_valid_and_smaller() -> None:
    settings, _ = resolved("WanPipeline")
    choices = list(smaller_settings(sizes("WanPipeline"), settings))
    volumes = [each.height * each.width * each.num_frames for each in choices]
    assert volumes == sorted(volumes, reverse=True)
    assert volumes[0] < settings.height * settings.width * settings.num_frames
    for each in choices:
        assert each.num_frames % 4 == 1
        assert each.height % 32 == each.width % 32 == 0
