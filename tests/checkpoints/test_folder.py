"""JSON and folders that are not what they should be, in one line each."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from everyframe.checkpoints.digest import file_digest
from everyframe.checkpoints.folder import describe_missing, listing, read_json, weight_files
from everyframe.checkpoints.tensor_file import open_checkpoint
from everyframe.core.errors import CheckpointError


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"{", "line 1, column 2"),
        (b"[1]", "holds a JSON list"),
        (b"\xff\xfe", "can't be read as text"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_broken_json(tmp_path: Path, data: bytes, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        read_json(path)
    assert text in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("config", "most"),
    [
        ('{"num_layers": %d}', 2_000),
        ('{"text_config": {"num_hidden_layers": %d}}', 2_000),
        ('{"down_blocks": [{"layers": 2}], "transformer_layers": [1, %d]}', 2_000),
        ('{"num_train_timesteps": %d}', 100_000),
        ('{"solver_order": %d}', 100),
        ('{"layers_per_block": %d}', 2_000),
        ('{"transformer_layers_per_block": [1, [2, %d]]}', 2_000),
        ('{"text_config": {"max_position_embeddings": %d}}', 1 << 24),
    ],
)
def test_counts_beyond_any_model_are_refused(tmp_path: Path, config: str, most: int) -> None:
    """They would take hours to build, or all memory."""
    path = tmp_path / "config.json"
    path.write_text(config % most)
    read_json(path)
    path.write_text(config % (most + 1))
    with pytest.raises(CheckpointError, match=f"is {most + 1}; at most {most} are supported$"):
        read_json(path)


def test_json_that_is_there_and_that_is_not(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"depth": 2}')
    assert read_json(tmp_path / "config.json") == {"depth": 2}
    with pytest.raises(CheckpointError, match=r"looked for other.json, but it holds config.json"):
        read_json(tmp_path / "other.json")


def test_describe_missing(tmp_path: Path) -> None:
    assert "there is no folder" in describe_missing(tmp_path / "none", ["config.json"])
    assert "it is empty" in describe_missing(tmp_path, ["config.json"])
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.txt").write_text("")
    text = describe_missing(tmp_path, ["config.json", "*.safetensors"])
    assert "looked for config.json, *.safetensors, but it holds a.txt, sub/" in text
    assert "is a file" in describe_missing(tmp_path / "a.txt", ["x"])


def test_listing_is_cut() -> None:
    assert listing(list("abcdef"), limit=2) == "a, b and 4 more"
    assert listing(["a"]) == "a"


def test_weight_files_one_level_down(tmp_path: Path) -> None:
    (tmp_path / "vae").mkdir()
    for name in ("b.safetensors", "vae/a.pth", "readme.md"):
        (tmp_path / name).write_text("")
    assert weight_files(tmp_path) == [tmp_path / "b.safetensors", tmp_path / "vae" / "a.pth"]


def test_a_number_of_thousands_of_digits_is_reported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": %s}' % ("1" * 5000), encoding="utf-8")
    with pytest.raises(CheckpointError, match="is not usable JSON"):
        read_json(tmp_path / "config.json")


@pytest.mark.skipif(os.name != "posix", reason="named pipes")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    os.mkfifo(tmp_path / "model.safetensors")
    for read in (read_json, file_digest):
        with pytest.raises(CheckpointError, match="a pipe or a device"):
            read(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match="a pipe or a device"):
        open_checkpoint(tmp_path)
