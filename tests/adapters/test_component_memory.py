"""A component's file is streamed: loading peaks at the planned weights and one tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from everyframe.hardware.isolation import run_isolated
from helpers.components import stored

#: A transformer of 70 million parameters whose largest tensor has 4 million.
SIZES = {
    "in_channels": 8, "out_channels": 8, "num_attention_heads": 16, "attention_head_dim": 64,
    "cross_attention_dim": 1024, "num_layers": 4, "caption_channels": 64,
}  # fmt: skip
LARGEST = 4 << 20


def measured_in(folder: str, file: str, dtype: str) -> tuple[int, int]:
    """(peak of resident memory while a component is loaded, bytes of its parameters)."""
    import threading
    import time

    import psutil
    from accelerate import init_empty_weights  # noqa: F401
    from diffusers import LTXVideoTransformer3DModel  # noqa: F401

    from everyframe.adapters.component_file import match_component
    from everyframe.core.plan import Precision
    from everyframe.diffusers_pipelines.files.checkpoint import ComponentFolder
    from everyframe.diffusers_pipelines.files.component_tensors import load_from_file, module_table

    part = ComponentFolder("transformer", "diffusers", "LTXVideoTransformer3DModel", Path(folder))
    tensors = match_component(Path(file), module_table(part), "large").tensors
    part = ComponentFolder(part.name, part.library, part.class_name, part.folder, tensors=tensors)
    process, stop, peak = psutil.Process(), threading.Event(), [0]
    before = process.memory_info().rss

    def sample() -> None:
        while not stop.is_set():
            peak[0] = max(peak[0], process.memory_info().rss - before)
            time.sleep(0.002)

    watcher = threading.Thread(target=sample)
    watcher.start()
    module = load_from_file(part, Precision(dtype, dtype))
    stop.set()
    watcher.join()
    return peak[0], sum(each.nbytes for each in module.parameters())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the config, and one file in each form; of zeros but for the scales."""
    from diffusers import LTXVideoTransformer3DModel

    place = tmp_path_factory.mktemp("large")
    with torch.device("meta"):
        module = LTXVideoTransformer3DModel(**SIZES)
    module.save_config(place)
    state = {name: torch.zeros(each.shape) for name, each in module.state_dict().items()}
    stored.write(place / "wide.safetensors", state)
    tensors, _ = stored.scaled(state)
    stored.write(place / "scaled.safetensors", tensors)
    return place


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", ["wide.safetensors", "scaled.safetensors", "blocks.gguf"])
def test_loading_peaks_at_the_weights_and_a_tensor(form: str, dtype: str, folder: Path) -> None:
    if form.endswith("gguf"):
        pytest.importorskip("gguf", reason="the package that reads GGUF is not installed")
        if not (folder / form).exists():
            from everyframe.checkpoints.tensor_file import open_checkpoint

            wide = open_checkpoint(folder / "wide.safetensors")
            stored.write_gguf(folder / form, {name: wide.load(name) for name in wide}, "Q8_0")
    ended = run_isolated(measured_in, str(folder), str(folder / form), dtype, seconds=300)
    assert ended.is_well, f"{ended}: {ended.printed}"
    peak, weights = ended.value
    # A tensor as it is stored, in float32, and as it becomes; and what allocators round up.
    assert weights * 0.9 < peak < weights + 3 * 4 * LARGEST + 24e6
