"""Whole runs of diffusers' pipelines among several ranks against the same run on one.

That the transformers' answers are right to rounding is tested in `test_sequence_parallel.py`; here
is what is around them: the pipeline's own loop on every rank, frames from the first alone, saved
answers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import everyframe
from everyframe.core.request import Request
from everyframe.engine.resumption.resume import resume_run
from everyframe.engine.run import stream
from everyframe.parallel.communicator import Communicator
from everyframe.parallel.head_partition import SEQUENCE_BACKENDS
from everyframe.runs.folder import RunFolder, all_runs
from everyframe.runs.run_state import SaveOptions
from helpers.interrupted_ranks import begun, copied, resume_there, summarize, videos
from helpers.pipeline_ranks import requests_of, run
from helpers.rank_pool import Group, group_of

NAMES = ("wan", "ltx", "cogvideox", "hunyuan")
SIZES = (2, 3)


@pytest.fixture(scope="module")
def ranks() -> Any:
    yield from group_of(SIZES)


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What is asked of each model; made here, as ranks import this module too."""
    return requests_of(NAMES, tmp_path_factory.mktemp("models"))


ALONE: dict[str, dict[int, Any]] = {}


def alone(asked: dict[str, Any]) -> dict[int, Any]:
    """Frames of each video by its seed, made by one process without ranks."""
    key = repr(asked)
    if key not in ALONE:
        events = stream(Request(**asked), keep=SaveOptions(None), num_threads=1)
        ALONE[key] = summarize(list(events), speaks=True)["frames"]
    return ALONE[key]


def check_close(found: dict[int, Any], wanted: dict[int, Any]) -> None:
    """The bar for float32: 8-bit frames differ by 1 at most, in under 0.1 % of their values."""
    assert found.keys() == wanted.keys()
    for seed, frames in wanted.items():
        ours, right = (np.round(255 * each).astype(int) for each in (found[seed], frames))
        assert np.abs(ours - right).max() <= 1
        assert (ours != right).mean() < 1e-3


def of_attention(sent: dict[str, int]) -> int:
    """Bytes that left a rank in its denoisers."""
    what = ("heads are", "keys and values", "the last projection")
    return sum(number for name, number in sent.items() if name.startswith(what))


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("backend", SEQUENCE_BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_one_video_on_several_ranks(
    ranks: Group, asked: dict[str, dict[str, Any]], name: str, backend: str, size: int
) -> None:
    given = {**asked[name], "parallel": f"{backend}={size}"}
    found = ranks.run(size, run, given)
    check_close(videos(found), alone(asked[name]))
    assert [bool(each["frames"]) for each in found] == [True] + [False] * (size - 1)
    assert all(each["steps"] == [(3, 1), (3, 2), (3, 3)] for each in found)
    division = everyframe.plan(Request(**given, num_devices=size)).parallel
    assert division is not None
    # Every step sends the same; the text's tokens are all that the tokenizer may have given.
    for rank, each in zip(division.ranks, found, strict=True):
        assert of_attention(each["sent"]) == 3 * rank.sent_bytes
    assert all(rank.sent_bytes for rank in division.ranks)


def encoded(group: Communicator, asked: dict[str, Any], *, once: bool) -> dict[str, Any]:
    """One rank's run, with how often an encoder's first layer looked words up in it."""
    from everyframe.diffusers_pipelines.calls import module_calls

    calls, own, names = [], torch.nn.Embedding.forward, module_calls._NAMES
    module_calls._NAMES = names if once else ()

    def looked_up(self: Any, ids: Any) -> Any:
        if not self.weight.is_meta:  # a dry run
            calls.append(ids.shape)
        return own(self, ids)

    torch.nn.Embedding.forward = looked_up  # type: ignore[method-assign]
    try:
        return {**run(group, asked), "calls": len(calls)}
    finally:
        torch.nn.Embedding.forward = own  # type: ignore[method-assign]
        module_calls._NAMES = names


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_texts_are_encoded_once(ranks: Group, asked: dict[str, dict[str, Any]], name: str) -> None:
    """The others look up no word; the video has the bits of ranks that encode for themselves."""
    each, found = (ranks.run(2, encoded, asked[name], once=once) for once in (False, True))
    np.testing.assert_array_equal(videos(found)[3], videos(each)[3])
    assert each[0]["calls"] == each[1]["calls"] > 0
    assert [one["calls"] for one in found] == [each[0]["calls"], 0]
    sent = [one["sent"].get("what is encoded is broadcast", 0) for one in found]
    assert sent[0] > 0
    assert sent[1] == 0


@pytest.mark.slow
def test_several_videos_are_dealt_out_whole(ranks: Group, asked: dict[str, dict[str, Any]]) -> None:
    given = {**asked["ltx"], "num_videos": 2}
    found = ranks.run(2, run, given)
    assert [sorted(each["frames"]) for each in found] == [[3], [4]]
    for seed, frames in alone(given).items():
        np.testing.assert_array_equal(videos(found)[seed], frames)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [None, {"num_devices": 2}, {"num_devices": 1}])
