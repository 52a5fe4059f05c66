"""Reading tensors: equal to what the formats' own libraries read; what is no tensor is refused."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from everyframe.checkpoints.folder import check_inside
from everyframe.checkpoints.locate import locate
from everyframe.checkpoints.tensor_file import open_checkpoint
from everyframe.core.errors import CheckpointError

State = dict[str, torch.Tensor]


@pytest.fixture
def state() -> State:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(6, 5, generator=generator)
    return {
        "w": base,
        "half": torch.randn(3, 2, generator=generator).to(torch.bfloat16),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "count": torch.tensor([1, 2, 3]),
        "mask": torch.tensor([True, False]),
        "none": torch.empty(0, 3),
        "small": torch.randn(4, generator=generator).to(torch.float8_e4m3fn),
    }


def check_equal(path: Path, expected: State) -> None:
    opened = open_checkpoint(path)
    assert set(opened.names()) == set(expected)
    for name, tensor in expected.items():
        assert opened.shape(name) == tuple(tensor.shape)
        assert opened.dtype(name) == tensor.dtype
        loaded = opened.load(name)
        assert loaded.dtype == tensor.dtype
        assert loaded.is_contiguous()
        # Read and not computed: the bits are the same.
        assert torch.equal(loaded.double(), tensor.double())


def test_safetensors(tmp_path: Path, state: State) -> None:
    path = tmp_path / "model.safetensors"
    save_file(state, path)
    check_equal(path, load_file(path))
    check_equal(tmp_path, state)


@pytest.mark.parametrize("suffix", [".pth", ".pt", ".bin"])
def test_pickle_with_views_and_strides(tmp_path: Path, state: State, suffix: str) -> None:
    # Tensors that share one storage, start inside it, or lie transposed in it.
    state |= {"rows": state["w"][2:4], "turned": state["w"].t(), "column": state["w"][:, 1]}
    path = tmp_path / f"model{suffix}"
    torch.save(state, path)
    check_equal(path, torch.load(path, weights_only=True))


def test_pickle_of_the_old_format(tmp_path: Path, state: State) -> None:
    del state["small"]  # the old format has no float8
    path = tmp_path / "old.pth"
    torch.save(state, path, _use_new_zipfile_serialization=False)
    check_equal(path, state)


def test_load_casts_and_owns_its_memory(tmp_path: Path, state: State) -> None:
    path = tmp_path / "model.safetensors"
    save_file(state, path)
    opened = open_checkpoint(path)
    first = opened.load("w", dtype=torch.float16)
    assert first.dtype == torch.float16
    opened.load("w").zero_()
    assert torch.equal(opened.load("w"), state["w"])


def test_unknown_tensor_names_the_nearest(tmp_path: Path, state: State) -> None:
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no tensor 'scaler'; did you mean 'scalar'"):
        open_checkpoint(tmp_path).load("scaler")


def save_shards(folder: Path, *, suffix: str) -> State:
    folder.mkdir()
    parts = [{"a": torch.randn(2)}, {"b": torch.randn(3)}, {"c": torch.randn(4)}]
    stem, end = ("model", ".safetensors") if suffix == ".safetensors" else ("pytorch_model", ".bin")
    table: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        name = f"{stem}-{number:05d}-of-00003{end}"
        save_file(part, folder / name) if end == ".safetensors" else torch.save(part, folder / name)
        table |= dict.fromkeys(part, name)
    (folder / f"{stem}{end}.index.json").write_text(json.dumps({"weight_map": table}))
    return {name: tensor for part in parts for name, tensor in part.items()}


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_shards(tmp_path: Path, suffix: str) -> None:
    state = save_shards(tmp_path / "model", suffix=suffix)
    check_equal(tmp_path / "model", state)
    assert len(open_checkpoint(tmp_path / "model").files) == 3


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_shards(tmp_path / "model", suffix=".safetensors")
    (tmp_path / "model" / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks 1 of 3 shards.*model-00002-of-00003"):
        open_checkpoint(tmp_path / "model")


def test_a_shard_that_lacks_its_tensor(tmp_path: Path) -> None:
    save_shards(tmp_path / "model", suffix=".safetensors")
    save_file({"x": torch.ones(1)}, tmp_path / "model" / "model-00002-of-00003.safetensors")
    with pytest.raises(CheckpointError, match=r"promises 1 tensors.*: b"):
        open_checkpoint(tmp_path / "model")


def test_an_index_may_not_leave_its_folder(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"outside its own folder"):
        open_checkpoint(index)


def test_a_folder_with_shards_and_no_index(tmp_path: Path) -> None:
    save_shards(tmp_path / "model", suffix=".safetensors")
    (tmp_path / "model" / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"more than one checkpoint"):
        open_checkpoint(tmp_path / "model")


class Evil:
    """Unpickled without care, it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.folder,)


@pytest.mark.parametrize("how", ["zip", "old", "bare"])
def test_an_evil_pickle_is_refused_and_not_run(tmp_path: Path, how: str) -> None:
    trace = tmp_path / "trace"
    payload = {"w": torch.ones(2), "evil": Evil(trace)}
    path = tmp_path / "evil.pth"
    if how == "bare":
        path.write_bytes(pickle.dumps({"evil": Evil(trace)}, protocol=2))
    else:
        torch.save(payload, path, _use_new_zipfile_serialization=how == "zip")
    with pytest.raises(CheckpointError, match=r"is refused") as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value)
    assert "weights_only" not in str(caught.value)  # no advice to switch the check off
    assert not trace.exists()
    # The plant works: the same file does run code where nobody is careful.
    if how != "bare":
        torch.load(path, weights_only=False)
        assert trace.exists()


