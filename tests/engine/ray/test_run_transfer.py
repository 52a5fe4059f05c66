"""A run's folder, copied while it is written: consistent, complete, and never out of its folder."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from everyframe.core.errors import CorruptRunError
from everyframe.core.events import Note
from everyframe.core.request import Request
from everyframe.core.serialization import from_jsonable, to_jsonable
from everyframe.engine.persistence import writer_for_rank
from everyframe.engine.ray.input_transfer import absolute_models, read_inputs
from everyframe.engine.ray.message_bytes import from_bytes, to_bytes
from everyframe.engine.ray.run_transfer import RunChanges, RunReader, with_texts, write_changes
from everyframe.runs.folder import RunFolder, new_run
from everyframe.runs.run_state import RunStateWriter, SaveOptions
from everyframe.runs.tensor_store import TensorStore, hashes_in


def begin(root: Path, request: Request | None = None) -> RunFolder:
    folder = new_run(root, "a-run")
    written = to_jsonable(Request(prompt="a") if request is None else request)
    folder.write_run({"request": written, "plan": None, "place": "/there"})
    return folder


def save(folder: RunFolder, value: float) -> None:
    """Write a state with one tensor, and remove the last one, as a run does."""
    store = TensorStore(folder.tensors)
    kept = to_jsonable({"latents": np.full(100, value)}, store.keep)
    folder.write_state({"takes": [kept], "value": value})
    store.sweep(hashes_in(kept))


def read(folder: RunFolder) -> tuple[float, float]:
    """The state's own number, and that in its tensor."""
    state = folder.state()
    assert state is not None
    latents = from_jsonable(state["takes"][0], TensorStore(folder.tensors).fetch)["latents"]
    return state["value"], float(latents[0])


def test_a_copy_follows_the_states_of_a_run(tmp_path: Path) -> None:
    here, there = begin(tmp_path / "here"), new_run(tmp_path / "there", "a-run")
    reader = RunReader(here, is_lead=True)
    for value in (1.0, 2.0):
        save(here, value)
        changes = from_bytes(to_bytes("state", reader.changes()))[1]
        write_changes(there, changes, tmp_path, {})
        assert read(there) == (value, value)
        assert reader.changes() is None
    assert there.run()["place"] == str(tmp_path)
    assert there.is_own()
    assert len(list(there.tensors.iterdir())) == 1


def test_a_copy_of_a_folder_at_work_is_always_whole(tmp_path: Path) -> None:
    """A tensor without its state, or a state without its tensor, would not be read back."""
    here, there = begin(tmp_path / "here"), new_run(tmp_path / "there", "a-run")
    save(here, 0.0)
    is_over = threading.Event()

    def write_on() -> None:
        for value in range(1, 150):
            save(here, float(value))
        is_over.set()

    threading.Thread(target=write_on).start()
    reader, values = RunReader(here, is_lead=True), set[float]()
    while not is_over.is_set():
        changes = reader.changes()
        if changes is not None:
            write_changes(there, changes, tmp_path, {})
        if there.state() is not None:
            state, tensor = read(there)
            assert state == tensor
            values.add(state)
    assert len(values) > 3


def test_a_run_that_is_removed_removes_nothing_elsewhere(tmp_path: Path) -> None:
    here = begin(tmp_path / "here")
    save(here, 1.0)
    reader = RunReader(here, is_lead=True)
    assert reader.changes() is not None
    here.remove()
    assert reader.changes() is None


def test_a_copy_tells_only_what_is_new(tmp_path: Path) -> None:
    folder = begin(tmp_path)
    save(folder, 1.0)
    reader = RunReader(folder, is_lead=False, is_copy=True)
    assert reader.changes() is None
    save(folder, 2.0)
    changes = reader.changes()
    assert changes is not None
    assert changes.run is None
    assert len(changes.files) == 2
    assert len(changes.removed) == 1


