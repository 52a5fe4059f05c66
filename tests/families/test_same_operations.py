"""A stage's run and its dry run make the same operations, for every component of every family.

Both call the same code, so what can differ is what it is called on: example inputs of other sizes
or dtypes than a run has, and what a run does beside that code. Operations are those that torch
dispatches in the first call of each stage, with the shapes and dtypes of all tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor
from torch.nn import Identity
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from everyframe.core.events import StageStarted
from everyframe.core.request import Request
from everyframe.engine import run as engine_run
from everyframe.engine.run import stream
from everyframe.families.inpaint import stages as inpaint_stages
from everyframe.families.inpaint import vae_stages as inpaint_vae_stages
from everyframe.families.inpaint.denoiser import Denoiser as InpaintDenoiser
from everyframe.families.opensora import stages as opensora_stages
from everyframe.families.opensora2 import first_picture_stages as opensora2_first
from everyframe.families.opensora2 import stages as opensora2_stages
from everyframe.families.stepvideo import stages as stepvideo_stages
from everyframe.families.svd import stages as svd_stages
from everyframe.families.svd import vae as svd_vae
from everyframe.hardware.switches import Turn
from everyframe.planning.resolve import PreparedPlan, prepare
from everyframe.runs.run_state import SaveOptions
from everyframe.runtime.loading import load_component
from everyframe.runtime.stages import denoise_stage
from everyframe.runtime.stages.denoise_stage import VideoDenoiseStage
from everyframe.runtime.stages.templates import ComponentStage, LatentPiece
from helpers.tiny_checkpoints import families

FRAMES = np.random.default_rng(0).integers(0, 255, (17, 32, 32, 3), np.uint8)
#: As long as each encoder reads, which is what a plan counts on.
LONG = {"prompt": "a red circle moves to the right " * 100, "truncate_prompt": True}
#: What is asked for beside `families`: the largest inputs that a plan counts on.
ASKED: dict[str, dict[str, Any]] = {
    "opensora-1.0": LONG,
    "opensora-1.2": {**LONG, "extend": FRAMES, "num_frames": 34},
    "opensora2": {
        "first_frame": "flux",
        "first_frame_resolution": "video",
        "image": None,
        "last_image": FRAMES[0],
    },
    "opensora2-dcae": {"extend": FRAMES.repeat(2, 0), "num_frames": 40},
    "svd": {},
    "inpaint": LONG,
    "stepvideo": LONG,
}
MODULES = (
    opensora_stages, opensora2_first, opensora2_stages, svd_stages, stepvideo_stages,
    inpaint_stages, inpaint_vae_stages,
)  # fmt: skip
STAGES = {
    value
    for module in MODULES
    for value in vars(module).values()
    # By module first: Python 3.10 takes `tuple[str, ...]` for a type, too.
    if isinstance(value, type) and value.__module__ == module.__name__
    if issubclass(value, ComponentStage) and not inspect.isabstract(value)
}

Operation = tuple[str, tuple[Any, ...]]
#: torch dispatches it for some memory layouts only, and kernels of attention choose those.
OF_LAYOUT = "aten.contiguous.default"


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lists the operations of each stage's first call."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[str, list[Operation]] = {}
        self.outside: list[str] = []
        self._stage, self._depth = "", 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)]
        if self._stage and str(func) != OF_LAYOUT:
            shapes = tuple((tuple(each.shape), each.dtype) for each in tensors)
            self.found[self._stage].append((str(func), shapes))
        return result

    @contextmanager
    def part(self, name: str, step: str) -> Iterator[None]:
        """Context: operations belong to that stage, if it is that step's first time."""
        before, name = self._stage, f"{name}: {step}"
        is_first = not before and name not in self.found
        if is_first:
            self._stage, self.found[name] = name, []
        self._depth += 1
        try:
            with self if is_first else nullcontext():
                yield
        finally:
            self._stage = before
            self._depth -= 1

    @contextmanager
    def unlisted(self) -> Iterator[None]:
        """Context: operations are not listed."""
        before, self._stage = self._stage, ""
        try:
            yield
        finally:
            self._stage = before

    def look(self, module: Any, args: Any) -> None:
        """Note a module that is called outside of what a dry run calls."""
        if not self._depth:
            self.outside.append(type(module).__name__)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder()

    def wrap(cls: Any, method: str, step: str) -> None:
        real = getattr(cls, method)

        def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
            with found.part(getattr(self, "name", "denoise"), step):
                return real(self, *args, **kwargs)

        monkeypatch.setattr(cls, method, recorded)

    def wrap_sample(cls: Any) -> None:
        real = cls.sample

        def sample(self: Any, *args: Any) -> Iterator[Any]:
            steps = real(self, *args)
            while True:
                with found.part(self.name, "step"):
                    step = next(steps, None)
                if step is None:
                    return
                yield step

        monkeypatch.setattr(cls, "sample", sample)

    for cls in STAGES:
        if issubclass(cls, VideoDenoiseStage):
            wrap(cls, "denoiser", "denoiser")
            wrap_sample(cls)
        elif cls is not inpaint_stages.DenoiseStage:
            wrap(cls, "compute", "call")
    # The scheduler around it is diffusers' own, and in no dry run.
    wrap(InpaintDenoiser, "__call__", "step")
    # The guard looks at each result, which a dry run has no values for.
    seen = denoise_stage.value_range

    def value_range(value: Any) -> Any:
        with found.unlisted():
            return seen(value)

    monkeypatch.setattr(denoise_stage, "value_range", value_range)
    return found


