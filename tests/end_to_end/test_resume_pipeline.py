"""A run of a pipeline that was given in Python: resumed by the same one, and by no other.

Wan with its own loop and diffusers' own scheduler. What is changed is what users change between
two calls: weights, a LoRA that is fused, the scheduler, dtypes, configs, hooks, tiling.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

import everyframe
from everyframe.core.errors import EveryframeWarning, InputError
from everyframe.core.events import Event, Step
from everyframe.diffusers_pipelines.calls.digests import digest_call, digest_pipeline
from everyframe.runs.folder import RunFolder, all_runs, new_run
from helpers.tiny_checkpoints import pipelines as tiny_pipelines

ASKED: dict[str, Any] = {
    "prompt": "a red circle", "seed": 1, "num_inference_steps": 4, "guidance_scale": 5.0,
    "output": "float", **tiny_pipelines.CALLS["wan"],
}  # fmt: skip


@pytest.fixture(scope="module")
def loaded(tiny_models: Callable[[str], Path]) -> Any:
    pipe = diffusers.DiffusionPipeline.from_pretrained(tiny_models("wan"))
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture
def pipe(loaded: Any) -> Any:
    """One of its own, which a test may change."""
    return copy.deepcopy(loaded)


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EVERYFRAME_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


class _EnoughError(Exception):
    pass


def break_off(pipe: Any, after: int = 2, **asked: Any) -> RunFolder:
    """A run of it that ended after so many steps."""

    def stop(event: Event) -> None:
        if isinstance(event, Step) and event.step == after:
            raise _EnoughError

    with pytest.raises(_EnoughError):
        everyframe.run(pipe, **{**ASKED, **asked}, on_event=stop)
    return list(all_runs())[-1]


def frames(video: Any) -> Any:
    assert isinstance(video, everyframe.Video)
    return video.frames


def test_the_same_pipeline_goes_on_and_says_which_run_it_is(pipe: Any) -> None:
    whole = frames(everyframe.run(pipe, **ASKED))
    folder = break_off(pipe)
    pipe(prompt="another", num_inference_steps=1, num_frames=5, height=16, width=16,
         max_sequence_length=16)  # fmt: skip
    events: list[Event] = []
    with pytest.warns(EveryframeWarning) as warned:
        again = everyframe.resume(pipe=pipe, output="float", on_event=events.append)
    np.testing.assert_array_equal(frames(again), whole)
    (which,) = [str(each.message) for each in warned if "resuming" in str(each.message)]
    assert folder.name in which
    assert "a red circle" in which
    assert re.search(r"[1-9]\d* saved model calls? (is|are) not computed again", which)
    assert any("resuming" in getattr(event, "text", "") for event in events)
    assert not list(all_runs())


def add_to_weights(pipe: Any) -> None:
    with torch.no_grad():
        pipe.transformer.blocks[0].attn1.to_q.weight.add_(0.01)


def add_to_decoder(pipe: Any) -> None:
    with torch.no_grad():
        next(pipe.vae.decoder.parameters()).add_(0.01)


def fuse_low_rank(pipe: Any) -> None:
    """What fusing a LoRA of rank 1 does to a matrix."""
    weight = pipe.transformer.blocks[0].ffn.net[2].weight
    with torch.no_grad():
        weight += 0.01 * torch.randn(len(weight), 1) @ torch.randn(1, weight.shape[1])


def change_scheduler(pipe: Any) -> None:
    pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler()


def shift_scheduler(pipe: Any) -> None:
    config = {**pipe.scheduler.config, "flow_shift": 5.0}
    pipe.scheduler = type(pipe.scheduler).from_config(config)


def hook(pipe: Any) -> None:
    pipe.transformer.register_forward_hook(lambda module, given, made: made)


def patch(pipe: Any) -> None:
    real = pipe.transformer.forward
    pipe.transformer.forward = lambda *args, **kwargs: real(*args, **kwargs)


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "weights": (add_to_weights, "transformer"),
    "decoder": (add_to_decoder, "vae"),
    "fused": (fuse_low_rank, "transformer"),
    "scheduler": (change_scheduler, "scheduler"),
    "shift": (shift_scheduler, "scheduler"),
    "float16": (lambda pipe: pipe.to(torch.float16), "transformer"),
    "bfloat16": (lambda pipe: pipe.to(torch.bfloat16), "transformer"),
    "hook": (hook, "transformer"),
    "patch": (patch, "transformer"),
    "tiling": (lambda pipe: pipe.vae.enable_tiling(), "vae"),
    "training": (lambda pipe: pipe.transformer.train(), "transformer"),
    "compiled": (lambda pipe: pipe.transformer.compile(), "transformer"),
    "config": (lambda pipe: pipe.register_to_config(boundary_ratio=0.7), "pipeline"),
}


@pytest.fixture(scope="module")
def broken(loaded: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunFolder]:
    """A run of the pipeline as it was loaded."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("EVERYFRAME_RUNS", str(tmp_path_factory.mktemp("broken")))
        yield break_off(loaded)


def use_one(pipe: Any) -> None:
    pipe.transformer.set_adapters("one")