@pytest.mark.parametrize(
    "name", ["../out", "/etc/x", "tensors/../../x.safetensors", "run.json", "lock", "a.py"]
)
def test_a_name_that_is_none_of_a_runs_is_refused(tmp_path: Path, name: str) -> None:
    folder = begin(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    for changes in (RunChanges(None, {name: np.zeros(1, np.uint8)}), RunChanges(None, {}, (name,))):
        with pytest.raises(CorruptRunError, match="no file of a run"):
            write_changes(folder, changes, tmp_path, {})
    assert sorted(tmp_path.rglob("*")) == before


def test_a_state_of_another_group_is_written_beside(tmp_path: Path) -> None:
    """Each machine of several groups has its part of the run."""
    folder = begin(tmp_path)
    other = RunFolder(tmp_path / "other", 2)
    other.path.mkdir()
    save(other, 3.0)
    changes = RunReader(other, is_lead=False).changes()
    assert changes is not None
    write_changes(folder, changes, tmp_path, {})
    assert read(RunFolder(folder.path, 2)) == (3.0, 3.0)


@pytest.mark.parametrize("data", [b"", b"abc", to_bytes("x", [1])[:-1], b"\x00" * 8 + b"[]"])
def test_a_message_that_is_cut_off_is_an_error(data: bytes) -> None:
    with pytest.raises(CorruptRunError):
        from_bytes(data)


def test_a_message_holds_arrays_and_our_own_data() -> None:
    value = {"request": Request(prompt="é"), "frames": np.arange(6, dtype=np.uint8).reshape(2, 3)}
    name, found = from_bytes(to_bytes("event", value))
    assert (name, found["request"]) == ("event", value["request"])
    assert np.array_equal(found["frames"], value["frames"])


def test_input_files_travel_and_come_back_under_their_own_names(tmp_path: Path) -> None:
    here, node = tmp_path / "here", tmp_path / "node"
    here.mkdir()
    (here / "cat.png").write_bytes(b"cat")
    (here / "clip").mkdir()
    (here / "clip" / "0.png").write_bytes(b"0")
    request = Request(prompt="cat.png", image="cat.png", last_image=str(here / "clip"))
    inputs = from_bytes(to_bytes("inputs", read_inputs(request, here)))[1]
    texts = inputs.write(node)
    there = with_texts(request, texts)
    assert Path(there.image).read_bytes() == b"cat"
    assert Path(there.image).name == "cat.png"
    assert (Path(there.last_image) / "0.png").read_bytes() == b"0"
    # Any text may be a parameter of a pipeline, also one that begins like the home of nobody.
    for words in ("~ nobody is called so", "~nobody-is-called-so/x"):
        assert not read_inputs(Request(prompt="a", option={"words": words}), here).names
        assert absolute_models(Request(prompt="a", model=words), here) == {}
    # A prompt is no file, whatever it says.
    assert there.prompt == "cat.png"
    assert with_texts(there, {node: here for here, node in texts.items()}) == request


def test_models_and_loras_are_named_by_their_place_and_listed_ones_by_name(tmp_path: Path) -> None:
    for name in ("model", "shapes"):
        (tmp_path / name).mkdir()
    (tmp_path / "a.safetensors").write_bytes(b"")
    given: dict[str, Any] = {"prompt": "a", "loras": [{"file": "a.safetensors", "strength": 0.5}]}
    request = Request(**given, model="model")
    there = with_texts(request, absolute_models(request, tmp_path))
    assert there.model == str(tmp_path / "model")
    assert there.loras[0].file == str(tmp_path / "a.safetensors")
    assert there.loras[0].strength == 0.5
    listed = Request(prompt="a", model="shapes")
    assert absolute_models(listed, tmp_path) == {}
    previews = Request(prompt="a", preview_decoder="a.safetensors")
    assert absolute_models(previews, tmp_path) == {"a.safetensors": f"{tmp_path}/a.safetensors"}


def test_models_that_are_named_again_stay_where_they_are(tmp_path: Path) -> None:
    """A whole model would be read into memory and sent to every node."""
    (tmp_path / "model").mkdir()
    for name in ("model/weights.safetensors", "cat.png"):
        (tmp_path / name).write_bytes(b"x")
    named = {"model": "model", "controlnet": "model", "image": "cat.png"}
    assert list(read_inputs(None, tmp_path, named).names) == ["cat.png"]


def test_the_first_rank_of_another_group_saves_where_it_is(tmp_path: Path) -> None:
    """The folder of rank 0 is on another machine; under a name of ours it has a place here too."""
    world = SimpleNamespace(broadcast_object=lambda *given: "/on/another/machine/a-run")
    parallel = SimpleNamespace(videos_per_group=(1, 1))
    here: Any = SimpleNamespace(
        plan=SimpleNamespace(parallel=parallel), group=1, videos=[1],
        parallel=SimpleNamespace(world=world, video_group=SimpleNamespace(is_lead=True)),
    )  # fmt: skip
    for parts in (tmp_path, None):
        how = SaveOptions(None, parts=parts)
        writer = writer_for_rank(here, how, RunStateWriter(None, how))
        if parts is None:
            assert writer.folder is None
            assert [type(each) for each in writer.notes()] == [Note]
        else:
            assert writer.folder == RunFolder(tmp_path / "a-run", 1)
            assert writer.folder.path.is_dir()


def test_a_named_run_has_its_name_once(tmp_path: Path) -> None:
    assert new_run(tmp_path, "a").name == "a"
    assert new_run(tmp_path, "a").name == "a-1"
    assert SaveOptions(tmp_path).name is None