@pytest.mark.parametrize("name", ["wan", "cogvideox"])
def test_a_run_that_is_interrupted_goes_on(
    ranks: Group,
    asked: dict[str, dict[str, Any]],
    tmp_path: Path,
    name: str,
    devices: dict[str, Any] | None,
) -> None:
    """By the answers that the first rank has kept, handed on to as many ranks as there are."""
    ranks.run(3, begun, tmp_path / "broken", asked[name], 2)
    (kept,) = all_runs(tmp_path / "broken")
    path = copied(kept.path, tmp_path)
    if devices == {"num_devices": 1}:
        found = [
            summarize(list(resume_run(RunFolder(path), ranks=devices, cleans=False)), speaks=True)
        ]
    else:
        found = ranks.run(3 if devices is None else 2, resume_there, path, devices)
    check_close(videos(found), alone(asked[name]))
    if devices is None:
        whole = ranks.run(3, run, asked[name])
        np.testing.assert_array_equal(videos(found)[3], videos(whole)[3])


def _other_noise(group: Communicator) -> Any:
    from everyframe.diffusers_pipelines import call_arguments

    original = torch.Generator.manual_seed

    class Other(torch.Generator):
        def manual_seed(self, seed: int) -> Any:
            return original(self, seed + group.rank)

    own = call_arguments.torch.Generator
    call_arguments.torch.Generator = Other  # type: ignore[misc]
    return lambda: setattr(call_arguments.torch, "Generator", own)


@pytest.mark.slow
def test_other_noise_on_one_rank_is_seen(ranks: Group, asked: dict[str, dict[str, Any]]) -> None:
    found = ranks.run(2, run, asked["wan"], fault=_other_noise)
    with pytest.raises(AssertionError):
        check_close(videos(found), alone(asked["wan"]))


def refusal(asked: dict[str, Any], **more: Any) -> Sequence[str]:
    """What is wrong with that request."""
    with pytest.raises(everyframe.InputError) as error:
        everyframe.plan(Request(**asked, **more))
    return str(error.value)


