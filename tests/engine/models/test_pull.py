"""`pull` fetches what a model needs and nothing else, verifies it, and needs no network twice."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from everyframe.checkpoints.hub_digest import verify_file
from everyframe.core.errors import CheckpointError
from helpers.hub_server import COMMIT, HubServer, etag_of, hub_server

MODEL = "somebody/tiny-svd"

#: One process for several commands: it is torch's import that takes its seconds.
PROGRAM = """
import sys
from everyframe.cli.main import main
for words in {commands!r}:
    print("code", main(words), flush=True)
"""


@pytest.fixture(scope="module")
def repository(
    tiny_models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A tiny SVD, with what repositories hold besides."""
    folder = tmp_path_factory.mktemp("hub") / "tiny-svd"
    shutil.copytree(tiny_models("svd"), folder)
    (folder / "README.md").write_text("about it")
    (folder / "svd.safetensors").write_bytes(b"the same weights again" * 1000)
    (folder / "unet" / "diffusion_pytorch_model.onnx").write_bytes(b"for others" * 1000)
    return folder


@pytest.fixture(scope="module")
def hub(repository: Path) -> Iterator[HubServer]:
    with hub_server({MODEL: repository}) as server:
        yield server


def run(hub: HubServer, cache: Path, *commands: list[str]) -> tuple[list[int], str, str]:
    """Exit codes, output and errors of commands for which `hub` is the hub."""
    environment = {
        **{name: text for name, text in os.environ.items() if "proxy" not in name.lower()},
        "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(cache),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(commands=commands)],
        env=environment, capture_output=True, text=True, timeout=170,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    codes = [int(line.split()[1]) for line in lines if line.startswith("code ")]
    return codes, "\n".join(line for line in lines if not line.startswith("code ")), done.stderr


@pytest.mark.slow  # two processes that import torch and diffusers
def test_what_is_needed_is_fetched_once_and_verified(
    hub: HubServer, repository: Path, tmp_path: Path
) -> None:
    hub.fetched.clear()
    blob = tmp_path / "hub" / "models--somebody--tiny-svd" / "blobs"
    codes, out, err = run(
        hub, tmp_path, ["pull", MODEL, "--json"], ["pull", MODEL], ["cache", "list", "models"],
        ["pull", "somebody/nothing"],
    )  # fmt: skip
    assert codes == [0, 0, 0, 2], err
    assert "the hub knows no model 'somebody/nothing'" in err
    found = json.loads(out.splitlines()[0])
    fetched = [name.removeprefix(f"{MODEL}/") for name in hub.fetched]
    assert sorted(fetched) == sorted({*fetched}), "each file once"
    assert "unet/diffusion_pytorch_model.safetensors" in fetched
    assert not {"README.md", "svd.safetensors"} & {*fetched}
    assert not [name for name in fetched if name.endswith(".onnx")]
    assert found["num_verified"] == len(found["files"]) == len(fetched)
    assert "have the hub's digest" in out
    assert any(line.startswith(MODEL) for line in out.splitlines()), "cache list shows it"

    weights = repository / "unet" / "diffusion_pytorch_model.safetensors"
    damaged = blob / etag_of(weights)
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.chmod(0o644)
    damaged.write_bytes(data)
    codes, _, err = run(hub, tmp_path, ["pull", MODEL])
    assert codes == [2]
    assert "is damaged" in err
    assert str(damaged) in err


def linked(folder: Path, name: str, data: bytes) -> Path:
    """A file of a snapshot whose blob has that name."""
    blobs, snapshot = folder / "blobs", folder / "snapshots" / COMMIT
    blobs.mkdir(parents=True, exist_ok=True)
    snapshot.mkdir(parents=True, exist_ok=True)
    (blobs / name).write_bytes(data)
    (snapshot / "file").symlink_to(blobs / name)
    return snapshot / "file"


@pytest.mark.parametrize("data", [b"{}", b"weights" * 1000], ids=["git's", "sha256"])
def test_a_digest_is_the_hubs(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "given").write_bytes(data)
    name = etag_of(tmp_path / "given")
    assert verify_file(linked(tmp_path / "whole", name, data))
    with pytest.raises(CheckpointError, match="is damaged: its digest is"):
        verify_file(linked(tmp_path / "other", name, data + b" "))


def test_a_file_that_is_not_the_hubs_has_no_digest(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert not verify_file(tmp_path / "model.safetensors")
    assert not verify_file(linked(tmp_path / "odd", "etag-of-another-kind", b""))
