"""What a name means, without a network, without torch, within milliseconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from huggingface_hub import constants

from everyframe.checkpoints import locate as locating
from everyframe.checkpoints.locate import find_part, locate, names_on_disk, overview
from everyframe.checkpoints.missing_files import missing_shards
from everyframe.checkpoints.model_zoo import HubPart, KnownModel, known_models
from everyframe.core.errors import CheckpointError, InputError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def _own_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))


def plant(cache: Path, repo_id: str, files: dict[str, bytes]) -> Path:
    """A repository in the hub cache's own layout."""
    repo = cache / f"models--{repo_id.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    (repo / "blobs").mkdir()
    snapshot = repo / "snapshots" / COMMIT
    for number, (name, data) in enumerate(files.items()):
        blob = repo / "blobs" / str(number)
        blob.write_bytes(data)
        link = snapshot / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
    return snapshot


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("shapes", "shapes"),
        ("SHAPES", "shapes"),
        ("opensora-1.2", "opensora-1.2"),
        ("hpcai-tech/OpenSora-STDiT-v3", "opensora-1.2"),
        ("16x256x256", "opensora-1.0-16x256x256"),
        ("opensora-1.0-16x512x512", "opensora-1.0-16x512x512"),
    ],
)
def test_known_names(given: str, meant: str) -> None:
    place = locate(given)
    assert place.name == meant
    assert place.asked == given
    assert (place.path is None) != (place.parts == ())


def test_nothing_on_disk_says_what_must_be_fetched() -> None:
    place = locate("opensora-1.2")
    assert not place.is_complete
    assert [part.part.role for part in place.parts] == ["denoiser", "vae", "text_encoder"]
    assert place.bytes_to_fetch == 4 * (1_207_643_972 + 393_341_007 + 4_762_310_656)
    assert place.bytes_on_disk == 0
    assert "config.json" in place.parts[0].missing


def test_names_and_aliases_are_unique() -> None:
    names = [name.casefold() for model in known_models() for name in (model.name, *model.aliases)]
    assert len(names) == len(set(names))
    for model in known_models():
        assert (model.embedded is None) != (model.parts == ())


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("shapez", "did you mean 'shapes'"),
        ("opensora-1.3x", "did you mean 'opensora-1.2'"),
        ("qqqq", "known models: shapes"),
        ("", "is empty"),
        ("opensora-1.1", "this is Open-Sora 1.1; supported: 1.0, 1.2"),
        ("hpcai-tech/Open-Sora", "opensora-1.0-16x256x256 or opensora-1.0-16x512x512"),
        ("hpcai-tech/OpenSora-VAE-v1.2", "ask for the model: opensora-1.2"),
        ("./nowhere", "no folder or file ./nowhere"),
        ("nowhere/model.safetensors", "nowhere does not exist either"),
    ],
)
def test_names_that_mean_nothing(given: str, text: str) -> None:
    with pytest.raises(InputError) as caught:
        locate(given)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_hub_id_that_nobody_listed(tmp_path: Path) -> None:
    place = locate("hpcai-tech/OpenSora-STDiT-v33")
    assert place.kind == "hub"
    assert not place.is_complete
    assert place.bytes_to_fetch is None
    assert "did you mean 'hpcai-tech/OpenSora-STDiT-v3'" in place.hint
    plant(tmp_path, "some/model", {"config.json": b"{}", "model.safetensors": b"1234"})
    place = locate("some/model")
    assert place.is_complete
    assert place.hint == ""
    assert place.bytes_to_fetch == 0
    assert place.bytes_on_disk == 6


PART = HubPart("denoiser", "o/n", (("config.json",), ("*.safetensors",)), num_parameters=10)


def test_a_part_is_complete_when_each_group_has_a_file(tmp_path: Path) -> None:
    snapshot = plant(tmp_path, "o/n", {"config.json": b"{}", "notes.md": b"mine not"})
    place = find_part(PART)
    assert place.folder == snapshot
    assert place.missing == ("*.safetensors",)
    assert place.bytes_to_fetch == 40 - 2
    (snapshot / "model.safetensors").write_bytes(bytes(38))
    place = find_part(PART)
    assert place.is_complete
    assert [path.name for path in place.files] == ["config.json", "model.safetensors"]


def test_a_missing_shard_and_a_dangling_link_are_not_complete(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}
    files = {
        "config.json": b"{}",
        "model.safetensors.index.json": json.dumps(index).encode(),
        "m-1.safetensors": b"1",
        "m-2.safetensors": b"2",
    }
    part = HubPart("denoiser", "o/n", PART.needs, ("*.index.json",))
    snapshot = plant(tmp_path, "o/n", files)
    assert find_part(part).is_complete
    (snapshot / "m-2.safetensors").resolve().unlink()
    assert find_part(part).missing == ("m-2.safetensors",)


def test_a_shard_tells_of_the_others_before_their_index_is_there(tmp_path: Path) -> None:
    part = HubPart("text_encoder", "o/n", (("config.json",), ("pytorch_model*.bin",)))
    files = {"config.json": b"{}", "pytorch_model-00001-of-00002.bin": b"1"}
    snapshot = plant(tmp_path, "o/n", files)
    place = find_part(part)
    assert place.missing == ("pytorch_model-00002-of-00002.bin",)
    (snapshot / "pytorch_model-00002-of-00002.bin").write_bytes(b"2")
    assert find_part(part).is_complete