def test_what_a_pipeline_can_not_do_is_reported_with_what_it_can(
    asked: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    from helpers.tiny_checkpoints import pipelines as tiny_pipelines

    tiny_pipelines.TINY["latte"](tmp_path / "latte")
    given = {**asked["wan"], **tiny_pipelines.CALLS["latte"], "model": str(tmp_path / "latte")}
    text = refusal(given, num_devices=2, parallel="sequence=2")
    assert "no token split of LattePipeline (latte) is known" in text
    assert "it can be cfg=2" in text
    text = refusal({**given, "guidance_scale": 1.0}, num_devices=2, parallel="cfg=2")
    assert "without guidance it has one branch; data=N" in text
    text = refusal(asked["hunyuan"], num_devices=2, parallel="cfg=2")
    assert "it asks its denoiser about one branch; sequence=2" in text


# ---------------------------------------------------------------- branches of guidance apart

#: Those whose branches are in one batch, and those that ask about one after the other.
TOGETHER = ("ltx", "cogvideox", "mochi", "latte", "animatediff")
IN_TURN = ("wan", "hunyuan15")


@pytest.fixture(scope="module")
def guided(
    asked: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """What is asked of each model that has two branches."""
    from helpers.tiny_checkpoints import pipelines as tiny_pipelines

    root = tmp_path_factory.mktemp("guided")
    found = {name: asked[name] for name in (*TOGETHER, *IN_TURN) if name in asked}
    for name in (*TOGETHER, *IN_TURN):
        if name not in found:
            tiny_pipelines.TINY[name](root / name)
            found[name] = {
                **asked["ltx"], "size": None, **tiny_pipelines.CALLS[name],
                "model": str(root / name),
                # No process of a test's may try a path in another one.
                "disable": ("attention-flash", "linear-gelu", "kept-embeddings"),
            }  # fmt: skip
            if "option" not in tiny_pipelines.CALLS[name]:
                del found[name]["option"]
    return found


def one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on denoisers compute the samples of a batch of two each by itself."""
    import diffusers

    transformers = ("LTXVideo", "CogVideoX", "Mochi", "Latte")
    for name in (*(f"{each}Transformer3DModel" for each in transformers), "UNetMotionModel"):
        kind = getattr(diffusers, name)
        monkeypatch.setattr(kind, "forward", _by_samples(kind.forward))


def _by_samples(inner: Any) -> Any:
    @functools.wraps(inner)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        assert len(args) < 3  # AnimateDiff's sample and time
        found = []
        for number in (0, 1):

            def mine(value: Any, number: int = number) -> Any:
                is_of_all = isinstance(value, torch.Tensor) and value.ndim > 0
                return value.chunk(2)[number] if is_of_all else value

            given = {name: mine(value) for name, value in kwargs.items()}
            found.append(inner(self, *map(mine, args), **given))
        if isinstance(found[0], tuple):
            return (torch.cat([each[0] for each in found]),)
        return type(found[0])(sample=torch.cat([each.sample for each in found]))

    return forward


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TOGETHER, *IN_TURN])
def test_a_branch_on_each_of_two_ranks_has_the_bits_of_one_device(
    ranks: Group, guided: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same arithmetic, only dealt out: each branch is computed as one device computes it."""
    given = {**guided[name], "parallel": "cfg=2"}
    found = ranks.run(2, run, given)
    assert all(each["steps"] == [(3, 1), (3, 2), (3, 3)] for each in found)
    division = everyframe.plan(Request(**given, num_devices=2)).parallel
    assert str(division) == "data=1, cfg=2, sequence=1"
    check_close(videos(found), alone(guided[name]))
    for rank, each in zip(division.ranks, found, strict=True):  # type: ignore[union-attr]
        sent = each["sent"]["answers about branches are exchanged"]
        # What the others don't know of an answer is sent beside it.
        summarize = 0 if name in TOGETHER else 1000
        assert 0 <= sent - 3 * rank.sent_bytes <= summarize
    if name in TOGETHER:
        one_after_the_other(monkeypatch)
        ALONE.clear()
    np.testing.assert_array_equal(videos(found)[3], alone(guided[name])[3])
    ALONE.clear()


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["cfg=2", "auto"])
@pytest.mark.parametrize("name", ["wan", "ltx", "latte"])
def test_two_branches_on_three_ranks(
    ranks: Group, guided: dict[str, Any], name: str, parallel: str
) -> None:
    found = ranks.run(3, run, {**guided[name], "parallel": parallel})
    check_close(videos(found), alone(guided[name]))
    if name == "latte":  # whose tokens nobody cuts: two of them do all
        assert not found[2]["steps"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wan", "animatediff"])
def test_a_run_of_branches_apart_goes_on(
    ranks: Group, guided: dict[str, Any], tmp_path: Path, name: str
) -> None:
    given = {**guided[name], "parallel": "cfg=2"}
    ranks.run(2, begun, tmp_path / "broken", given, 2)
    (kept,) = all_runs(tmp_path / "broken")
    path = copied(kept.path, tmp_path)
    found = ranks.run(2, resume_there, path, None)
    whole = ranks.run(2, run, given)
    np.testing.assert_array_equal(videos(found)[3], videos(whole)[3])
    folder = RunFolder(copied(kept.path, tmp_path / "one"))
    events = list(resume_run(folder, ranks={"num_devices": 1}, cleans=False))
    check_close(videos([summarize(events, speaks=True)]), alone(guided[name]))
