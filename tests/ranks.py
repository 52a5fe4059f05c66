"""Groups of processes for tests: started once a module, they serve all of its cases.

``ranks.run(size, function, *arguments)`` calls ``function(team, *arguments)`` in the first `size`
of them and gives what each of them returned. Functions are those of a module. A process that fails
says so at once; a hang ends with the test.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from everyframe.parallel.meeting import leave, meet
from everyframe.parallel.team import Alone, Ranks, Team

PATIENCE = 240.0
FAST = (1, 2, 3, 5)
SLOW = (4, 6, 7, 8)


#: In a process of a group: other groups of the same sizes, where the module wants some.
_SUPPLIES: dict[int, Any] = {}


def supply_of(team: Team) -> Team:
    """The ranks of a team once more, as another team; for modules that start `supplied`."""
    return Alone() if team.size == 1 else Ranks(team.weights, _SUPPLIES[team.size])


class Group:
    """So many processes that met; `supplied`, they can have a second team (`supply_of`)."""

    def __init__(self, sizes: Sequence[int], *, supplied: bool = False) -> None:
        context = multiprocessing.get_context("forkserver")
        self._folder = tempfile.TemporaryDirectory(prefix="everyframe-")
        place = str(Path(self._folder.name, "meeting"))
        self._pipes, self._processes = [], []
        for rank in range(max(sizes)):
            ours, theirs = context.Pipe()
            arguments = (rank, tuple(sizes), place, theirs, supplied)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            self._answer(pipe)

    def run(self, size: int, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """What each of `size` ranks returned; `weights` may be among `named`."""
        for pipe in self._pipes[:size]:
            pipe.send((size, function, arguments, named))
        answers = [self._answer(pipe) for pipe in self._pipes[:size]]
        for answer in answers:
            if isinstance(answer, _Failed):
                raise RankError(answer.text)
        return answers

    def close(self) -> None:
        """End them all."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.exitcode is None:
                process.kill()
        self._folder.cleanup()

    def _answer(self, pipe: Any) -> Any:
        try:
            if pipe.poll(PATIENCE):
                return pipe.recv()
        except EOFError:
            raise RankError("a rank died") from None
        for process in self._processes:
            process.kill()
        raise RankError("a rank did not answer")


class RankError(Exception):
    """What a rank raised, as text."""


class _Failed:
    def __init__(self, text: str) -> None:
        self.text = text


def _serve(rank: int, sizes: tuple[int, ...], place: str, pipe: Any, supplied: bool) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    meet(rank, [1.0] * max(sizes), Path(place), patience=PATIENCE)
    groups = {size: dist.new_group(list(range(size))) for size in sizes}
    if supplied:
        _SUPPLIES.update({size: dist.new_group(list(range(size))) for size in sizes})
    pipe.send("met")
    while True:
        try:
            size, function, arguments, named = pipe.recv()
        except EOFError:
            break
        weights = named.pop("weights", None)
        team: Team = Alone() if size == 1 else Ranks(weights, groups[size])
        try:
            with torch.no_grad():
                pipe.send(function(team, *arguments, **named))
        except Exception:
            pipe.send(_Failed(traceback.format_exc()))
    leave()


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Iterator[Group]:
    """Processes that met, for all cases of a module; import it by name to have it."""
    yield from group_of(sizes_of(request))


def sizes_of(request: pytest.FixtureRequest) -> list[int]:
    """How many ranks the cases of a module have, of those that are run."""
    module = request.node
    mine = [item for item in request.session.items if item.getparent(pytest.Module) is module]
    is_slow = any(item.get_closest_marker("slow") for item in mine)
    return [size for size in (FAST + SLOW if is_slow else FAST) if size > 1]


def group_of(sizes: Sequence[int], *, supplied: bool = False) -> Iterator[Group]:
    """For a module that wants others than these."""
    made = Group(sizes, supplied=supplied)
    yield made
    made.close()


def in_every_size(function: Callable[..., Any]) -> Any:
    """The test with `size` 1, 2, 3 and 5, and the rest of 1 to 8 when slow ones are run."""
    slow = [pytest.param(size, marks=pytest.mark.slow) for size in SLOW]
    return pytest.mark.parametrize("size", [*FAST, *slow])(function)
