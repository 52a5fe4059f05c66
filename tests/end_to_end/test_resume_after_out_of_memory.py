"""A run that fell back for lack of memory, killed and resumed where there is enough of it.

Its frames are those of a run that fell back and was not killed, bit for bit, which are not those
of a run with enough memory from the start.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import _cur_sdpa_kernel_backends

from everyframe.core import paths
from everyframe.core.errors import CorruptRunError
from everyframe.core.events import Event, Repaired, Step, VideoDone
from everyframe.core.request import Request
from everyframe.engine.resumption.resume import resume_run
from everyframe.engine.run import stream
from everyframe.runs.folder import all_runs
from everyframe.runs.run_state import EVERY_STEP, FileOomLog, SaveOptions
from everyframe.runtime.components.component_cache import WarmComponents
from helpers.events import frames_by_seed
from helpers.out_of_memory import TOO_LITTLE, before_calls
from helpers.tiny_checkpoints import families as tiny_families
from helpers.tiny_checkpoints import opensora as tiny_opensora
from helpers.tiny_checkpoints import pipelines as tiny_pipelines
from helpers.tiny_checkpoints import svd as tiny_svd

PICTURE = np.random.default_rng(0).integers(0, 255, (32, 32, 3), np.uint8)
ASKED: dict[str, tuple[Callable[[Path], object], dict[str, Any]]] = {
    "opensora": (
        tiny_opensora.opensora_1_2,
        {"prompt": "a red circle", "size": "32x32", "num_frames": 2, "num_videos": 2},
    ),
    "svd": (tiny_svd.svd, {"image": PICTURE, "size": "32x32", "num_frames": 4, "num_videos": 3}),
    "animatediff": (
        tiny_pipelines.TINY["animatediff"],
        {"prompt": "a fox", **tiny_pipelines.CALLS["animatediff"], "num_inference_steps": 1},
    ),
}  # fmt: skip


class Killed(BaseException):
    """In place of the signal: nothing is written on the way out."""


@contextmanager
def little(
    kind: str, too_large: Callable[[torch.Tensor], bool], after: int, kill: int = 0
) -> Iterator[list[int]]:
    """Within, modules of that class find too little memory, after so many calls.

    With `kill` the process dies in that call of theirs after the first that found too little.
    """
    calls = [0]
    left = kill

    def hook(module: nn.Module, given: tuple[Any, ...]) -> None:
        nonlocal left
        if type(module).__name__ != kind or not given or given[0].is_meta:
            return
        calls[0] += 1
        if calls[0] > after and too_large(given[0]):
            left = kill
            calls.append(calls[0])
            raise RuntimeError(TOO_LITTLE)
        if len(calls) > 1 and kill:
            left -= 1
            if not left:
                raise Killed

    with before_calls(hook):
        yield calls


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("models")
    return lambda family: tiny_families.written(ASKED[family][0], root / family)


def begun(model: Path, family: str, root: Path, num_steps: int | None = None) -> Iterator[Event]:
    asked = {"num_inference_steps": 3, "seed": 1, "device": "cpu", "dtype": "fp32"}
    own = {"num_inference_steps": num_steps} if num_steps else {}
    request = Request(model=str(model), **{**asked, **ASKED[family][1], **own})
    return stream(request, keep=SaveOptions(root, pace=EVERY_STEP))


def differ(one: dict[int, Any], other: dict[int, Any]) -> list[int]:
    """The seeds whose videos are not the same, bit for bit."""
    assert one.keys() == other.keys()
    return [seed for seed in one if one[seed].tobytes() != other[seed].tobytes()]


def list_fallbacks(events: list[Event]) -> list[tuple[str, str]]:
    return [(event.stage, event.to) for event in events if isinstance(event, Repaired)]


#: Family, the class that finds too little for what, after so many calls, and in which call of its
#: own the process dies afterwards; the seeds whose bits that changes, and those that are there when
#: it is resumed.
CASES: dict[str, tuple[Any, ...]] = {
    # In the second step of the first video: one branch of guidance after the other from there on.
    "step": ("opensora", "STDiT3Block", lambda x: len(x) > 1, 5, 2, [1, 2], ()),
    # The second video's: the first has enough, and has it again.
    "decoding": ("svd", "TemporalDecoder", lambda x: len(x) > 1, 1, 1, [2, 3], ()),
    "decoding of the rest": ("svd", "TemporalDecoder", lambda x: len(x) > 1, 1, 1, [2, 3], (1,)),
    # A foreign pipeline: it is called again, and what was answered is served.
    "pipeline": ("animatediff", "UNetMidBlock2D", lambda x: len(x) > 1, 0, 1, [1], ()),
}


@pytest.mark.parametrize(
    "case",
    [
        "step", "pipeline", pytest.param("decoding", marks=pytest.mark.slow),
        pytest.param("decoding of the rest", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_what_was_done_in_less_memory_is_done_so_again(
    case: str, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    family, kind, too_large, after, kill, changed, skip = CASES[case]
    model = folder(family)
    plain = frames_by_seed([*begun(model, family, tmp_path / "plain")])
    with little(kind, too_large, after) as calls:
        events = [*begun(model, family, tmp_path / "whole")]
    assert len(calls) > 1, "the fault was not planted"
    wanted, repairs = frames_by_seed(events), list_fallbacks(events)
    assert differ(plain, wanted) == changed, "less memory changes no bits: nothing is shown"

    root = tmp_path / "killed"
    with little(kind, too_large, after, kill), pytest.raises(Killed):
        [*begun(model, family, root)]
    (run,) = all_runs(root)
    again = [*resume_run(run, pace=EVERY_STEP, skip=skip)]
    found = frames_by_seed(again)
    assert differ(found, {seed: wanted[seed] for seed in wanted if seed not in skip}) == []
    assert list_fallbacks(again) == repairs
    texts = [event.text for event in again if isinstance(event, Repaired)]
    assert all("out of memory here in the interrupted run" in text
               for text in texts)  # fmt: skip
    assert not any(all_runs(root)), "it is over"


def test_an_interrupt_leaves_torchs_choice_of_attention_as_it_was(
    folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Torch calls no hook for one, and it is by hooks that models have their kernels."""
    family, kind, too_large, after, kill, *_ = CASES["step"]
    before = _cur_sdpa_kernel_backends(with_priority=True)
    with little(kind, too_large, after, kill), pytest.raises(Killed):
        [*begun(folder(family), family, tmp_path)]
    assert _cur_sdpa_kernel_backends(with_priority=True) == before