@pytest.mark.parametrize("share", [0.0, 0.3, 0.95])
def test_a_truncated_pickle(tmp_path: Path, state: State, share: float) -> None:
    path = tmp_path / "model.pth"
    torch.save(state, path)
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(CheckpointError, match=r"model.pth"):
        open_checkpoint(path)


def test_wrapped_state_dicts(tmp_path: Path, state: State) -> None:
    path = tmp_path / "train.pth"
    torch.save({"epoch": 3, "ema": state, "optimizer": {"lr": 0.1}}, path)
    check_equal(path, state)
    torch.save({"ema": state, "model": {"w": torch.zeros(1)}}, path)
    with pytest.raises(CheckpointError, match=r"several state dicts: ema, model"):
        open_checkpoint(path)
    assert set(open_checkpoint(path, payload="model")) == {"w"}
    with pytest.raises(CheckpointError, match=r"has no 'emma'"):
        open_checkpoint(path, payload="emma")


@pytest.mark.parametrize("held", [[1, 2], {"lr": 0.1}, {}, 3.0])
def test_a_pickle_without_tensors(tmp_path: Path, held: object) -> None:
    torch.save(held, tmp_path / "x.pth")
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path / "x.pth")


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointError, match=r"looked for .*safetensors.*it holds notes.txt"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"ends in '\.txt'"):
        open_checkpoint(tmp_path / "notes.txt")
    with pytest.raises(CheckpointError, match=r"there is no file"):
        open_checkpoint(tmp_path / "none.safetensors")


def test_a_file_cut_after_opening(tmp_path: Path, state: State) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": state["w"]}, path)
    opened = open_checkpoint(path)
    os.truncate(path, path.stat().st_size - 4)
    with pytest.raises(CheckpointError, match=r"truncated"):
        opened.load("w")


def test_a_variant_of_a_folder(tmp_path: Path) -> None:
    for name, value in (("model", 1.0), ("model.fp16", 2.0), ("model.bf16", 3.0)):
        save_file({"x": torch.tensor([value])}, tmp_path / f"{name}.safetensors")
    assert open_checkpoint(tmp_path).load("x").item() == 1
    assert open_checkpoint(tmp_path, variant="bf16").load("x").item() == 3
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="more than one checkpoint"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.bf16.safetensors").unlink()
    assert open_checkpoint(tmp_path).load("x").item() == 2
    with pytest.raises(CheckpointError, match=r"looked for .*bf16.safetensors, but it holds model"):
        open_checkpoint(tmp_path, variant="bf16")


@pytest.mark.parametrize("variant", [None, "fp16"])
def test_shards_of_a_variant(tmp_path: Path, variant: str | None) -> None:
    names = [f"model-0000{number}-of-00002.fp16.safetensors" for number in (1, 2)]
    for number, name in enumerate(names):
        save_file({f"x{number}": torch.zeros(1)}, tmp_path / name)
    table = {"weight_map": {"x0": names[0], "x1": names[1]}}
    (tmp_path / "model.safetensors.index.fp16.json").write_text(json.dumps(table))
    assert set(open_checkpoint(tmp_path, variant=variant)) == {"x0", "x1"}


def test_a_small_file_does_not_unpack_to_a_large_tensor(tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    torch.save({"w": torch.zeros(1).expand(1_000_000, 1_000_000)}, path)
    with pytest.raises(CheckpointError, match="shows 4 bytes over and over"):
        open_checkpoint(path)


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path, state: State) -> None:
    save_file(state, tmp_path / "elsewhere.safetensors")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
    with pytest.raises(CheckpointError, match="is a link out of"):
        open_checkpoint(tmp_path / "model")
    # That very file may be named.
    check_equal(tmp_path / "model" / "model.safetensors", state)


def test_a_link_that_leads_to_itself_is_no_obstacle_beside_a_model(
    tmp_path: Path, state: State
) -> None:
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "loop.json").symlink_to("loop.json")
    check_inside(tmp_path, tmp_path.iterdir())
    assert locate(str(tmp_path)).kind == "folder"


@pytest.mark.parametrize("shard", ["../a.safetensors", "/a.safetensors", "b/../a.safetensors"])
def test_shards_lie_beside_their_index(tmp_path: Path, state: State, shard: str) -> None:
    save_file(state, tmp_path / "a.safetensors")
    index = tmp_path / "model" / "model.safetensors.index.json"
    index.parent.mkdir()
    index.write_text(json.dumps({"weight_map": dict.fromkeys(state, shard)}), encoding="utf-8")
    with pytest.raises(CheckpointError, match="outside its own folder"):
        open_checkpoint(index)


def test_no_shard_is_an_index(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": index.name}}), encoding="utf-8")
    with pytest.raises(CheckpointError, match="names an index as a shard"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
def test_a_large_tensor_is_cast_in_pieces(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bits that casting it at once gives."""
    monkeypatch.setattr("everyframe.checkpoints.tensor_file._AT_ONCE", 100)
    whole = torch.randn(7, 33, generator=torch.Generator().manual_seed(0))
    save_file({"x": whole}, tmp_path / "a.safetensors")
    found = open_checkpoint(tmp_path / "a.safetensors").load("x", dtype=dtype)
    assert found.dtype == dtype
    assert torch.equal(found, whole.to(dtype))
