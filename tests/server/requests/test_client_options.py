"""What clients may set: no option that is a path, and none that only a run's own user sets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="serving needs the extra everyframe[server]")

from everyframe.core.errors import InputError
from everyframe.core.options import Options, facts_of, option
from everyframe.server.data_folder import MEDIA
from everyframe.server.requests import client_options
from everyframe.server.requests.client_fields import CHECKED_PATHS, CLIENTS_CHOICES
from everyframe.server.requests.models import ModelRegistry
from helpers.server_app import ServedApp

#: What an option's help says if its value is a place.
_PLACE = re.compile(r"\b(file|folder|hub id|picture|image|video)s?\b", re.IGNORECASE)
#: Options whose help speaks of such a thing, and whose values are numbers or words of a list.
_NO_PLACE = {
    "clip_at", "clip_frames", "first_frame", "first_frame_resolution", "fit", "fps",
    "image_fading", "image_oscillation",
    "noise_aug_strength", "num_videos", "preview", "prompt", "quality", "quantize",
}  # fmt: skip


def all_options() -> Iterator[tuple[type[Options], str]]:
    for options in client_options.owning_classes():
        for name in options.model_fields:
            yield options, name


PATHS = sorted({
    name for options, name in all_options()
    if facts_of(options, name)["names_path"] and name not in {*CHECKED_PATHS, *MEDIA}
})  # fmt: skip


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedApp]:
    with ServedApp(tmp_path_factory.mktemp("options") / "server") as served:
        yield served


def test_an_option_whose_help_speaks_of_a_place_is_marked_as_a_path() -> None:
    spoken = {
        name for options, name in all_options()
        if _PLACE.search(options.model_fields[name].description or "")
        and not facts_of(options, name)["names_path"]
        and not facts_of(options, name)["python_only"]
    }  # fmt: skip
    assert spoken == _NO_PLACE


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("route", ["/v1/videos", "/v1/videos/sync", "/v1/plan"])
def test_an_option_that_is_a_path_is_refused(app: ServedApp, route: str, name: str) -> None:
    answer = app.client.post(route, json={"prompt": "a red circle", name: "canny"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "not_supported", name)
    assert "paths of the server" in error["message"]


def test_those_that_were_open_once_are_among_them() -> None:
    assert {"preview_decoder", "controlnet", "components", "compiled", "report"} <= {*PATHS}


def test_no_schema_offers_a_refused_option(app: ServedApp) -> None:
    refused = client_options.refused_fields()
    offered = {
        each["name"] for model in app.client.get("/v1/models").json()["data"]
        for each in app.client.get(f"/v1/models/{model['id']}").json()["options"]
    }  # fmt: skip
    assert {"seed", "num_frames"} <= offered
    assert not offered & set(refused)


def test_a_new_option_is_closed_where_it_is_a_path_or_its_users_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Planted(Options):
        table: str | None = option("A table.", accepts=("PathLike[str]",))
        own: bool = option("A switch.", default=False, person_only=True)
        open: bool = option("A switch.", default=False)

    monkeypatch.setattr(client_options, "owning_classes", lambda: [Planted])
    refused = client_options.refused_fields.__wrapped__()
    assert {"table", "own"} <= set(refused)
    assert "open" not in refused
    assert {"attention", "preview"} == CLIENTS_CHOICES


def test_a_pipelines_own_text_names_no_file_of_the_folder_of_the_server(
    app: ServedApp, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "frames").mkdir()
    monkeypatch.chdir(tmp_path)
    body = {"prompt": "a red circle", "option": {"video": ["frames"]}}
    answer = app.client.post("/v1/videos", json=body)
    assert answer.status_code == 400
    assert "could name a file" in answer.json()["error"]["message"]


@pytest.mark.parametrize("given", ["=shapes", " =shapes", "shapes="])
def test_a_served_model_has_a_name_and_a_target(given: str) -> None:
    with pytest.raises(InputError, match="models must be NAME or NAME=FOLDER"):
        ModelRegistry([given])