def use_both(pipe: Any) -> None:
    pipe.transformer.set_adapters(["one", "other"])


@pytest.mark.parametrize(
    "change", [use_one, use_both, lambda pipe: pipe.transformer.disable_adapters()]
)
def test_other_adapters_are_another_pipeline(pipe: Any, change: Callable[[Any], None]) -> None:
    """Of the LoRAs that its owner loaded, those in use, which are no weights and no settings."""
    peft = pytest.importorskip("peft", reason="diffusers loads LoRAs with it")
    for name in ("one", "other"):
        lora = peft.LoraConfig(r=1, target_modules=["to_q"], init_lora_weights=False)
        pipe.transformer.add_adapter(lora, adapter_name=name)
    pipe.transformer.set_adapters("other")
    break_off(pipe)
    before = digest_pipeline(pipe)
    change(pipe)
    assert digest_pipeline(pipe)["transformer"] != before["transformer"]
    with pytest.raises(InputError, match="transformer"):
        everyframe.resume(pipe=pipe)
    pipe.transformer.enable_adapters()
    pipe.transformer.set_adapters("other")
    assert digest_pipeline(pipe) == before


@pytest.mark.parametrize("name", CHANGES)
def test_another_pipeline_is_refused_by_the_part_that_is_another(
    name: str, pipe: Any, broken: RunFolder
) -> None:
    change, part = CHANGES[name]
    change(pipe)
    before = sorted(path.name for path in broken.path.rglob("*"))
    with pytest.raises(InputError, match=rf"begun with: another [\w, ]*{part}"):
        everyframe.resume(broken.path, pipe=pipe)
    assert sorted(path.name for path in broken.path.rglob("*")) == before, "nothing was done to it"


def test_a_copy_is_the_same_pipeline(pipe: Any, loaded: Any, tmp_path: Path) -> None:
    """Also one that is loaded again from another folder."""
    assert digest_pipeline(pipe) == digest_pipeline(loaded)
    pipe.save_pretrained(tmp_path / "copy")
    again = type(loaded).from_pretrained(tmp_path / "copy")
    assert digest_pipeline(again) == digest_pipeline(loaded)


def test_blocks_that_were_put_back_are_the_same_pipeline(pipe: Any) -> None:
    """cache-dit replaces them during each call; a run that began before one was not resumed."""
    before = digest_pipeline(pipe)
    blocks = pipe.transformer.blocks
    del pipe.transformer.blocks
    pipe.transformer.blocks = blocks
    assert digest_pipeline(pipe) == before


def test_weights_on_a_disk_have_no_values_in_memory(pipe: Any, tmp_path: Path) -> None:
    """Each call leaves others in the memory that stands for them; they were another pipeline."""
    pipe.transformer.enable_group_offload(
        torch.device("cpu"), offload_type="leaf_level", offload_to_disk_path=str(tmp_path / "files")
    )
    wanted = frames(everyframe.run(pipe, **ASKED))
    run = break_off(pipe)
    with torch.no_grad():
        for each in pipe.transformer.parameters():
            each.data.fill_(7.0)
    assert np.array_equal(frames(everyframe.resume(run.name, pipe=pipe, output="float")), wanted)


def test_a_value_in_a_large_tensor_is_seen_in_what_a_call_is_given() -> None:
    """Of what a call is given every bit counts."""
    large = torch.randn(1 << 19)
    seen = {digest_call("unet", (large,), {})}
    for change in (lambda x: x.index_fill(0, torch.tensor([77777]), 3.0), lambda x: x.roll(8192),
                   torch.neg, lambda x: x.double()):  # fmt: skip
        seen.add(digest_call("unet", (change(large),), {}))  # type: ignore[no-untyped-call]
    seen |= {digest_call("vae", (large,), {}), digest_call("unet", (), {"x": large})}
    assert len(seen) == 7
    assert digest_call("unet", (large.clone(),), {}) in seen


def test_without_a_name_it_is_the_last_run_of_that_pipeline(pipe: Any, root: Path) -> None:
    whole = frames(everyframe.run(pipe, **ASKED))
    mine = break_off(pipe)
    changed = copy.deepcopy(pipe.transformer)
    original, pipe.transformer = pipe.transformer, changed
    add_to_weights(pipe)
    other = break_off(pipe, seed=5)
    # A newer one that is of no pipeline in memory, and one that can't be read.
    new_run(root).write_run({"began": 4e9, "given": None})
    damaged = new_run(root)
    (damaged.path / "run.json").write_text("{}")
    pipe.transformer = original
    with pytest.warns(EveryframeWarning, match=mine.name):
        again = everyframe.resume(pipe=pipe, output="float")
    np.testing.assert_array_equal(frames(again), whole)
    with pytest.raises(InputError, match=rf"{other.name} was begun with: another transformer"):
        everyframe.resume(pipe=pipe)


def test_with_none_of_a_pipeline_there_is_nothing_to_go_on_with(pipe: Any) -> None:
    with pytest.raises(InputError, match="no interrupted run of a pipeline that was given"):
        everyframe.resume(pipe=pipe)
