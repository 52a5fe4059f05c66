"""An engine that stays: whatever came before, its videos are those of `generate`, bit for bit.

Each kind of state that a run leaves on components has its leftover planted: what a run left is
removed, and without that the next video would be another.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import everyframe
from everyframe.core.errors import EveryframeError, InputError
from everyframe.core.events import ComponentLoaded, Event, RunSaved, Step
from everyframe.core.request import Request
from everyframe.engine.workers import warm_workers
from everyframe.engine.workers.executor import WarmModel
from everyframe.runtime.components.component_cache import CachedComponents
from everyframe.runtime.components.component_state import ComponentState
from helpers.loras import files as lora_files
from helpers.loras.files import as_lora, factors_for
from helpers.out_of_memory import TOO_LITTLE, before_calls
from helpers.slow_rows import slow_unless
from helpers.tiny_checkpoints import families as tiny_families
from helpers.tiny_checkpoints import opensora as tiny_opensora

Models = Callable[[str], Path]

SHAPES: Mapping[str, Any] = {
    "prompt": "a red circle", "num_frames": 4, "height": 32, "width": 32, "num_inference_steps": 3,
    "seed": 3,
}  # fmt: skip


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Notes are warnings, and none is looked at here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", everyframe.EveryframeWarning)
        yield


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts components that are read from their files for an engine."""
    counted, load = [0], CachedComponents._loaded

    def counting(self: CachedComponents, *given: Any) -> Any:
        counted[0] += 1
        return load(self, *given)

    monkeypatch.setattr(CachedComponents, "_loaded", counting)
    return counted


def frames(made: Any) -> np.ndarray:
    videos = made if isinstance(made, list) else [made]
    return np.concatenate([video.frames for video in videos])


def check(
    engine: everyframe.Engine, model: Path | None, requests: Sequence[Mapping[str, Any]]
) -> None:
    """Each request gives the frames of `generate`, one after the other in one engine."""
    own = {} if model is None else {"model": str(model)}
    for number, request in enumerate(requests):
        made = engine.generate(**request, output="float", run_dir="off")
        expected = everyframe.generate(**own, **request, output="float", run_dir="off")
        assert np.array_equal(frames(made), frames(expected)), (number, request)


@pytest.mark.slow
def test_the_embedded_model(loads: list[int]) -> None:
    again = {**SHAPES, "seed": 4, "prompt": "a blue square"}
    others = ({"height": 48}, {"dtype": "bf16"}, {"num_videos": 2})
    with everyframe.load() as engine:
        check(engine, None, [SHAPES, SHAPES, again])
        assert loads == [3]
        check(engine, None, [{**SHAPES, **other} for other in others])
        check(engine, None, [{**SHAPES, "chain": 2, "num_frames": 8}, SHAPES])
        assert loads == [6]
        (model,) = engine.describe()
        assert (model.model, model.devices, model.is_busy) == ("shapes", ("cpu",), False)
        assert model.num_bytes > 1e6
    assert engine.describe() == []
    with pytest.raises(EveryframeError, match="closed"):
        engine.generate(**SHAPES)


FAST = ("ltx",)


@pytest.mark.parametrize("name", slow_unless(FAST, tiny_families.NAMES))
def test_every_family(name: str, tiny_models: Models, loads: list[int]) -> None:
    asked, folder = tiny_families.asked(name), tiny_models(name)
    others = [{"dtype": "bf16"}] * (name not in FAST) + [{"num_inference_steps": 3}]
    with everyframe.load(folder) as engine:
        check(engine, folder, [asked])
        first = loads[0]
        check(engine, folder, [{**asked, "seed": 4}, *({**asked, **o} for o in others), asked])
        assert first > 0
        assert loads[0] <= 2 * first  # once in each precision
        assert engine.describe()


