"""Pool of rank processes for tests, started once per test module.

``ranks.run(size, function, *arguments)`` calls ``function(group, *arguments)`` in the first `size`
processes and returns their results. Functions must be importable. The error of a process is raised
at once; a hang ends with the test. A group of fewer than all processes can't be split further,
unless the processes rendezvous again for it: ``whole=True``.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from everyframe.parallel.communicator import Communicator, SingleRank, TorchCommunicator
from everyframe.parallel.rendezvous import destroy, join_ranks
from helpers import freed_memory

PATIENCE = 240.0
FAST = (1, 2, 3, 5)
SLOW = (4, 6, 7, 8)


#: In a process of a group: other groups of the same sizes, where the module wants some.
_SUPPLIES: dict[int, Any] = {}


def supply_of(group: Communicator) -> Communicator:
    """The ranks of a group once more, as another group; for modules that start `supplied`."""
    return (
        SingleRank() if group.size == 1 else TorchCommunicator(group.weights, _SUPPLIES[group.size])
    )


class Group:
    """So many processes that met; `supplied`, they can have a second group (`supply_of`)."""

    def __init__(self, sizes: Sequence[int], *, supplied: bool = False) -> None:
        self._sizes, self._num_meetings, self._number = tuple(sizes), 1, max(sizes)
        context = multiprocessing.get_context("forkserver")
        self._folder = tempfile.TemporaryDirectory(prefix="everyframe-")
        self._pipes, self._processes = [], []
        for rank in range(max(sizes)):
            ours, theirs = context.Pipe()
            arguments = (rank, self._meeting(), theirs, supplied)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            self._answer(pipe)

    def run(
        self,
        size: int,
        function: Callable[..., Any],
        *arguments: Any,
        whole: bool = False,
        **named: Any,
    ) -> Any:
        """What each of `size` ranks returned; `weights` may be among `named`.

        With `whole` there are no other processes in the world but these.
        """
        number = size if whole else len(self._pipes)
        if number != self._number:
            self._number, self._num_meetings = number, self._num_meetings + 1
            for pipe in self._pipes[:number]:
                pipe.send(self._meeting())
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

    def _meeting(self) -> _Meeting:
        place = Path(self._folder.name, f"meeting {self._num_meetings}")
        sizes = tuple(size for size in self._sizes if size <= self._number)
        return _Meeting(place, self._number, sizes)

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


@dataclass(frozen=True)
class _Meeting:
    """Where so many ranks meet, to form groups of these sizes."""

    place: Path
    number: int
    sizes: tuple[int, ...]

    def joined(self, rank: int, *, supplied: bool) -> dict[int, Any]:
        """The groups by size; all of these ranks must call it."""
        import torch.distributed as dist

        destroy()
        join_ranks(rank, [1.0] * self.number, self.place, patience=PATIENCE)
        groups = {size: dist.new_group(list(range(size))) for size in self.sizes}
        groups.setdefault(self.number, None)  # which is all of them
        if supplied:
            _SUPPLIES.update({size: dist.new_group(list(range(size))) for size in self.sizes})
        return groups


def _serve(rank: int, meeting: _Meeting, pipe: Any, supplied: bool) -> None:
    torch.set_num_threads(1)
    freed_memory.keep()
    groups = meeting.joined(rank, supplied=supplied)
    pipe.send("met")
    while True:
        try:
            message = pipe.recv()
        except EOFError:
            break
        if isinstance(message, _Meeting):
            groups = message.joined(rank, supplied=supplied)
            continue
        size, function, arguments, named = message
        weights = named.pop("weights", None)
        try:
            group: Communicator = (
                SingleRank() if size == 1 else TorchCommunicator(weights, groups[size])
            )
            with torch.no_grad():
                pipe.send(function(group, *arguments, **named))
        except Exception:
            pipe.send(_Failed(traceback.format_exc()))
    destroy()


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Iterator[Group]:
    """Processes that met, for all cases of a module; import it by name to have it."""
    yield from group_of(sizes_of(request))


def sizes_of(request: pytest.FixtureRequest) -> list[int]:
    """How many ranks the cases of a module have, of those that are run."""
    return [size for size in (FAST + SLOW if runs_slow(request) else FAST) if size > 1]


def runs_slow(request: pytest.FixtureRequest) -> bool:
    """Whether slow cases of the module are run."""
    module = request.node
    mine = [item for item in request.session.items if item.getparent(pytest.Module) is module]
    return any(item.get_closest_marker("slow") for item in mine)


def group_of(sizes: Sequence[int], *, supplied: bool = False) -> Iterator[Group]:
    """For a module that wants others than these."""
    made = Group(sizes, supplied=supplied)
    yield made
    made.close()


def in_every_size(function: Callable[..., Any]) -> Any:
    """The test with `size` 1, 2, 3 and 5, and the rest of 1 to 8 when slow ones are run."""
    slow = [pytest.param(size, marks=pytest.mark.slow) for size in SLOW]
    return pytest.mark.parametrize("size", [*FAST, *slow])(function)
