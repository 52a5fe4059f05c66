"""What is on disk is listed by kind, and only what was named is removed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import constants

from everyframe.cli.main import main
from everyframe.engine.stored_files import KINDS, find_kind, select_entries, stored_entries
from everyframe.runs.folder import RunFolder, new_run


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two repositories, two runs, and a file of each other kind; a link leads out of one."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("EVERYFRAME_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("EVERYFRAME_RUNS", str(tmp_path / "runs"))
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "mine.txt").write_text("mine")
    for name in ("hpcai-tech--OpenSora-STDiT-v3", "somebody--else"):
        blobs = tmp_path / "hub" / f"models--{name}" / "blobs"
        blobs.mkdir(parents=True)
        (blobs / "a").write_bytes(b"x" * 1000)
        (blobs.parent / "outside").symlink_to(tmp_path / "outside")
    for name in (
        "calibrations/k/64x64.json", "certificates/d/p.json", "certificates/compiled/k/a.json",
        "inductor/x", "native/k.so", "repairs/d/m.json", "latent_colors/d.json", "dry_runs/a.json",
        "digests.json",
    ):  # fmt: skip
        path = tmp_path / "cache" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 10)
    (tmp_path / "runs").mkdir()
    for _ in range(2):
        new_run(tmp_path / "runs").write_run({"record": {}})
    return tmp_path


def listed(kind: str) -> list[str]:
    return [entry.name for entry in stored_entries([find_kind(kind)])]


def test_every_kind_is_listed(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = {entry.kind for entry in stored_entries()}
    assert kinds == {kind.name for kind in KINDS}
    assert listed("models") == ["hpcai-tech/OpenSora-STDiT-v3", "somebody/else"]
    assert listed("certificates") == ["d"]
    assert listed("compiled") == ["k"]
    assert listed("colors") == ["d.json"]
    assert main(["cache", "list"]) == 0
    assert main(["cache", "list", "models"]) == 0
    out = capsys.readouterr().out
    assert "opensora-1.2" in out
    assert str(disk / "hub") in out
    assert main(["cache", "list", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    model = next(row for row in rows if row["name"] == "somebody/else")
    assert 1000 <= model["num_bytes"] < 1200, "what a link leads to does not count"


def test_nothing_goes_without_yes(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "remove", "models", "--all"]) == 2
    assert "--yes removes models: 2 entries, 2 kB" in capsys.readouterr().err
    assert len(listed("models")) == 2


def test_one_is_removed_and_nothing_beside_it(disk: Path) -> None:
    assert main(["cache", "remove", "models", "somebody/else", "--yes"]) == 0
    assert listed("models") == ["hpcai-tech/OpenSora-STDiT-v3"]
    assert (disk / "outside" / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize("kind", [kind.name for kind in KINDS])
def test_all_of_a_kind_are_removed_and_no_other(kind: str, disk: Path) -> None:
    before = {entry.kind for entry in stored_entries()}
    assert main(["cache", "remove", kind, "--all", "--yes"]) == 0
    assert {entry.kind for entry in stored_entries()} == before - {kind}
    assert main(["cache", "remove", kind, "--all", "--yes"]) == 0


def test_what_has_nothing_to_remove_says_so_as_json(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache", "remove", "runs", "--all", "--yes"]) == 0
    capsys.readouterr()
    assert main(["cache", "remove", "runs", "--all", "--json"]) == 0
    removed = json.loads(capsys.readouterr().out)
    assert removed == {"type": "removed", "kind": "runs", "names": [], "num_bytes": 0}


def test_a_run_in_use_stays(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = listed("runs")
    with_lock = RunFolder(disk / "runs" / first).lock()
    try:
        assert [entry.name for entry in select_entries(find_kind("runs"), None)] == [second]
        assert main(["cache", "remove", "runs", first, "--yes"]) == 2
        assert "is in use" in capsys.readouterr().err
    finally:
        with_lock.release()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["model", "--all", "--yes"], "did you mean 'models'"),
        (["models", "somebody/els", "--yes"], "did you mean 'somebody/else'"),
        (["models", "--yes"], "or --all"),
        (["models", "somebody/else", "--all", "--yes"], "or --all"),
        (["models", "../outside", "--yes"], "there is no '../outside'"),
    ],
)
def test_what_is_wrong_removes_nothing(
    words: list[str], says: str, disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = [entry.name for entry in stored_entries()]
    assert main(["cache", "remove", *words]) == 2
    assert says in capsys.readouterr().err
    assert [entry.name for entry in stored_entries()] == before