def test_a_prompt_is_encoded_once() -> None:
    with everyframe.load() as engine:

        def components(**more: Any) -> set[str]:
            found: list[Event] = []
            engine.generate(**{**SHAPES, **more}, run_dir="off", on_event=found.append)
            return {event.component for event in found if isinstance(event, ComponentLoaded)}

        assert components() == {"text_encoder", "denoiser", "vae"}
        assert components(seed=4) == {"denoiser", "vae"}
        assert components(prompt="a blue square") == {"text_encoder", "denoiser", "vae"}
        assert components() == {"denoiser", "vae"}


@pytest.mark.parametrize(
    ("name", "methods"),
    [
        (None, ("taylor2@4", "exact", "taylor2@4")),
        pytest.param(
            None,
            ("taylor2@4", "abm2@4h", "exact", "unipc@4g50", "taylor2@4"),
            marks=pytest.mark.slow,
        ),
        pytest.param("svd", ("deepcache@3", "exact", "deepcache@3"), marks=pytest.mark.slow),
        pytest.param(
            "ltx", ("taylor1@3", "exact", "taylor2@4", "taylor1@3"), marks=pytest.mark.slow
        ),
    ],
)
def test_lossy_methods_begin_each_video_anew(
    name: str | None, methods: Sequence[str], tiny_models: Models, loads: list[int]
) -> None:
    folder = None if name is None else tiny_models(name)
    asked = SHAPES if name is None else tiny_families.asked(name)
    requests = [{**asked, "num_inference_steps": 6, "quality": each} for each in methods]
    with everyframe.load(folder) as engine:
        check(engine, folder, requests[:1])
        first = loads[0]
        check(engine, folder, [*requests[1:], {**requests[0], "num_videos": 2, "seed": 4}])
        assert loads == [first], "one model for all methods"


def lora_for(folder: Path, place: Path, file: str, within: str, seed: int) -> str:
    state = {name: tensor.float() for name, tensor in load_file(folder / file).items()}
    factors = factors_for(state, lora_files.matrices(state, within), alpha=0.6, seed=seed)
    return str(lora_files.write(place, as_lora(factors)))


