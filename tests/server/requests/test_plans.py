"""The plans that the server remembers: what it keeps of requests has a bound."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra [server] is not installed")

import everyframe
from everyframe.core.plan import Plan
from everyframe.core.request import Request
from everyframe.engine.workers.executor import InfeasiblePlanError, WarmModel
from everyframe.server.requests import plans
from helpers.server_app import PlanningExecutor, ServedApp, key


def test_nothing_is_kept_of_plans_that_fail(tmp_path: Path) -> None:
    """A client may ask for any number of kinds, and each is wrong in a way of its own."""
    with ServedApp(tmp_path / "server") as app:
        for number in range(1, 20):
            fields = {"prompt": "a red circle", "num_frames": 7, "guidance_scale": number}
            assert app.client.post("/v1/plan", json=fields).status_code == 400
        gc.collect()
        assert not app.context.plans._locks
        assert not app.context.plans._plans


def test_the_oldest_plans_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_MOST_PLANS", 3)
    with ServedApp(tmp_path / "server") as app:
        for number in (1, 2, 3, 1, 4, 1, 2):
            fields = {"prompt": "a red circle", "guidance_scale": number}
            assert app.client.post("/v1/plan", json=fields).status_code == 200
        assert len(app.context.plans._plans) == 3
        asked = [request.guidance_scale for request in app.executor.requests]
    assert asked == [1, 2, 3, 4, 2]


class CuttingExecutor(PlanningExecutor):
    """Plans with a note that quotes what a text encoder of 37 letters does not read."""

    def plan(self, request: Request) -> Plan:
        plan = super().plan(request)
        cut = (request.prompt or "")[37:]
        settings = replace(plan.settings, negative_prompt=request.negative_prompt)
        notes = (f"its end is cut: {cut!r}",) if cut else ()
        return replace(plan, settings=settings, notes=notes)


def test_a_shared_plan_tells_nobody_what_another_asked_for(tmp_path: Path) -> None:
    keys = (key("ann", "a"), key("bob", "b"))
    ann, bob = ({"authorization": f"Bearer {each}"} for each in "ab")
    private = {
        "prompt": "a red circle moves to the right; its secret is 1234", "seed": 71,
        "negative_prompt": "a secret in the other prompt, which is long too", "model": "shapes",
    }  # fmt: skip
    other = {"prompt": "a blue circle", "negative_prompt": "blur", "seed": 3, "model": "shapes"}
    with ServedApp(tmp_path / "server", CuttingExecutor(), keys=keys) as app:

        def post(path: str, body: object, headers: dict[str, str]) -> dict[str, object]:
            answer = app.client.post(path, json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            found: dict[str, object] = answer.json()
            return found

        (note,) = post("/v1/videos", private, ann)["warnings"]  # type: ignore[misc]
        assert note == "its end is cut: 'secret is 1234'"
        plan = post("/v1/plan", other, bob)
        assert (plan["seed"], plan["notes"]) == (3, [])
        details = plan["details"]
        assert isinstance(details, dict)
        settings = details["settings"]
        assert {name: settings[name] for name in other if name != "model"}.items() <= other.items()
        without_seed = {k: v for k, v in other.items() if k != "seed"}
        answers = [plan, post("/v1/plan", without_seed, bob), post("/v1/videos", other, bob)]
        for text in map(json.dumps, answers):
            assert "secret" not in text
        assert answers[1]["seed"] != 71
        assert len(app.executor.requests) == 2, "one for ann, one for all"


class FolderExecutor(PlanningExecutor):
    """Names models by their folders, as the library does."""

    def plan(self, request: Request) -> Plan:
        assert request.model is not None
        try:
            return replace(super().plan(request), model=request.model)
        except InfeasiblePlanError as error:
            raise InfeasiblePlanError(replace(error.plan, model=request.model)) from None

    def describe(self) -> list[WarmModel]:
        return [WarmModel(str(FOLDER), 1000, 1.0, ("cpu",))]


FOLDER = Path(everyframe.__file__).parent / "checkpoints" / "shapes"


def test_clients_know_a_model_by_its_name(tmp_path: Path) -> None:
    with ServedApp(tmp_path / "server", FolderExecutor(), models=(f"mine={FOLDER}",)) as app:
        body = {"prompt": "a red circle", "num_inference_steps": 4}
        answers = [
            app.client.post("/v1/plan", json=body),
            app.client.post("/v1/plan", json={**body, "size": "16384x64"}),
            app.client.post("/v1/videos", json=body),
            app.client.get("/v1/models/mine"),
            app.client.get("/v1/system"),
        ]
        assert [answer.status_code for answer in answers] == [200, 422, 200, 200, 200]
        for answer in answers:
            assert str(FOLDER) not in answer.text
        assert answers[0].json()["details"]["model"] == answers[0].json()["model"] == "mine"
        assert answers[1].json()["error"]["details"]["model"] == "mine"
        assert [each["model"] for each in answers[-1].json()["warm"]] == ["mine"]
