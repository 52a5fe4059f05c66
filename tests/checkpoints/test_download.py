"""Fetching: no network means a quick, useful line; with one, the hub's client does the work."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from everyframe.checkpoints import download as fetching
from everyframe.checkpoints.download import Wanted, fetch, fetch_missing
from everyframe.checkpoints.locate import locate
from everyframe.checkpoints.model_zoo import controlnet_part
from everyframe.core.errors import CheckpointError, InputError

JSON = Wanted("o/n", ("*.json",))


@pytest.fixture(autouse=True)
def _own_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))


def forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    """What HF_HUB_OFFLINE=1 does, which the library reads once at import."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_offline_says_what_is_missing_and_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once: nobody is asked who might not answer."""

    def nobody(*_: Any, **__: Any) -> None:
        raise AssertionError("asked the network")

    forbid(monkeypatch)
    monkeypatch.setattr(socket, "getaddrinfo", nobody)
    monkeypatch.setattr(socket.socket, "connect", nobody)
    with pytest.raises(InputError) as caught:
        fetch_missing(locate("opensora-1.2"))
    text = str(caught.value)
    assert "hpcai-tech/OpenSora-STDiT-v3" in text
    assert "hf download hpcai-tech/OpenSora-STDiT-v3 --include config.json" in text
    # All that the model needs, not only what would have come first.
    assert "&& hf download DeepFloyd/t5-v1_1-xxl" in text
    assert "HF_HUB_OFFLINE" in text
    assert "on this disk" in text
    assert "\n" not in text


def test_an_unknown_hub_id_offline_names_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    forbid(monkeypatch)
    place = locate("hpcai-tech/OpenSora-STDiT-v33")
    with pytest.raises(InputError, match=r"did you mean 'hpcai-tech/OpenSora-STDiT-v3'"):
        fetch_missing(place)


