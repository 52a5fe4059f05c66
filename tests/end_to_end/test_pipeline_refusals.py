"""What a pipeline's own call refuses in a dry run: an error of the plan, before any run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor, nn

import everyframe
from everyframe.core.errors import CannotRunError, EveryframeError, InputError
from everyframe.diffusers_pipelines.calls.call import attributes_kept
from everyframe.diffusers_pipelines.calls.refusals import call_checked
from everyframe.diffusers_pipelines.files.components import islands_of
from everyframe.diffusers_pipelines.library_patches import stand_in_accepted
from everyframe.dry_run.executor import DryRunModule, dry_run_modules
from everyframe.hardware.profiles import find_profile
from helpers.tiny_checkpoints import pipelines as tiny_pipelines
from helpers.tiny_checkpoints.diffusers.cases import Clip, written
from helpers.tiny_checkpoints.pipeline_components import cogvideox_parts

MPS = find_profile("mps").machine().devices[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline that makes a video of another, and takes none by its signature's default."""
    path = tmp_path_factory.mktemp("models") / "tiny-cog-v2v"
    diffusers.CogVideoXVideoToVideoPipeline(**cogvideox_parts()).save_pretrained(path)
    return path


def plan(folder: Path, **option: Any) -> everyframe.Plan:
    """For a card that is not here; nothing is run."""
    request = everyframe.Request(
        model=str(folder), prompt="a fox", size="16x16", num_inference_steps=2,
        option={"max_sequence_length": 16, **option},
    )  # fmt: skip
    return everyframe.plan(request, profile="cuda-sm75")


def test_length_is_that_of_the_video_and_the_dry_run_makes_a_step(
    folder: Path, tmp_path: Path
) -> None:
    # Of one step with the default strength of 0.8 none would be left.
    video = written(Clip(9), tmp_path, 16, 16)
    made = plan(folder, video=video)
    assert made.settings.num_frames == 9
    assert dict(made.settings.options)["video"] == "clip9"
    assert {stage.component for stage in made.stages if stage.operations} >= {"transformer", "vae"}


def test_what_the_dry_run_met_too_is_wrong_input(folder: Path, tmp_path: Path) -> None:
    """It comes of the config and not of the machine: there is nothing to go on with."""
    faulty, video = tmp_path / "faulty", written(Clip(9), tmp_path, 16, 16)
    shutil.copytree(folder, faulty)
    file = faulty / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "prediction_type": ".."}))
    with pytest.raises(
        InputError, match=r"on any device; .* \(ValueError: prediction_type given"
    ) as e:
        everyframe.generate(
            "a fox", model=str(faulty), size="16x16", num_inference_steps=2, device="cpu",
            option={"max_sequence_length": 16, "video": video}, run_dir=tmp_path / "runs",
        )  # fmt: skip
    assert e.value.exit_code == 2
    assert "everyframe resume" not in str(e.value)
    assert not list((tmp_path / "runs").iterdir())


class Pipe:
    """A pipeline whose call does `act` with its one part; `check_inputs` is what diffusers calls
    its checks."""

    def __init__(self, part: nn.Module, act: Any) -> None:
        self.part, self.act, self.components = part, act, {}

    def __call__(self, **_: Any) -> object:
        """What it is to do."""
        return self.act(self)

    def check_inputs(self) -> None:
        """Says no."""
        raise ValueError("a video is needed")


def after_work(pipe: Pipe) -> None:
    """Its part works, and then numbers seem to be wrong."""
    pipe.part(torch.empty(1, 4, device="meta"))
    raise ValueError("no number is above 0")


def before_work(pipe: Pipe) -> None:
    """Nothing has worked yet."""
    raise ValueError("two videos are too many")


def beyond_numbers(pipe: Pipe) -> None:
    """A number that one of its libraries can't hold."""
    (-5).to_bytes(4, "little")


def its_own_check(pipe: Pipe) -> None:
    """Its check comes late."""
    pipe.part(torch.empty(1, 4, device="meta"))
    pipe.check_inputs()


