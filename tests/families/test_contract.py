"""The contract of a family: each of them is held to the same, by the same tests.

A new family gets an entry in `helpers/family_cases.py`. What one family alone does is tested in its
folder. Of the contract, but elsewhere: the files of a family (`test_architecture.py`), ranks
(`test_contract_distributed.py`), dry runs of every profile (`planning/test_dry_runs.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.modules.module import register_module_forward_hook

import everyframe
from everyframe.core.errors import CheckpointError
from everyframe.core.events import ComponentLoaded, Event, Planned, StageDone, StageStarted, Step
from everyframe.core.request import Request
from everyframe.engine.resumption.resume import resume_run
from everyframe.engine.run import initial_videos
from everyframe.ops.attention import by_kernel
from everyframe.planning import dry_runs
from everyframe.planning.find_model import find_model
from everyframe.planning.resolve import prepare
from everyframe.runtime.loading import check_contents
from helpers.events import frames_by_seed, frames_of
from helpers.family_cases import CASES
from helpers.interrupted_runs import interrupt
from helpers.plans import frames_of as planned_frames
from helpers.plans import unchanged, with_components
from helpers.slow_rows import slow_unless
from helpers.tiny_checkpoints import families as tiny_families

Models = Callable[[str], Path]
Runs = Callable[..., list[Event]]

every_family = pytest.mark.parametrize("family", tiny_families.OURS)
#: For what the families share and do not write themselves: some in the fast set, the rest slow.
SOME = ("opensora-1.2", "svd")
some_families = pytest.mark.parametrize("family", slow_unless(SOME, tiny_families.OURS))


def options_of(models: Models, family: str, **options: Any) -> dict[str, Any]:
    return {
        "model": model_of(models, family),
        "device": "cpu",
        **tiny_families.asked(family, **options),
    }


def model_of(models: Models, family: str) -> str:
    """Where the weights of its denoiser are, or the folder."""
    pickles = list(models(family).glob("*.pth"))
    return str(pickles[0] if pickles else models(family))


@pytest.fixture(scope="module")
def runs(tiny_models: Models) -> Runs:
    """The events of a family's run with these options, made once."""
    made: dict[Any, list[Event]] = {}

    def run(family: str, **options: Any) -> list[Event]:
        key = (family, *sorted(options.items()))
        if key not in made:
            request = Request(**options_of(tiny_models, family, **options))
            made[key] = list(everyframe.stream(request))
        return made[key]

    return run


def test_each_family_and_version_is_here() -> None:
    assert CASES.keys() == {*tiny_families.OURS}


# ---------------------------------------------------------------- loading


@every_family
def test_a_checkpoint_loads_strictly(family: str, tmp_path: Path) -> None:
    """A missing, extra or misshapen tensor of any component is named, by headers alone."""
    place = tiny_families.made(family, tmp_path)
    request = Request(**options_of(lambda _: place, family))
    model, _ = find_model(request, may_fetch=False)
    check_contents(model)  # nothing is wrong with it
    for file in CASES[family].files:
        whole = (place / file).read_bytes()
        tensors = load_file(place / file)
        name = max(tensors, key=lambda each: tensors[each].numel())
        rest = {key: tensor for key, tensor in tensors.items() if key != name}
        for broken, text in (
            (rest, name),
            ({**tensors, name: torch.zeros(*tensors[name].shape, 2)}, f"{name!r} has shape"),
            ({**tensors, "surplus.weight": torch.zeros(1)}, "1 tensor too many: 'surplus.weight'"),
        ):
            save_file(broken, place / file, metadata={"format": "pt"})
            with pytest.raises(CheckpointError) as error:
                check_contents(model)
            assert text in str(error.value)
            assert "\n" not in str(error.value)
        (place / file).write_bytes(whole)


@some_families
def test_a_broken_late_component_is_refused_before_anything_runs(
    family: str, tmp_path: Path
) -> None:
    place = tiny_families.made(family, tmp_path)
    # The autoencoder's, which is loaded last.
    autoencoders = ("vae/", "hunyuan_vae.", "F32T4C128_AE.")
    (file,) = (each for each in CASES[family].files if each.startswith(autoencoders))
    save_file({**load_file(place / file), "surplus": torch.zeros(1)}, place / file)
    seen: list[Event] = []
    with pytest.raises(CheckpointError, match="'surplus'"):
        seen.extend(everyframe.stream(Request(**options_of(lambda _: place, family))))
    assert not any(isinstance(event, StageStarted) for event in seen)