def test_a_step_further_on_it_is_done_without_a_word(
    folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Its event came before the state was written; it is in the record."""
    family, kind, too_large, after, *_ = CASES["step"]
    model = folder(family)
    with little(kind, too_large, after):
        wanted = [*begun(model, family, tmp_path / "whole")]
    root = tmp_path / "interrupted"
    with little(kind, too_large, after), closing(begun(model, family, root)) as coming:
        assert any(isinstance(event, Step) and event.stage == "denoise" and event.step == 2
                   for event in coming)  # fmt: skip
    (run,) = all_runs(root)
    again = [*resume_run(run, pace=EVERY_STEP)]
    assert differ(frames_by_seed(again), frames_by_seed(wanted)) == []
    assert list_fallbacks(again) == []
    done = [event.record["repairs"] for event in again if isinstance(event, VideoDone)]
    assert [each["cause"] for each in done[0]] == ["memory"]


def test_what_can_not_be_kept_is_reported_and_what_can_not_be_read_is_refused(
    folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, kind, too_large, after, kill, *_ = CASES["step"]
    model, root = folder(family), tmp_path / "root"
    with little(kind, too_large, after, kill), pytest.raises(Killed):
        [*begun(model, family, root)]
    (run,) = all_runs(root)
    place = run.path / "oom_events.json"
    assert run.oom_events() == [[0, 1, [1, 1, 0, ""]]]
    written = place.read_bytes()
    place.write_text("[")
    with pytest.raises(CorruptRunError, match="generate it again from the start"):
        [*resume_run(run, pace=EVERY_STEP)]
    place.write_bytes(written)
    messages: list[str] = []
    monkeypatch.setattr(paths.os, "replace", _no_space)
    kept = FileOomLog(run, 0, 1, messages.append)
    kept.keep(kept.known()[0])
    assert messages == ["No space left on device"]


def test_a_call_made_again_in_what_others_left_saves_its_own_answers(
    folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Freeing the components of other runs is no fallback; the pipeline is called again all the
    same, and killed then.
    """
    model = folder("animatediff")
    wanted = frames_by_seed([*begun(model, "animatediff", tmp_path / "plain", num_steps=3)])
    freed, failing = iter([True]), iter([True, *[False] * 9])
    monkeypatch.setattr(WarmComponents, "free_others", lambda _: next(freed, False))
    with little("UNetMotionModel", lambda _: next(failing), 1, 2), pytest.raises(Killed):
        [*begun(model, "animatediff", tmp_path / "killed", num_steps=3)]
    assert next(freed, None) is None
    (run,) = all_runs(tmp_path / "killed")
    again = [*resume_run(run, pace=EVERY_STEP)]
    assert differ(frames_by_seed(again), wanted) == []
    assert list_fallbacks(again) == []


def _no_space(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")
