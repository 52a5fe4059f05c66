"""Quality over the API: a budget is refused, planned, run and reported as from Python."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="the extra [server] is not installed")

import everyframe
from everyframe.checkpoints.folder import cache_folder
from everyframe.core.events import Event, Events, FramesDecoded
from everyframe.core.plan import Plan
from everyframe.core.request import Request
from everyframe.engine.run import stream
from everyframe.engine.workers.executor import Executor
from everyframe.engine.workers.stop_switch import StopSwitch
from everyframe.engine.workers.warm_workers import WarmWorkers
from everyframe.engine.workers.worker_process import WorkerJob
from everyframe.fast_paths.calibrations import Measurement
from everyframe.planning.resolve import resolve
from everyframe.runs.run_state import SaveOptions
from everyframe.runtime.components.component_cache import ComponentCache
from helpers.calibrations import PROMPT, plant_calibration
from helpers.server_app import PlanningExecutor, ServedApp
from helpers.server_jobs import ended

SIZES: dict[str, Any] = {"num_frames": 4, "size": "32x32", "num_inference_steps": 9}
ASKED: dict[str, Any] = {"prompt": PROMPT, "seed": 3, **SIZES}
BOLD = "abm2@5e130"
#: With estimates that no run here comes to.
METHODS = {"unipc@7": Measurement(40.0, 9.0, 1.2), BOLD: Measurement(36.5, 9.0, 1.7)}
MEASURED = {
    "asked": "32dB", "method": BOLD, "why": "the fastest measured method that holds the budget",
    "worst_db": 36.5, "median_db": 36.5, "num_videos": 15, "gain": 1.7,
}  # fmt: skip


class HereExecutor(PlanningExecutor):
    """Plans and runs in this process, with components that stay; `frames` of its jobs, in turn."""

    def __init__(self) -> None:
        super().__init__()
        self._cache = ComponentCache()
        self.frames: list[np.ndarray[Any, Any]] = []

    def plan(self, request: Request) -> Plan:
        return resolve(request, freed=self._cache.freed)

    def run(
        self, job: WorkerJob, place: Path | None = None, stop: StopSwitch | None = None
    ) -> Events:
        assert job.request is not None
        keep = SaveOptions(job.root, as_uint8=True, cleans=False)
        return noted(self, stream(job.request, keep=keep, cache=self._cache))


class Workers(WarmWorkers):
    """The server's own executor; `frames` of its jobs, in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.frames: list[np.ndarray[Any, Any]] = []

    def run(
        self, job: WorkerJob, place: Path | None = None, stop: StopSwitch | None = None
    ) -> Events:
        return noted(self, super().run(job, place, stop))


def noted(executor: HereExecutor | Workers, events: Events) -> Iterator[Event]:
    """The events, of which frames are kept as they go by."""
    found = []
    for event in events:
        if isinstance(event, FramesDecoded):
            found.append(np.asarray(event.frames))
        yield event
    executor.frames.append(np.concatenate(found))


@pytest.fixture
def calibrated() -> Iterator[None]:
    plant_calibration(METHODS, **SIZES)
    yield
    shutil.rmtree(cache_folder() / "calibrations")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedApp]:
    with ServedApp(tmp_path / "server", HereExecutor(), runs=True) as app:
        yield app


def post(app: ServedApp, path: str, **fields: Any) -> dict[str, Any]:
    answer = app.client.post(path, json={**ASKED, **fields})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def made(app: ServedApp, **fields: Any) -> dict[str, Any]:
    """The job of a request, once it is done."""
    video = post(app, "/v1/videos", **fields)
    job = app.store.get(video["id"])
    assert job is not None
    ended(app.store, job, seconds=120)
    found: dict[str, Any] = app.client.get(f"/v1/videos/{job.id}").json()
    return found


def expected(**options: Any) -> np.ndarray[Any, Any]:
    video = everyframe.generate(**{**ASKED, **options}, run_dir="off")
    return np.asarray(video.frames)


def same_bits(mine: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any]) -> bool:
    if mine.dtype != np.uint8:
        mine = np.clip(np.round(mine * 255), 0, 255).astype(np.uint8)
    return np.array_equal(mine, theirs)


