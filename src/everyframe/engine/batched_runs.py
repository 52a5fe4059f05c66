"""Several runs of one plan at once: where their denoisers are called at the same time, one call.

Each run has its own event stream, seed, run folder and errors, and the same bits as alone. Its
thread alternates with the others and stops at each denoiser call. Once all runs have stopped, calls
of equal sizes are computed as one (`runtime.batched_calls`), so a run may join at any step. A run
that needs a repair or memory fallback leaves, because that changes a module that others use.

The first calls of each batch size are compared with the same calls made one by one. If the bits
differ or batching is slower, calls are made one by one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from everyframe.core.errors import LeftBatchError
from everyframe.core.events import Event, Events, Planned
from everyframe.core.plan import Plan
from everyframe.engine.run import torch_set_by
from everyframe.fast_paths.batch_certificates import BatchTrial, batched_components
from everyframe.hardware.memory import is_out_of_memory
from everyframe.hardware.switches import Turn
from everyframe.hardware.throughput import wait_for_device
from everyframe.ops.call_override import ModuleCall, override_call
from everyframe.runtime.alternating_thread import AlternatingThread
from everyframe.runtime.batch_member import MEMBER
from everyframe.runtime.batched_calls import (
    BatchedModule,
    can_batch,
    have_equal_bits,
    signature_of,
)
from everyframe.runtime.model_sharding import ModelPatch


@dataclass(frozen=True)
class RunEnded:
    """The end of a run in a batch; with its error, unless it is done or was stopped."""

    error: Exception | None = None


#: Answer to a call that its run makes itself.
_ALONE = object()


class BatchedRuns:
    """Runs that are computed together; iterate over `events`, and `add` runs meanwhile.

    Attributes:
        is_closed: the only run that was left has changed modules: no other may be added.
    """

    def __init__(self) -> None:
        self.is_closed = False
        self._room = 1
        self._runs: dict[int, _Member] = {}
        self._plan: Plan | None = None
        self._turn, self._settings = Turn(is_alone=True), ExitStack()
        self._modules: dict[tuple[int, ...], _SharedModule] = {}
        self._trials: dict[Hashable, BatchTrial] = {}

    @property
    def has_room(self) -> bool:
        """Whether another run may join those that are under way, by the last plan."""
        return not self.is_closed and 0 < len(self._runs) < self._room

    def add(self, name: int, begin: Callable[[], Events]) -> None:
        """Add a run; ``begin()`` gives its events."""
        assert name not in self._runs, name
        assert not self.is_closed, "a closed batch"
        self._runs[name] = _Member(self, begin)

    def stop(self, name: int) -> None:
        """Stop a run after its next event; what it saved stays."""
        if name in self._runs:
            self._runs[name].is_stopped = True

    def events(self) -> Iterator[tuple[int, Event | RunEnded]]:
        """Events of all runs by name, each run's in order and `RunEnded` last, until all ended."""
        try:
            # Around all runs, so that the turn of each is part of this one.
            self._settings.enter_context(self._turn)
            while self._runs:
                going = next((name for name, run in self._runs.items() if run.call is None), None)
                if going is None:
                    self._answer_calls()
                    continue
                for event in self._until_call(self._runs[going]):
                    if isinstance(event, RunEnded):
                        del self._runs[going]
                    yield going, event
        finally:
            for run in self._runs.values():
                run.end()
            self._runs.clear()
            self._settings.close()

    def _until_call(self, run: _Member) -> Iterator[Event | RunEnded]:
        while run.call is None:
            found = run.proceed()
            if isinstance(found, ModuleCall):
                run.call = found
                return
            if isinstance(found, Planned):
                self._admit(run, found.plan)
            yield found
            if isinstance(found, RunEnded):
                return

    def _admit(self, run: _Member, plan: Plan) -> None:
        if plan.infeasible is not None:
            return  # it ends now
        self._room = 1 if plan.batch is None else plan.batch.num_videos
        if self._plan is None:
            self._plan = plan
            # Around all runs too: each sets and restores the same values.
            self._settings.enter_context(torch_set_by(plan, self._turn))
        elif _identity(plan) != _identity(self._plan):
            run.refusal = LeftBatchError(
                "its plan differs from that of the batch; the run is made alone"
            )

    def change_modules(self, why: str) -> None:
        """See `BatchMember`."""
        if len(self._runs) > 1:
            raise LeftBatchError(f"{why}; the run is resumed alone, from its last saved step")
        self.is_closed = True

    @contextmanager
    def denoising(
        self,
        modules: Mapping[str, Any],
        shard: Callable[[Mapping[str, Any]], ModelPatch],
    ) -> Iterator[ModelPatch]:
        """See `BatchMember.denoising`."""
        key = tuple(id(each) for each in modules.values())
        shared = self._modules.get(key)
        if shared is None:
            shared = self._modules[key] = _SharedModule(modules, shard, self._meet)
        shared.num_runs += 1
        try:
            yield shared.patch
        finally:
            shared.num_runs -= 1
            if not shared.num_runs:
                del self._modules[key]
                shared.close()

    def _meet(self, call: ModuleCall) -> Any:
        member = MEMBER.get()
        if not isinstance(member, _Member) or not member.may_meet or not can_batch(call):
            return call.compute()
        answer = member.hand_over(call)
        return call.compute() if answer is _ALONE else answer

    def _answer_calls(self) -> None:
        """Answer the calls at which all runs have stopped."""
        groups: dict[Hashable, list[_Member]] = {}
        for run in self._runs.values():
            assert run.call is not None
            groups.setdefault(signature_of(run.call), []).append(run)
        for signature, runs in groups.items():
            calls = [run.call for run in runs if run.call is not None]
            for run, answer in zip(runs, self._answers(signature, calls), strict=True):
                run.call, run.answer = None, answer

    def _answers(self, signature: Hashable, calls: Sequence[ModuleCall]) -> Sequence[Any]:
        assert self._plan is not None
        one_by_one = [_ALONE] * len(calls)
        if len(calls) == 1 or not batched_components(self._plan):
            return one_by_one
        key = signature, len(calls)
        trial = self._trials.get(key)
        if trial is None:
            trial = self._trials[key] = BatchTrial(self._plan, len(calls))
        if trial.is_refused:
            return one_by_one
        module = self._module_of(calls[0])
        try:
            if trial.is_certified and module.knows(signature):
                return module.compute(calls)
            return _try_batch(trial, module, signature, calls)
        except Exception as error:  # noqa: BLE001 - each run makes its call itself, and has its error
            is_oom = is_out_of_memory(error)
            trial.refuse("memory ran out" if is_oom else str(error), is_lasting=not is_oom)
        return one_by_one

    def _module_of(self, call: ModuleCall) -> _SharedModule:
        return next(each for each in self._modules.values() if each.has(call.module))