def test_a_name_that_tells_of_very_many_shards_is_read_at_once(tmp_path: Path) -> None:
    """It took a minute."""
    began = time.monotonic()
    name = "m-00001-of-99999.safetensors"
    missing = missing_shards({name: tmp_path / name})
    assert time.monotonic() - began < 10
    assert (len(missing), missing[-1]) == (99998, "m-99999-of-99999.safetensors")


def test_folders_and_files(tmp_path: Path) -> None:
    model = tmp_path / "mine"
    model.mkdir()
    with pytest.raises(CheckpointError, match=r"looked for config.json.*it is empty"):
        locate(str(model))
    (model / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"it holds config.json"):
        locate(str(model))
    weights = model / "model.safetensors"
    weights.write_bytes(bytes(5))
    assert locate(str(model)).kind == "folder"
    assert locate(str(model)).bytes_on_disk == 5
    assert locate(str(weights)).kind == "file"
    assert locate(str(weights)).is_complete
    (tmp_path / "clip.mp4").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"ends in '\.mp4'"):
        locate(str(tmp_path / "clip.mp4"))


def test_an_existing_folder_goes_before_a_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    (tmp_path / "owner" / "name" / "a.safetensors").write_bytes(b"")
    assert locate("owner/name").kind == "folder"


def test_overview_and_a_registry_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(tmp_path, "o/n", {"config.json": b"{}", "model.safetensors": b"1"})
    mine = KnownModel("mine", "opensora", "t", "MIT", parts=(PART,))
    other = KnownModel("other", "opensora", "t", "MIT", parts=(HubPart("vae", "x/y", (("a",),)),))
    monkeypatch.setattr(locating, "known_models", lambda: (mine, other))
    assert [place.name for place in overview()] == ["mine", "other"]
    assert names_on_disk() == ("mine",)
    assert locate("mine").is_complete


def test_an_embedded_model_that_was_not_installed_is_incomplete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = KnownModel("gone", "opensora", "t", "MIT", embedded=str(tmp_path / "gone"))
    monkeypatch.setattr(locating, "known_models", lambda: (gone,))
    assert not locate("gone").is_complete


def test_listing_imports_no_torch() -> None:
    code = (
        "import sys\n"
        "from everyframe.checkpoints import digest, download, folder, locate, model_zoo\n"
        "from everyframe.checkpoints import safetensors_header\n"
        "locate.overview(); locate.locate('opensora-1.2')\n"
        "print('torch' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "False"


# Variants: the same weights in another stored precision.

FP16 = {
    "model_index.json": b"{}", "scheduler/scheduler_config.json": b"{}",
    "feature_extractor/preprocessor_config.json": b"{}",
    **{f"{part}/config.json": b"{}" for part in ("unet", "vae", "image_encoder")},
    **{f"{part}/diffusion_pytorch_model.fp16.safetensors": b"" for part in ("unet", "vae")},
    "image_encoder/model.fp16.safetensors": b"",
}  # fmt: skip


def test_a_variant_is_what_is_wanted_of_the_hub() -> None:
    whole, half = (locate("svd", variant=each) for each in (None, "fp16"))
    patterns = [pattern for place in half.parts for pattern in place.part.patterns]
    weights = [pattern for pattern in patterns if pattern.endswith(".safetensors")]
    assert len(weights) == 3
    assert all(pattern.endswith(".fp16.safetensors") for pattern in weights)
    assert "unet/config.json" in patterns
    assert whole.bytes_to_fetch is not None
    assert half.bytes_to_fetch == whole.bytes_to_fetch / 2
    anything = locate("some/body", variant="fp16").parts[0].part
    assert anything.needs == (("*.fp16.safetensors", "*.fp16-*.safetensors"),)
    assert "*.json" in anything.patterns


def test_a_variant_stands_in_where_it_is_all_there_is(tmp_path: Path) -> None:
    plant(tmp_path, "stabilityai/stable-video-diffusion-img2vid", FP16)
    found = locate("svd")
    assert found.is_complete
    assert {place.part.variant for place in found.parts} == {"fp16"}
    assert not locate("svd", variant="bf16").is_complete


def test_shards_of_a_variant_are_missed_by_its_own_index(tmp_path: Path) -> None:
    """The plain weights have an index too, which is fetched with the configs."""
    shards = [f"unet/model.bf16-0000{number}-of-00002.safetensors" for number in (1, 2)]
    names = {"a": shards[0][5:], "b": shards[1][5:]}
    files = {
        "unet/config.json": b"{}",
        "unet/model.safetensors.index.json": b'{"weight_map": {"a": "model-1.safetensors"}}',
        "unet/model.safetensors.index.bf16.json": json.dumps({"weight_map": names}).encode(),
        "vae/model.bf16.safetensors": b"",
    }
    plant(tmp_path, "some/body", files)
    assert locate("some/body", variant="bf16").parts[0].missing == tuple(shards)
    plant(tmp_path, "some/other", files | dict.fromkeys(shards, b""))
    found = locate("some/other", variant="bf16")
    assert found.is_complete
    assert {path.name for path in found.parts[0].files} >= {Path(name).name for name in shards}


def test_a_title_is_the_folders_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also from within it."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"")
    monkeypatch.chdir(folder)
    for name in (".", str(folder), f"{folder}/", "../mine"):
        assert locate(name).title("Wan") == "Wan (mine)"