def request(family: str, folder: Path) -> Request:
    asked = families.asked(family, **ASKED[family])
    return Request(model=str(families.made(family, folder)), **asked)


def run(asked: Request, recorder: Recorder) -> dict[str, list[Operation]]:
    """Operations of the run; the recorder has the modules that it called elsewhere."""
    handle = None
    try:
        for event in stream(asked, keep=SaveOptions(None), num_threads=1):
            if isinstance(event, StageStarted) and handle is None:
                recorder.found = {}  # those of the plan's own dry runs
                handle = register_module_forward_pre_hook(recorder.look)
    finally:
        assert handle is not None
        handle.remove()
    found, recorder.found = recorder.found, {}
    return found


def run_dry(prepared: PreparedPlan, recorder: Recorder) -> dict[str, list[Operation]]:
    """Operations of the plan's dry runs, called on the modules that the run loads."""
    model: Any = prepared.model
    calls = {call.key: call for call in model.dry_run_calls(prepared.plan.settings)}
    # As the run has torch set.
    with engine_run.torch_set_by(prepared.plan, Turn(is_alone=True)):
        for call in calls.values():
            modules = {
                name: load_component(
                    prepared.plan.component(name),
                    partial(model.builder.take, name),
                    *model.weights(name),
                    outputs=model.builder.outputs(name),
                )
                for name in call.components
            }
            call.call(modules, "cpu")
    found, recorder.found = recorder.found, {}
    return found


def differences(
    real: dict[str, list[Operation]], dry: dict[str, list[Operation]]
) -> dict[str, Any]:
    """The first operation of each step that differs; empty if none does."""
    found: dict[str, Any] = {}
    for name in {**real, **dry}:
        a, b = real.get(name, []), dry.get(name, [])
        pairs = (pair for pair in zip(a, b, strict=False) if pair[0] != pair[1])
        first = next(pairs, (len(a), len(b)) if len(a) != len(b) else None)
        if first is not None:
            found[name] = first
    return found


def test_all_stages_of_all_families_are_recorded() -> None:
    assert {family.partition("-")[0] for family in ASKED} == {
        cls.__module__.split(".")[2] for cls in STAGES
    }
    assert len(STAGES) == 23


#: Each family; of their older and deeper versions, `test_contract.py` has a test like it.
VERSIONS = ("opensora-1.0", "opensora2-dcae")


@pytest.mark.parametrize(
    "family",
    [pytest.param(each, marks=[pytest.mark.slow] * (each in VERSIONS)) for each in ASKED],
)
def test_run_and_dry_run_make_the_same_operations(
    family: str, recorder: Recorder, tmp_path_factory: pytest.TempPathFactory
) -> None:
    asked = request(family, tmp_path_factory.getbasetemp())
    real = run(asked, recorder)
    prepared = prepare(asked, num_threads=1)
    components = {call.component for call in prepared.model.dry_run_calls(prepared.plan.settings)}  # type: ignore[attr-defined]
    assert components == {each.name for each in prepared.plan.components}
    recorder.found = {}
    dry = run_dry(prepared, recorder)
    assert list(real) == list(dry)
    assert min(map(len, real.values())) > 5
    assert differences(real, dry) == {}
    assert recorder.outside == []


@pytest.fixture(scope="module")
def svd(tmp_path_factory: pytest.TempPathFactory) -> Request:
    return request("svd", tmp_path_factory.getbasetemp())


def test_example_inputs_of_another_size_are_found(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, svd: Request
) -> None:
    right = svd_stages.DecodeStage.example_inputs

    def wrong(self: Any, device: str) -> LatentPiece:
        return LatentPiece(right(self, device).latents[:-1])

    prepared = prepare(svd, num_threads=1)
    monkeypatch.setattr(svd_stages.DecodeStage, "example_inputs", wrong)
    real = run(svd, recorder)
    assert [*differences(real, run_dry(prepared, recorder))] == ["decode: call"]


def test_what_a_run_alone_computes_is_found(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, svd: Request
) -> None:
    """In what a dry run calls, and beside it."""
    prepared = prepare(svd, num_threads=1)
    dry = run_dry(prepared, recorder)
    encode, step = svd_vae.encode, svd_stages.ImageEmbedStage.store

    def doubled(vae: Any, config: Any, picture: Tensor, settings: Any) -> Tensor:
        return encode(vae, config, picture.double().float(), settings)

    def stored(self: Any, videos: Any, results: Any) -> None:
        Identity()(results[0])
        step(self, videos, results)

    monkeypatch.setattr(svd_vae, "encode", doubled)
    monkeypatch.setattr(svd_stages.ImageEmbedStage, "store", stored)
    assert [*differences(run(svd, recorder), dry)] == ["given frames: call"]
    assert recorder.outside == ["Identity"]