def test_a_network_that_swallows_everything_is_given_up_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A name lookup that hangs takes no timeout; the limit is ours."""

    over, ended = threading.Event(), threading.Event()

    def hang(*_: Any, **__: Any) -> None:
        over.wait(600)
        ended.set()

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", hang)
    monkeypatch.setattr(fetching, "FIRST_ANSWER_TIMEOUT_S", 0.2)
    try:
        with pytest.raises(InputError, match=r"gave no answer in 0.2 s"):
            fetch([JSON])
        assert not ended.is_set(), "it is given up while it still hangs"
    finally:
        over.set()


def test_a_refused_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real connection, to a port of this machine where nobody listens."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    api = huggingface_hub.HfApi
    monkeypatch.setattr(
        huggingface_hub, "HfApi", lambda: api(endpoint="http://127.0.0.1:9", token=False)
    )
    with pytest.raises(InputError, match=r"the hub does not answer"):
        fetch([JSON])


def test_a_complete_model_needs_no_network(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"")
    place = locate(str(weights))
    assert fetch_missing(place) is place


def test_patterns_and_limits_reach_the_hubs_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    class Info:
        sha = "0" * 40
        siblings = None

    def download(repo_id: str, **options: Any) -> str:
        asked.update(options, repo_id=repo_id)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: Info())
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert fetch([JSON]) == tmp_path
    assert asked["repo_id"] == "o/n"
    assert asked["allow_patterns"] == ["*.json"]
    assert asked["etag_timeout"] <= 3


def test_what_is_pickled_only_is_refused_before_it_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Info:
        sha = "0" * 40
        siblings = tuple(
            SimpleNamespace(rfilename=name)
            for name in ("config.json", "diffusion_pytorch_model.bin", "unet/model.safetensors")
        )

    def download(repo_id: str, **options: Any) -> str:
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: Info())
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(CheckpointError, match=r"o/n: its weights are pickled .*save_pretrained"):
        fetch([Wanted("o/n", controlnet_part("o/n").patterns)])
    # Where pickles are taken too, or nothing lies in their place, that is another matter.
    for patterns in (
        ("*.safetensors", "*.bin"),
        ("unet/model.safetensors",),
        ("vae/x.safetensors",),
    ):
        assert fetch([Wanted("o/n", patterns)]) == tmp_path


def test_of_a_pipeline_only_what_it_is_loaded_from_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [
        "model_index.json", "unet/config.json", "unet/diffusion_pytorch_model.safetensors",
        "unet/diffusion_pytorch_model.fp16.safetensors", "text_encoder/pytorch_model.bin",
        "tokenizer/chat_template.jinja", "pipeline.py",
    ]  # fmt: skip
    twice = [
        "v1-5-pruned.safetensors", "v1-5-pruned.ckpt", "unet/diffusion_pytorch_model.bin",
        "unet/diffusion_pytorch_model.bin.index.json", "README.md", "unet/model.onnx",
    ]  # fmt: skip
    asked: dict[str, Any] = {}

    class Info:
        sha = "0" * 40
        siblings = tuple(SimpleNamespace(rfilename=name) for name in (*wanted, *twice))

    def download(repo_id: str, **options: Any) -> str:
        asked.update(options)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: Info())
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    patterns = locate("o/n").parts[0].part.patterns
    fetch([Wanted("o/n", patterns)])
    assert asked["allow_patterns"] == wanted
    # Where somebody knows which files are wanted, those are.
    fetch([Wanted("o/n", ("*.ckpt",))])
    assert asked["allow_patterns"] == ["*.ckpt"]


@pytest.mark.parametrize("without", [(), ("unet",)])
def test_of_a_variant_its_shards_and_the_pipelines_code_are_fetched(
    without: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unet = [
        "unet/model.bf16-00001-of-00002.safetensors", "unet/model.bf16-00002-of-00002.safetensors",
    ]  # fmt: skip
    wanted = ["model_index.json", "unet/config.json", "vae/model.bf16.safetensors", "pipeline.py"]
    others = ["unet/model-00001-of-00001.safetensors", "unet.bf16.safetensors", "README.md"]
    asked: dict[str, Any] = {}

    class Info:
        sha = "0" * 40
        siblings = tuple(SimpleNamespace(rfilename=name) for name in (*unet, *wanted, *others))

    def download(repo_id: str, **options: Any) -> str:
        asked.update(options)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: Info())
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    part = locate("o/n", variant="bf16").parts[0].part
    fetch([Wanted("o/n", part.patterns, without=without)])
    assert asked["allow_patterns"] == ([] if without else unet) + wanted


def test_weights_of_replaced_components_are_not_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And without the replacement they are missed, and fetched then."""
    snapshot = tmp_path / "models--o--n" / "snapshots" / ("0" * 40)
    names = ["model_index.json", "transformer/config.json", "vae/config.json",
             "transformer/m-00001-of-00002.safetensors", "vae/m.safetensors",
             "transformer/m-00002-of-00002.safetensors", "tokenizer/config.json",
             "transformer/m.safetensors.index.json", "transformer/model.py"]  # fmt: skip
    index = {"_class_name": "P", "transformer": ["diffusers", "T"], "vae": ["diffusers", "V"],
             "tokenizer": ["transformers", "T5TokenizerFast"]}  # fmt: skip

    class Info:
        sha = "0" * 40
        siblings = tuple(SimpleNamespace(rfilename=name) for name in names)

    def download(repo_id: str, *, allow_patterns: list[str] | None = None, **_: Any) -> str:
        for name in allow_patterns or ():
            (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
            shards = {"weight_map": {"a": names[3][12:], "b": names[5][12:]}}
            text = json.dumps(index if name == "model_index.json" else shards)
            (snapshot / name).write_text(text)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: Info())
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    place = locate("o/n", without=("transformer",))
    assert not place.is_complete
    place = fetch_missing(place)
    assert place.is_complete
    there = {path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*.*")}
    assert there == {"model_index.json", "transformer/config.json", "transformer/model.py",
                     "vae/config.json", "vae/m.safetensors", "tokenizer/config.json"}  # fmt: skip
    whole = locate("o/n")
    assert whole.parts[0].missing == ("transformer/*.safetensors",)
    assert fetch_missing(whole).is_complete
    assert (snapshot / "transformer" / "m-00002-of-00002.safetensors").is_file()


def test_a_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Info:
        sha = "0" * 40
        siblings = None

    def download(*_: Any, **__: Any) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: Info())
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(InputError, match=r"No space left on device.*again to continue it"):
        fetch([JSON])


def test_the_command_can_be_pasted_into_a_shell() -> None:
    command = Wanted("o/n", ("config.json", "*.safetensors")).command
    assert command == "hf download o/n --include config.json --include '*.safetensors'"


def test_a_proxy_whose_address_is_none_is_named() -> None:
    """In a process of its own: the hub's client reads it once."""
    done = subprocess.run(
        [sys.executable, "-m", "everyframe", "pull", "opensora-1.2"], check=False, text=True,
        capture_output=True, timeout=120, env={**os.environ, "HTTPS_PROXY": "nonsense://"},
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    *_, line = done.stderr.splitlines()
    assert line.startswith("error: the hub can't be asked: Unknown scheme for proxy URL")
    assert line.endswith("are HTTPS_PROXY and ALL_PROXY addresses?")