def _try_batch(
    trial: BatchTrial, module: _SharedModule, signature: Hashable, calls: Sequence[ModuleCall]
) -> list[Any]:
    """Results of calls made one by one; the trial takes how those of one call compare."""
    device = str(calls[0].args[0].device)
    module.prepare()
    wait_for_device(device)
    began = time.perf_counter()
    alone = [call.compute() for call in calls]
    wait_for_device(device)
    between = time.perf_counter()
    together = module.compute(calls)
    wait_for_device(device)
    after = time.perf_counter()
    module.note(signature)
    trial.take(
        is_equal=have_equal_bits(alone, together),
        seconds_alone=between - began,
        seconds_together=after - between,
    )
    return alone


class _SharedModule:
    """Modules that runs denoise with, patched once for all of them.

    Their products are patched with the first calls that meet: a run that stays alone pays nothing.
    """

    def __init__(
        self,
        modules: Mapping[str, Any],
        shard: Callable[[Mapping[str, Any]], ModelPatch],
        meet: Callable[[ModuleCall], Any],
    ) -> None:
        self.num_runs = 0
        self._modules = [*modules.values()]
        self._known: set[Hashable] = set()
        with ExitStack() as stack:
            self.patch = stack.enter_context(shard(modules))
            self._batched: dict[int, BatchedModule] = {}
            for each in self._modules:
                stack.enter_context(override_call(each, meet))
            self._stack = stack.pop_all()

    def prepare(self) -> None:
        """Patch the products, before calls are made alone that shall show where rows lie."""
        if not self._batched:
            self._batched = {
                id(each): self._stack.enter_context(BatchedModule(each)) for each in self._modules
            }

    def compute(self, calls: Sequence[ModuleCall]) -> list[Any]:
        """Results of these calls, made as one."""
        return self._batched[id(calls[0].module)].compute(calls)

    def has(self, module: object) -> bool:
        return any(each is module for each in self._modules)

    def knows(self, signature: Hashable) -> bool:
        """Whether calls of these sizes were made alone before, which shows where rows lie."""
        return signature in self._known

    def note(self, signature: Hashable) -> None:
        self._known.add(signature)

    def close(self) -> None:
        self._stack.close()


@dataclass
class _Member:
    """One run, in a thread that alternates with that of the batch.

    Attributes:
        call: the call at which it has stopped.
        answer: what it gets for that call.
        refusal: raised in it as soon as it continues.
    """

    batch: BatchedRuns
    begin: Callable[[], Events]
    call: ModuleCall | None = None
    answer: Any = None
    refusal: Exception | None = None
    is_stopped: bool = False
    may_meet: bool = False
    _thread: AlternatingThread = field(init=False)

    def __post_init__(self) -> None:
        self._thread = AlternatingThread(self._run, "everyframe-run")

    def proceed(self) -> Any:
        """Its next event or call, or its `RunEnded`."""
        answer, self.answer = self.answer, None
        return self._thread.resume(answer)

    def hand_over(self, found: object) -> Any:
        """Hand an event or a call to the batch, from inside of the run; its answer."""
        answer = self._thread.hand_over(found)
        if self.refusal is not None:
            raise self.refusal
        return answer

    def end(self) -> None:
        """End it where it is, which is in the middle of a step."""
        self._thread.stop()

    def denoising(
        self,
        modules: Mapping[str, Any],
        shard: Callable[[Mapping[str, Any]], ModelPatch],
    ) -> AbstractContextManager[ModelPatch]:
        """See `BatchMember`."""
        return self.batch.denoising(modules, shard)

    def change_modules(self, why: str) -> None:
        """See `BatchMember`."""
        self.batch.change_modules(why)

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """See `BatchMember`."""
        self.may_meet = True
        try:
            yield
        finally:
            self.may_meet = False

    def _run(self) -> RunEnded:
        MEMBER.set(self)
        try:
            with closing(self.begin()) as events:
                for event in events:
                    self.hand_over(event)
                    if self.is_stopped:
                        break
        except Exception as error:  # noqa: BLE001 - the run's error is the run's
            return RunEnded(error)
        return RunEnded()


def _identity(plan: Plan) -> Hashable:
    """What runs of a batch have in common: all but the prompt and the seed."""
    components = [
        (each.name, each.device, each.precision, each.repairs, each.fast_paths)
        for each in plan.components
    ]
    settings = replace(plan.settings, prompt="", negative_prompt=None, seed=0)
    return repr(components), repr(settings), plan.num_threads, plan.switches, plan.parallel