@pytest.mark.parametrize(
    ("act", "error", "text"),
    [
        (before_work, InputError, "Pipe refuses: two videos are too many"),
        (beyond_numbers, InputError, "Pipe refuses: can't convert negative int"),
        (its_own_check, InputError, "Pipe refuses: a video is needed"),
        (lambda pipe: pipe.part.text_model, CannotRunError, "has no attribute 'text_model'"),
        (after_work, ValueError, "no number is above 0"),
        (lambda pipe: None.sample, AttributeError, "no attribute 'sample'"),  # type: ignore
    ],
)
def test_what_no_numbers_could_change_is_an_answer(act: Any, error: type, text: str) -> None:
    part = nn.Linear(4, 4, device="meta")
    with pytest.raises(error, match=text) as caught:
        call_checked(Pipe(part, act), {}, [part])
    assert isinstance(caught.value, EveryframeError) == issubclass(error, EveryframeError)


def test_a_package_that_diffusers_would_import_is_missing() -> None:
    from diffusers.models import attention_dispatch

    source = compile("lambda pipe: transforms.resize()", attention_dispatch.__file__, "eval")
    part = nn.Linear(4, 4, device="meta")
    with pytest.raises(CannotRunError, match="name 'transforms' is not defined"):
        call_checked(Pipe(part, eval(source)), {}, [part])


def act_of(file: str, text: str) -> Any:
    """A check in that file, after a part has worked."""
    lines = (
        "def act(pipe):",
        '    pipe.part(torch.empty(1, 4, device="meta"))',
        f"    raise ValueError({text!r})",
    )
    names: dict[str, Any] = {"torch": torch}
    exec(compile("\n".join(lines), file, "exec"), names)
    return names["act"]


@pytest.mark.parametrize(
    ("file", "text", "error"),
    [
        ("modular_pipelines/a.py", "`height` and `width` must be multiples of 32", InputError),
        ("pipelines/a/b.py", "`num_frames` must be odd", InputError),
        ("models/a.py", "`height` must be even", ValueError),
        ("pipelines/a/b.py", "the mask must have a 1", ValueError),
    ],
)
def test_a_late_word_on_a_size_is_an_answer(file: str, text: str, error: type) -> None:
    """Blocks of a modular pipeline check sizes after the text is encoded."""
    part, act = nn.Linear(4, 4, device="meta"), act_of(f"/site/diffusers/{file}", text)
    with pytest.raises(error, match=text) as caught:
        call_checked(Pipe(part, act), {}, [part])
    assert isinstance(caught.value, InputError) == (error is InputError)


def test_a_schedule_of_too_few_steps_is_refused_by_the_plan(tmp_path: Path) -> None:
    tiny_pipelines.mochi(tmp_path / "mochi")
    asked: dict[str, Any] = {"prompt": "a fox", "model": str(tmp_path / "mochi")}
    with pytest.raises(InputError, match="MochiPipeline needs num_inference_steps of 2 or more"):
        everyframe.plan(**asked, **tiny_pipelines.CALLS["mochi"], num_inference_steps=1)


class Asks(nn.Module):
    """Asks for numbers of a list, notes a table on itself in float64, and writes to a mask."""

    def forward(self, x: Tensor) -> Tensor:
        """As many zeros as the list says."""
        from diffusers.utils.torch_utils import maybe_adjust_dtype_for_device

        ends = torch.cat([torch.tensor([0], device=x.device), torch.tensor([3], device=x.device)])
        mask = x.cpu()
        mask[:, 1:] = 0
        generator = torch.Generator(device="meta")
        assert isinstance(generator, torch.Generator)
        with torch.autocast("meta", torch.float32):
            self.noted = x.to(maybe_adjust_dtype_for_device(torch.float64, x.device))
        return self.noted.float()[:, : int(ends.diff().max().item())]


def test_lists_keep_their_numbers_and_modules_nothing_of_a_dry_run() -> None:
    part, shapes = Asks(), []

    def call(device: str) -> None:
        with stand_in_accepted([part]), attributes_kept(part.modules()):
            shapes.append(part(torch.empty(2, 8, device=device)).shape)

    found = dry_run_modules({"part": DryRunModule(part, None)}, call, MPS, is_foreign=True)
    assert found.stopped == ""
    assert shapes == [(2, 3)]
    assert not hasattr(part, "noted")
    # There is no float64 on such a device; diffusers asks before it takes it.
    assert not found.found["part"].clashes


class Kept:
    """A class of diffusers that keeps these in float32."""

    _keep_in_fp32_modules = ("norm1", "embedder")


def test_a_norm_without_parameters_is_no_island() -> None:
    parameters = {
        "embedder.linear.weight": 4, "blocks.0.norm1.weight": 4, "blocks.12.norm1.weight": 4,
        "face.proj.weight": 4,
    }  # fmt: skip
    assert islands_of("vae", Kept, parameters) == ("blocks.*.norm1", "embedder")
