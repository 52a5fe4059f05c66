"""This user's key and what it signs: created once, whole, and never somebody else's."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from everyframe.core.errors import CorruptRunError
from everyframe.runs.folder import RunFolder
from everyframe.runs.signature import check_files, is_signed, key_file, sign

VALUES = {"place": "/here", "request": {"image": "cat.png", "sizes": (1, 2)}}


@pytest.fixture(autouse=True)
def _new_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_the_key_lies_in_the_state_folder_for_this_user_alone(tmp_path: Path) -> None:
    assert not is_signed({**VALUES, "signature": "0" * 64})
    assert not key_file().exists(), "asking makes none"
    assert is_signed(sign(VALUES))
    assert key_file() == tmp_path / "state" / "everyframe" / "run-key"
    assert (key_file().stat().st_mode & 0o777, key_file().stat().st_size) == (0o600, 32)
    assert [*key_file().parent.iterdir()] == [key_file()]


def test_one_changed_value_is_seen() -> None:
    mine = sign(VALUES)
    assert is_signed({**mine, "request": {"image": "cat.png", "sizes": [1, 2]}}), "as in JSON"
    assert not is_signed({**mine, "place": "/there"})
    assert not is_signed({**mine, "more": None})
    assert not is_signed({**mine, "signature": "\ud800"}), "JSON may hold lone surrogates"
    assert not is_signed({**mine, "request": {"image": "dog.png", "sizes": [1, 2]}})
    assert not is_signed(VALUES)
    for wrong in (None, 5, "", "ä", mine["signature"].upper()):
        assert not is_signed({**mine, "signature": wrong})


def test_another_users_signature_is_none_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = sign(VALUES)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
    assert not is_signed(theirs)
    assert is_signed(sign(VALUES))
    assert not is_signed(theirs)


@pytest.mark.parametrize("what", ["mode", "short", "long", "link", "folder"])
def test_a_key_that_others_may_know_is_none_and_stays(what: str) -> None:
    mine, key = sign(VALUES), key_file()
    if what == "mode":
        key.chmod(0o644)
    elif what in ("short", "long"):
        key.write_bytes(key.read_bytes()[:31] if what == "short" else key.read_bytes() + b"x")
    else:
        key.rename(key.with_name("elsewhere"))
        key.symlink_to("elsewhere") if what == "link" else key.mkdir()
    facts = os.lstat(key)
    assert not is_signed(mine)
    assert "signature" not in sign(VALUES)
    assert os.lstat(key) == facts


def test_a_key_that_is_not_ours_to_read_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, own = sign(VALUES), os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    assert not is_signed(mine)


def test_without_a_place_for_a_key_nothing_is_signed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert "signature" not in sign(VALUES)
    assert not is_signed({**VALUES, "signature": "0" * 64})


#: How often processes create the key at once.
_TURNS = 10


def _sign(barrier: Any, found: Any) -> None:
    for _ in range(_TURNS):
        barrier.wait(60)
        found.put(sign(VALUES)["signature"])


def test_processes_that_create_the_key_at_once_have_the_same() -> None:
    fork = multiprocessing.get_context("fork")
    barrier, found = fork.Barrier(4 + 1), fork.Queue()
    processes = [fork.Process(target=_sign, args=(barrier, found), daemon=True) for _ in range(4)]
    for process in processes:
        process.start()
    for _ in range(_TURNS):
        barrier.wait(60)
        signatures = {found.get(timeout=60) for _ in processes}
        assert signatures == {sign(VALUES)["signature"]}
        assert [*key_file().parent.iterdir()] == [key_file()]
        key_file().unlink()
    for process in processes:
        process.join()


@pytest.mark.parametrize("name", ["tensors", "state.json.unfinished", "answers/3", "pipe"])
def test_a_run_that_leads_out_of_its_folder_is_refused(name: str, tmp_path: Path) -> None:
    """What is read, written or swept out would be elsewhere."""
    run, elsewhere = RunFolder(tmp_path / "run"), tmp_path / "elsewhere"
    (run.path / "answers").mkdir(parents=True)
    elsewhere.mkdir()
    (elsewhere / "kept.safetensors").touch()
    run.write_run({})
    check_files(run.path)
    if name == "pipe":
        os.mkfifo(run.path / name)
    else:
        (run.path / name).symlink_to(elsewhere)
    with pytest.raises(CorruptRunError, match=f"{name} is a link or no plain file"):
        run.lock()
    assert not (run.path / "lock").exists()
    assert [*elsewhere.iterdir()] == [elsewhere / "kept.safetensors"]
