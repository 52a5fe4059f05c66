"""Faults in pipelines that several ranks compute together: found, repaired and reported by all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import everyframe
from everyframe.core.errors import NumericsError
from everyframe.parallel.communicator import Communicator, SingleRank
from helpers.interrupted_ranks import videos
from helpers.pipeline_ranks import requests_of, run
from helpers.rank_pool import Group, RankError, group_of


@pytest.fixture(scope="module")
def ranks() -> Any:
    yield from group_of((2,))


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return requests_of(("wan", "ltx"), tmp_path_factory.mktemp("models"))


#: By torch's own gelu, which `_overflow` replaces; other tests may have certified ours.
FAULTY = {"dtype": "bf16", "force": True, "disable": ("native-gelu", "linear-gelu")}


def _overflow(group: Communicator) -> Any:
    """The first feed-forward's products have an infinity, wherever they are in bfloat16."""
    original = torch.nn.functional.gelu

    def gelu(x: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(x, *args, **kwargs)
        return out * torch.inf if out.dtype == torch.bfloat16 and out.ndim == 3 else out

    torch.nn.functional.gelu = gelu
    return lambda: setattr(torch.nn.functional, "gelu", original)


@pytest.mark.slow
@pytest.mark.usefixtures("unrepaired")
def test_a_repair_is_the_same_on_every_rank(ranks: Group, asked: dict[str, dict[str, Any]]) -> None:
    """Each looks for the fault alone; an exchange in the middle of that would never end."""
    found = ranks.run(2, run, {**asked["ltx"], **FAULTY}, fault=_overflow)
    of_denoiser = [[each for each in one["repairs"] if each[0] == "transformer"] for one in found]
    assert of_denoiser[0] == of_denoiser[1] != []
    assert np.isfinite(videos(found)[3]).all()


@pytest.mark.slow
@pytest.mark.usefixtures("unrepaired")
@pytest.mark.parametrize("name", ["wan", "ltx"])
def test_a_fault_in_one_ranks_branch_is_repaired_on_all(
    ranks: Group, asked: dict[str, dict[str, Any]], name: str
) -> None:
    given = {**asked[name], **FAULTY, "parallel": "cfg=2"}
    found = ranks.run(2, run, given, fault=_overflow_of_the_second)
    of_denoiser = [[each for each in one["repairs"] if each[0] == "transformer"] for one in found]
    assert of_denoiser[0] == of_denoiser[1] != []
    assert np.isfinite(videos(found)[3]).all()


@pytest.mark.slow
@pytest.mark.usefixtures("unrepaired")
def test_branches_that_overflow_alike_are_repaired_as_on_one_device(
    ranks: Group, asked: dict[str, dict[str, Any]]
) -> None:
    """The second branch's answer is older than the first one's repair: it is computed again."""
    given = {**asked["wan"], **FAULTY, "forget_repairs": True}
    one = run(SingleRank(), given, fault=_overflow)
    found = ranks.run(2, run, {**given, "parallel": "cfg=2"}, fault=_overflow)
    assert [each["repairs"] for each in found] == [one["repairs"]] * 2
    assert one["repairs"]
    assert not any("when repeated" in note for each in found for note in each["notes"])
    np.testing.assert_array_equal(videos(found)[3], one["frames"][3])


@pytest.mark.slow
def test_the_first_rank_writes_the_report_of_a_fault_that_all_find(tmp_path: Path) -> None:
    """Also where another rank's error comes first."""
    given = requests_of(("wan",), tmp_path)["wan"]
    (file,) = (tmp_path / "wan" / "transformer").glob("*.safetensors")
    weights = load_file(file)
    for name in ("blocks.0.ffn.net.0.proj.weight", "blocks.0.ffn.net.2.weight"):
        weights[name] *= 1e25
    save_file(weights, file)
    with pytest.raises(NumericsError, match=r"report\.html"):
        everyframe.generate(**given, num_devices=2, report=str(tmp_path / "report"))
    assert (tmp_path / "report" / "report.html").is_file()


@pytest.mark.slow
def test_ranks_that_find_other_branches_are_an_error(
    ranks: Group, asked: dict[str, dict[str, Any]]
) -> None:
    """In place of groups that some wait for and others never join."""
    with pytest.raises(RankError, match="the same plan: ranks of guidance branches"):
        ranks.run(2, run, {**asked["wan"], "parallel": "cfg=2"}, fault=_other_branches)


def _other_branches(group: Communicator) -> Any:
    from everyframe.engine import distributed

    original = distributed._ranks_of_branches
    if group.rank:
        distributed._ranks_of_branches = lambda *_: [[0, 1]]
    return lambda: setattr(distributed, "_ranks_of_branches", original)


def _overflow_of_the_second(group: Communicator) -> Any:
    """As `_overflow`, and in what the second rank alone computes; alone, both find it."""
    undo = _overflow(group)
    if group.rank:
        return undo
    faulty = torch.nn.functional.gelu
    undo()
    from everyframe.diffusers_pipelines.guarded_calls import GuardedCallHooks

    original = GuardedCallHooks.checked

    def checked(self: Any, call: Any, answer: Any) -> Any:
        own, torch.nn.functional.gelu = torch.nn.functional.gelu, faulty
        try:
            return original(self, call, answer)
        finally:
            torch.nn.functional.gelu = own

    GuardedCallHooks.checked = checked  # type: ignore[method-assign]
    return lambda: setattr(GuardedCallHooks, "checked", original)