def test_a_plan_tells_what_was_chosen_and_measured(served: ServedApp, calibrated: None) -> None:
    plan = post(served, "/v1/plan", quality="32dB")
    assert plan["quality"] == plan["details"]["quality"] == MEASURED
    assert plan["num_inference_steps"] == 9, "those that the method gets over, too"
    mild = post(served, "/v1/plan", quality="36dB")
    assert (mild["quality"]["method"], mild["quality"]["worst_db"]) == ("unipc@7", 40.0)
    named = post(served, "/v1/plan", quality="ab2@4")["quality"]
    assert (named["method"], named["worst_db"]) == ("ab2@4", None)
    for exact in ({}, {"quality": "exact"}):
        assert post(served, "/v1/plan", **exact)["quality"] is None


def test_a_budget_without_a_measurement_is_exact_and_says_so(served: ServedApp) -> None:
    plan = post(served, "/v1/plan", quality="32dB")
    assert (plan["quality"]["method"], plan["quality"]["worst_db"]) == ("exact", None)
    assert "`everyframe calibrate` measures it" in plan["quality"]["why"]
    video = made(served, quality="32dB")
    assert video["quality"] == plan["quality"]
    assert any("all steps are exact" in note for note in video["warnings"])


def test_a_job_runs_by_the_method_and_tells_it(served: ServedApp, calibrated: None) -> None:
    video = made(served, quality="32dB")
    assert video["quality"] == MEASURED
    assert video["request"]["quality"] == "32dB"
    (planned,) = (each for each in served.store.events(video=video["id"]) if each.type == "planned")
    assert planned.data["quality"] == MEASURED
    record = served.client.get(f"/v1/videos/{video['id']}/content?variant=metadata").json()
    assert record["plan"]["quality"]["method"] == BOLD
    assert made(served)["quality"] is None
    assert made(served, quality=" 32DB ")["quality"]["method"] == BOLD
    (lossy, exact, again) = served.executor.frames
    assert same_bits(lossy, expected(quality="32dB"))
    assert same_bits(exact, expected())
    assert np.array_equal(again, lossy)
    assert not np.array_equal(exact, lossy)


def test_a_job_that_leaves_its_budget_goes_on_exactly_and_notes_it(served: ServedApp) -> None:
    plant_calibration({BOLD: Measurement(36.5, 1e-6, 1.7)}, **SIZES)
    video = made(served, quality="32dB")
    shutil.rmtree(cache_folder() / "calibrations")
    assert video["quality"]["method"] == BOLD
    assert any("all steps from here are exact" in note for note in video["warnings"])


@pytest.mark.parametrize("path", ["/v1/videos", "/v1/plan", "/v1/videos/sync"])
@pytest.mark.parametrize(
    ("quality", "words"),
    [
        ("500dB", "quality must be 20dB to 50dB, got '500dB'; for no loss at all: exact"),
        ("19dB", "20dB to 50dB"),
        ("abc", "quality must be exact, a budget of 20dB to 50dB, or a method such as ab2@8"),
        (32, "quality must be text, got 32"),
        ("abm3@5", "did you mean 'abm2'"),
        ("ab2@31", "31 of 9 steps can't be computed"),
        ("<b>32dB</b>", "20dB to 50dB"),
    ],
)
def test_a_wrong_quality_is_named_with_what_is_allowed(
    served: ServedApp, path: str, quality: Any, words: str
) -> None:
    answer = served.client.post(path, json={**ASKED, "quality": quality})
    assert answer.status_code == 400, answer.text
    assert answer.headers["content-type"].startswith("application/json")
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "quality"), error
    assert words in error["message"]
    assert served.store.list() == []


@pytest.mark.slow
def test_lossy_methods_leave_nothing_in_the_workers(tmp_path: Path, calibrated: None) -> None:
    """Whatever a video has left there, each has the bits of `generate`."""
    asked = ("taylor1@3", "exact", "32dB", "taylor2@5", "32dB", "taylor1@3", "exact")
    executor: Executor = Workers()
    with ServedApp(tmp_path / "server", executor, runs=True) as app:
        for number, quality in enumerate(asked):
            video = made(app, quality=quality)
            assert (video["quality"] or {}).get("method") == {
                "exact": None, "32dB": BOLD,
            }.get(quality, quality)  # fmt: skip
            frames = app.executor.frames[-1]
            assert same_bits(frames, expected(quality=quality)), (number, quality)
    executor.close()