# ---------------------------------------------------------------- runs


@every_family
def test_stages_and_steps_are_events(family: str, runs: Runs) -> None:
    """Each stage loads its components, tells of each step that it announced, and is done."""
    stages: list[tuple[str, tuple[str, ...]]] = []
    for event in runs(family):
        if isinstance(event, StageStarted):
            stage, loaded, steps = event, [], 0
        elif isinstance(event, ComponentLoaded):
            loaded.append(event.component)
        elif isinstance(event, Step):
            steps += 1
            assert (event.stage, event.step, event.num_steps) == (
                stage.stage, steps, stage.num_steps
            )  # fmt: skip
        elif isinstance(event, StageDone):
            assert steps == stage.num_steps
            stages.append((event.stage, tuple(loaded)))
    assert tuple(stages) == CASES[family].stages


@some_families
def test_each_of_several_videos_is_that_of_its_seed(family: str, runs: Runs) -> None:
    several = frames_by_seed(runs(family, num_videos=2))
    assert not np.array_equal(several[3], several[4])
    assert np.array_equal(several[3], frames_of(runs(family)))
    assert np.array_equal(several[4], frames_of(runs(family, seed=4)))


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(0, marks=pytest.mark.slow, id="fewest steps"),
        pytest.param(1, id="whole sampler"),
    ],
)
@every_family
def test_a_run_equals_its_reference(family: str, number: int, tiny_models: Models) -> None:
    reference = CASES[family].reference
    steps = reference.steps[number]
    # By the kernel of a run for which nothing is certified: other kernels round differently.
    with by_kernel("math"):
        wanted = reference.frames(tiny_models(family), steps)
    video = everyframe.generate(
        **{**reference.request, "num_inference_steps": steps},
        model=model_of(tiny_models, family), output="float",
    )  # fmt: skip
    assert isinstance(video, everyframe.Video)
    assert video.frames.shape == wanted.shape
    assert np.abs(video.frames - wanted).max() < reference.close
    # The comparison means something: the frames are neither flat nor clipped away.
    assert wanted.std() > 0.01


@pytest.mark.parametrize(
    ("family", "options"),
    [
        pytest.param("opensora-1.2", {"image": tiny_families.PICTURE, "num_frames": 21}, id="1.2"),
        pytest.param("opensora2", {}, id="2.0"),
        pytest.param(
            "opensora2",
            {"image": None, "first_frame": "flux", "first_frame_resolution": "video"},
            id="first picture",
        ),
        pytest.param("svd", {}, id="svd"),
        pytest.param("inpaint", {}, id="inpaint"),
    ],
)
def test_a_default_dtype_of_the_caller_changes_no_frame(
    family: str, options: dict[str, Any], tiny_models: Models
) -> None:
    """Scripts set it; and a thread that loads a model by transformers, for all others."""
    request = Request(**options_of(tiny_models, family, **options))
    wanted = frames_of(list(everyframe.stream(request)))
    torch.set_default_dtype(torch.bfloat16)
    try:
        got = frames_of(list(everyframe.stream(request)))
    finally:
        torch.set_default_dtype(torch.float32)
    assert np.array_equal(got, wanted)


@every_family
def test_a_resumed_run_equals_an_unbroken_one(
    family: str, runs: Runs, tiny_models: Models, tmp_path: Path
) -> None:
    options = options_of(tiny_models, family)
    folder = interrupt(tmp_path, 1, **options)
    again = list(resume_run(folder))
    assert np.array_equal(frames_of(again), frames_of(runs(family)))
    steps = [event.step for event in again if isinstance(event, Step) and event.stage == "denoise"]
    assert steps[0] == 2, "what was done is not done again"


# ---------------------------------------------------------------- memory and precision


