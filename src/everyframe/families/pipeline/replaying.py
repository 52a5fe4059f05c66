"""A pipeline that is called again gets the answers that its denoisers gave before.

So a run that was broken off goes on where it was, though the pipeline's own loop always begins at
its first step: everything around the denoisers is computed anew, with the same generator and the
same scheduler, and costs next to nothing. An answer is served to a call that is given the same, bit
for bit, as the one that it was the answer to. On leaving the denoisers are as they were.
Of several ranks that make one video the first has the answers, and hands each on to the others.
Read next: `stages.py`; `everyframe.runs.answers`, where the answers lie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from everyframe.core.plan import Remedy
from everyframe.families.family import Answers, Take
from everyframe.families.pipeline.digests import digest_call
from everyframe.families.pipeline.global_generators import is_same, states_of_torch
from everyframe.families.pipeline.watching import StepWatch, seen_before
from everyframe.numerics.watch import tensors_in
from everyframe.parallel.team import Team
from everyframe.precision.edges import map_tensors

_WHAT = "kept answers are handed on"


class HandedOn:
    """The `own` answers of the first rank on all ranks of `team`; the others keep none.

    All must ask for them in the same order. What is in them but tensors is nothing.
    """

    def __init__(self, team: Team, own: Answers | None) -> None:
        assert team.is_lead or own is None
        self._team, self._own = team, own

    def next(self, call: str) -> Any:
        """See `Answers`."""
        answer = None if self._own is None else self._own.next(call)
        leaves, form = pytree.tree_flatten(answer)
        is_there = [leaf is not None for leaf in leaves]
        said = None if answer is None else [pytree.treespec_dumps(form), is_there]
        told = self._team.tell(said, 0, _WHAT)
        if told is None:
            return None
        tensors = [leaf for leaf in leaves if leaf is not None]
        came = iter(self._team.share(tensors if self._team.is_lead else None, 0, _WHAT))
        if self._team.is_lead:
            return answer
        written, is_there = told
        each = [next(came) if there else None for there in is_there]
        return pytree.tree_unflatten(each, pytree.treespec_loads(written))

    def keep(self, answer: Any, remedies: tuple[Remedy, ...]) -> None:
        """See `Answers`."""
        if self._own is not None:
            self._own.keep(answer, remedies)

    def again(self) -> None:
        """See `Answers`."""
        raise AssertionError("one rank of several is not called again by itself")

    def remedies(self) -> tuple[Remedy, ...]:
        """See `Answers`."""
        mine = [] if self._own is None else [asdict(each) for each in self._own.remedies()]
        return tuple(Remedy(**each) for each in self._team.tell(mine, 0, _WHAT))


class Replaying:
    """Serves and keeps the answers of these denoisers, by name, while it is entered.

    `watch` is told of the calls that are served, and which are repeated to repair them. If it is
    not `at_once`, answers come later than calls return, and whoever has them keeps them.
    """

    def __init__(
        self,
        denoisers: Mapping[str, nn.Module],
        watch: StepWatch,
        take: Take,
        *,
        at_once: bool = True,
    ) -> None:
        # What a cache holds of earlier calls is in the module and not in its answers.
        has_cache = any(getattr(part, "is_cache_enabled", False) for part in denoisers.values())
        self._denoisers = {} if take.answers is None or has_cache else dict(denoisers)
        self._watch = watch
        self._take, self._at_once = take, at_once
        self._can_keep = True
        self._on = ExitStack()

    def __enter__(self) -> Replaying:
        answers = self._take.answers
        if self._denoisers and answers is not None:
            self._take.remedies = answers.remedies()
            for name, module in self._denoisers.items():
                served = partial(self._called, answers, name)
                self._on.enter_context(answered_by(module, served))
        return self

    def __exit__(self, *_: object) -> None:
        self._on.close()

    def _called(
        self,
        answers: Answers,
        name: str,
        base: type[nn.Module],
        own: nn.Module,
        args: Any,
        kwargs: dict[str, Any],
    ) -> Any:
        """What is kept, while there is any; then what is computed, which is kept."""
        if self._watch.is_paused:
            return base.__call__(own, *args, **kwargs)
        # On every rank, as all have to look at the same tensors at the same time.
        answer = answers.next(digest_call(name, args, kwargs))
        if answer is not None:
            seen_before(self._watch, name, own, args, kwargs)
            # It lay in a file: to where the one that is computed would be, with its inputs.
            here = next(tensors_in((args, kwargs)))
            return map_tensors(answer, lambda kept: kept.to(here.device))
        devices = {each.device for each in tensors_in((args, kwargs))}
        before = states_of_torch(devices)
        answer = base.__call__(own, *args, **kwargs)
        # Where one is served nothing is drawn, and what draws after it would get other numbers: so
        # neither it nor what comes after it is kept.
        self._can_keep &= is_same(before, states_of_torch(devices))
        if self._at_once and self._can_keep:
            answers.keep(answer, self._take.remedies)
        return answer


@contextmanager
def answered_by(
    module: nn.Module, answer: Callable[[type[nn.Module], nn.Module, Any, Any], Any]
) -> Iterator[None]:
    """Within, calls of that module are answered by ``answer(class, module, args, kwargs)``.

    A hook can't keep a module from being computed, so for a while it is of a kind of its own;
    somebody else's class is left alone.
    """
    base = type(module)

    def call(own: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return answer(base, own, args, kwargs)

    kind = type(base.__name__, (base,), {"__call__": call, "__module__": base.__module__})
    module.__class__ = kind
    try:
        yield
    finally:
        module.__class__ = base