@pytest.mark.parametrize(
    ("name", "file", "within"),
    [
        ("opensora-1.2", "model.safetensors", "blocks"),
        pytest.param(
            "ltx", "transformer/diffusion_pytorch_model.safetensors", "transformer_blocks",
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_loras_come_and_go_without_loading_the_model_again(
    name: str, file: str, within: str, dtype: str, tiny_models: Models, tmp_path: Path,
    loads: list[int],
) -> None:  # fmt: skip
    folder = tiny_models(name)
    a, b = (lora_for(folder, tmp_path / f"{n}.safetensors", file, within, n) for n in (0, 1))
    asked = tiny_families.asked(name, dtype=dtype)
    with everyframe.load(folder) as engine:
        check(engine, folder, [asked])
        first = loads[0]
        given: list[Any] = [[(a, 1.0)], [(a, 0.5)], [(b, 1.0), (a, 1.0)], []]
        check(engine, folder, [{**asked, "loras": loras} for loras in given])
        assert loads == [first]


@pytest.mark.slow
def test_eight_bit_weights_with_loras(tiny_models: Models, tmp_path: Path) -> None:
    folder = tiny_models("opensora-1.2")
    lora = lora_for(folder, tmp_path / "a.safetensors", "model.safetensors", "blocks", 0)
    asked = tiny_families.asked("opensora-1.2", quantize="int8")
    with everyframe.load(folder) as engine:
        check(engine, folder, [asked, {**asked, "loras": [lora]}, asked])


@pytest.mark.slow
def test_repairs_stay_with_the_run_that_needed_them(
    tmp_path: Path, tiny_models: Models, loads: list[int]
) -> None:
    folder = tiny_opensora.overflowing(tiny_models("opensora-1.2"), tmp_path / "model")
    half = {"dtype": "float16", "force": True, "device": "cpu", "num_frames": 1}
    asked = tiny_families.asked("opensora-1.2", **half)
    with everyframe.load(folder) as engine:
        found: list[Event] = []
        for _ in range(2):  # the second one has the repair in its plan
            engine.generate(**asked, forget_repairs=True, run_dir="off", on_event=found.append)
            check(engine, folder, [{**asked, "forget_repairs": True}, asked])
    assert any(event.type == "repaired" for event in found)
    assert loads[0] > 3


@pytest.mark.slow
def test_memory_fallbacks_stay_with_the_run_that_needed_them(tiny_models: Models) -> None:
    folder = tiny_models("opensora-1.2")
    asked = tiny_families.asked("opensora-1.2")
    failures: list[int] = []

    def fail_once(module: torch.nn.Module, args: Any) -> None:
        if type(module).__name__ == "STDiT3" and len(failures) < 2:
            failures.append(1)
            raise RuntimeError(TOO_LITTLE)

    with everyframe.load(folder) as engine:
        check(engine, folder, [asked])
        found: list[Event] = []
        with before_calls(fail_once):
            engine.generate(**asked, run_dir="off", on_event=found.append)
        causes = [event.to_json()["cause"] for event in found if event.type == "repaired"]
        # The first time what other runs left in memory is freed, and nothing else is changed.
        assert causes == ["memory"]
        check(engine, folder, [asked])


PLANTED: Mapping[str, Callable[[torch.nn.Module], object]] = {
    "hook": lambda module: module.register_forward_hook(lambda m, args, result: result * 1.5),
    "weight": lambda module: [p.mul_(1.5) for p in module.parameters()],
    "dtype": lambda module: module.to(torch.bfloat16).to(torch.float32),
    "child": lambda module: [
        setattr(part, name, torch.nn.Identity())
        for part in module.modules()
        for name, child in part.named_children()
        if "Norm" in type(child).__name__
    ],
}


@pytest.mark.parametrize("name", slow_unless(("weight",), PLANTED))
@pytest.mark.parametrize("is_caught", [True, False])
def test_a_leftover_is_caught(
    name: str, is_caught: bool, tiny_models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, asked = tiny_models("opensora-1.2"), tiny_families.asked("opensora-1.2")
    give_back = CachedComponents.give_back

    def plant(self: CachedComponents) -> None:
        for component, (_, entry) in self._lent.items():
            if component == "denoiser":
                PLANTED[name](entry.module)
        give_back(self)

    with everyframe.load(folder) as engine:
        check(engine, folder, [asked])
        monkeypatch.setattr(CachedComponents, "give_back", plant)
        if not is_caught:
            monkeypatch.setattr(ComponentState, "restore", lambda self: "")
        engine.generate(**asked, run_dir="off")
        monkeypatch.setattr(CachedComponents, "give_back", give_back)
        made = frames(engine.generate(**asked, output="float", run_dir="off"))
    expected = frames(
        everyframe.generate(model=str(folder), **asked, output="float", run_dir="off")
    )
    assert np.array_equal(made, expected) == is_caught


@pytest.mark.slow
def test_the_least_recently_used_go_when_memory_is_needed(loads: list[int]) -> None:
    peak = everyframe.plan(Request(**SHAPES, dtype="fp32")).peak_bytes
    with everyframe.load(max_memory=f"{1.25 * peak / 1e6:.1f} MB") as engine:
        for dtype in ("fp32", "bf16", "fp32"):
            engine.generate(**SHAPES, dtype=dtype, run_dir="off")
        plan = engine.plan(Request(**SHAPES, dtype="fp32"))
        warm = sum(model.num_bytes for model in engine.describe())
    assert warm < plan.device.free_memory
    assert loads[0] > 6


def test_what_stays_counts_as_free_for_the_plan() -> None:
    with everyframe.load() as engine:
        engine.generate(**SHAPES, run_dir="off")
        engine._cache.freed = lambda facts: facts.with_freed({"cpu": 0}, {"cpu": 2**60})  # type: ignore[method-assign]
        plan = engine.plan(SHAPES["prompt"])
        assert plan.device.free_memory == plan.device.memory


@pytest.mark.slow
def test_an_interrupted_run_leaves_the_engine_as_it_was(tmp_path: Path) -> None:
    with everyframe.load() as engine:
        run = ""
        request = Request(**SHAPES)
        with closing(engine.stream(request)) as events:
            for event in events:
                run = event.path if isinstance(event, RunSaved) else run
                if isinstance(event, Step) and event.stage == "denoise" and event.step == 2:
                    break
        check(engine, None, [SHAPES])
        resumed = engine.resume(run)
        assert np.array_equal(frames(resumed), frames(everyframe.generate(**SHAPES, run_dir="off")))


@pytest.mark.slow
def test_threads_share_an_engine() -> None:
    requests = [{**SHAPES, "seed": seed, "height": 32 + 16 * (seed % 2)} for seed in range(6)]
    expected = [frames(everyframe.generate(**each, run_dir="off")) for each in requests]
    made: dict[int, np.ndarray] = {}
    with everyframe.load() as engine:

        def work(numbers: Sequence[int]) -> None:
            for number in numbers:
                made[number] = frames(engine.generate(**requests[number], run_dir="off"))

        threads = [threading.Thread(target=work, args=([n, n + 3],)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(np.array_equal(made[number], each) for number, each in enumerate(expected))


def test_another_model_is_another_engine(tiny_models: Models) -> None:
    with everyframe.load() as engine, pytest.raises(InputError, match="this engine is of shapes"):
        engine.generate(**SHAPES, model=str(tiny_models("svd")))
    record = everyframe.generate(**SHAPES, run_dir="off").record
    other = {**record, "request": {**record["request"], "model": "opensora-1.2"}}
    with everyframe.load() as engine, pytest.raises(InputError, match="this engine is of shapes"):
        engine.generate(from_record=other)
    with pytest.raises(InputError, match="unknown model"):
        everyframe.load("no-such-model")


def test_a_run_is_resumed_with_frames_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERYFRAME_RUNS", str(tmp_path))
    with everyframe.load() as engine:
        with closing(engine.stream(**SHAPES)) as events:
            next(event for event in events if isinstance(event, Step))
        with pytest.raises(InputError, match='output must be "uint8" or "float"'):
            engine.resume(output="bytes")  # type: ignore[arg-type]
        assert frames(engine.resume(output="float")).dtype == np.float32
    assert not list(tmp_path.iterdir())


def test_what_is_in_memory_includes_what_workers_of_several_devices_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    theirs = WarmModel("shapes", 1, 0.0, ("cuda:0", "cuda:1"))
    monkeypatch.setattr(warm_workers.WarmWorkers, "describe", lambda self: [theirs])
    with everyframe.load() as engine:
        engine.generate(**SHAPES, run_dir="off")
        ours, *others = engine.describe()
    assert ours.devices == ("cpu",)
    assert others == [theirs]


@pytest.mark.slow
def test_a_run_of_several_devices_is_resumed_in_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERYFRAME_RUNS", str(tmp_path))
    with everyframe.load() as engine:
        with closing(engine.stream(**SHAPES, device="cpu", num_devices=2)) as events:
            next(event for event in events if isinstance(event, Step))
        made = engine.resume()
    expected = everyframe.generate(**SHAPES, run_dir="off")
    assert np.allclose(frames(made), frames(expected), atol=1)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_an_isolated_engine() -> None:
    with everyframe.load(isolate=True, num_inference_steps=3) as engine:
        found: list[Event] = []
        engine.generate(**SHAPES, run_dir="off")
        made = engine.generate(**SHAPES, run_dir="off", on_event=found.append)
        assert np.array_equal(frames(made), frames(everyframe.generate(**SHAPES, run_dir="off")))
        assert sum(event.seconds for event in found if isinstance(event, ComponentLoaded)) < 0.1
        (model,) = engine.describe()
        assert model.num_bytes > 1e6
        assert engine.plan(**SHAPES).settings.num_inference_steps == 3
        two = engine.generate(**SHAPES, num_devices=2, run_dir="off")
        assert np.allclose(frames(two), frames(made), atol=1)
    assert warm_workers.WarmWorkers().describe() == []