@some_families
def test_offloaded_weights_give_the_bits_of_resident_ones(family: str, tiny_models: Models) -> None:
    """From the host's memory, and out of the files that they are stored in."""
    request = Request(**options_of(tiny_models, family))
    prepared = prepare(request)
    given = initial_videos(request, prepared.plan)[0].inputs
    resident = planned_frames(prepared, unchanged, inputs=given)
    assert resident.std() > 0.01
    for streams in (False, True):
        change = with_components(block_offload=True, from_disk=streams)
        assert np.array_equal(planned_frames(prepared, change, inputs=given), resident)


#: Open-Sora 2.0 with its deep autoencoder stands for both: convolutions of the other one take six
#: seconds where bfloat16 is emulated.
every_family_in_half_precision = pytest.mark.parametrize(
    "family", slow_unless({*tiny_families.OURS} - {"opensora2"}, tiny_families.OURS)
)

#: Of frames in 0..1, on average: two steps of a random network under guidance, decoded as narrow.
#: Most has Step-Video, 0.015 and 0.001.
BUDGETS = {"bf16": 0.02, "fp16": 0.002}


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
@every_family_in_half_precision
def test_each_precision_is_within_its_budget(family: str, dtype: str, runs: Runs) -> None:
    events = runs(family, dtype=dtype, force=True)
    wide, narrow = frames_of(runs(family)), frames_of(events)
    assert 0 < np.abs(wide - narrow).mean() < BUDGETS[dtype]
    assert np.sqrt(np.mean((wide - narrow) ** 2)) < 2.5 * BUDGETS[dtype]
    (planned,) = (event for event in events if isinstance(event, Planned))
    stored = {part.name: part.precision.parameters for part in planned.plan.components}
    assert {stored[name] for name in stored.keys() - CASES[family].float32_in_fp16} == {
        {"bf16": "bfloat16", "fp16": "float16"}[dtype]
    }
    if dtype == "fp16":
        assert {stored[name] for name in CASES[family].float32_in_fp16} <= {"float32"}


# ---------------------------------------------------------------- dry runs


class SeenCalls:
    """Calls of modules as (class, inputs, outputs): on real tensors, and on those of dry runs."""

    def __init__(self) -> None:
        self.real: set[Any] = set()
        self.dry: set[Any] = set()

    def see(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        kinds = {each.device.type for each in _tensors((args, result))}
        if kinds:
            call = (type(module).__name__, _signature(args), _signature(result))
            (self.real if kinds == {"cpu"} else self.dry).add(call)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


def _signature(value: Any) -> tuple[Any, ...]:
    """Shapes and dtypes.

    One number a sample is a timestep, which schedulers have in any dtype; a mask that hides nothing
    is left out by transformers.
    """
    return tuple(
        (tuple(each.shape), str(each.dtype) if each.ndim > 1 else "")
        for each in _tensors(value)
        if each.dtype != torch.bool
    )


def seen_calls(options: dict[str, Any]) -> SeenCalls:
    """What is called while that is planned and run."""
    seen = SeenCalls()
    handle = register_module_forward_hook(seen.see)
    try:
        everyframe.generate(**options)
    finally:
        handle.remove()
    return seen


@pytest.fixture
def no_saved_dry_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dry runs are made, and not found in this process or in the cache folder."""
    monkeypatch.setattr(dry_runs, "_DONE", {})
    monkeypatch.setenv("EVERYFRAME_CACHE", str(tmp_path))


@pytest.mark.usefixtures("no_saved_dry_runs")
@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
@every_family_in_half_precision
def test_a_dry_run_calls_what_the_run_calls(family: str, dtype: str, tiny_models: Models) -> None:
    """The same modules, with inputs and outputs of the same shapes and dtypes."""
    options = options_of(tiny_models, family, dtype=dtype, force=True)
    seen = seen_calls({**options, **CASES[family].read_whole})
    assert len(seen.real) > 50
    assert seen.dry - seen.real == set()
    assert seen.real - seen.dry == set()


@pytest.mark.usefixtures("no_saved_dry_runs")
def test_a_run_that_leaves_its_dry_run_is_seen(tiny_models: Models) -> None:
    """Planted: a text shorter than the one that a dry run takes."""
    seen = seen_calls(options_of(tiny_models, "opensora-1.2"))
    shorter = {name for name, *_ in seen.real - seen.dry}
    assert {"CaptionEmbedder", "CrossAttention", "STDiT3Block"} <= shorter
