"""Detect how a pipeline batches its guidance branches, by dry runs of its own call.

Pipelines differ: some put both branches into one batch, some call the denoiser once per branch,
some have guidance as an input. The call is run dry through its first steps, with guidance and
without. An argument that is n times as long with guidance holds n branches in one batch. If several
calls are made before any result is read, they can run at the same time (`lazy_tensor.py`). Anything
else is not split, and `why` gives the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from everyframe.core.facts import DeviceFacts
from everyframe.diffusers_pipelines.calls.module_calls import encoders
from everyframe.diffusers_pipelines.calls.step_tracking import bind_arguments, called_parts
from everyframe.diffusers_pipelines.inputs.defaults import denoisers
from everyframe.diffusers_pipelines.parallel.lazy_tensor import LazyTensor
from everyframe.dry_run.executor import DryRunModule, dry_run_modules
from everyframe.ops.call_override import ModuleCall, override_call

Shape = tuple[int, ...]

_TEXT = "['encoder_hidden_states']"

#: A placeholder: the calls that a pipeline makes do not depend on the device.
_ANY = DeviceFacts("any", "cpu", None, 0, 0)


@dataclass(frozen=True)
class CfgBranches:
    """The guidance branches of a pipeline's steps and how they can be split across ranks.

    Attributes:
        count: branches that different ranks can compute; 1 if they can't be split.
        why: reason why `count` is 1.
        is_together: the branches share one batch; otherwise each has a denoiser call of its own,
            and these calls can run at the same time.
        rows: rows of one branch in each batched argument, by path; all other arguments are shared.
        answer: shapes of the tensors that one denoiser call returns.
        form: pytree container of these tensors.
        num_calls: denoiser calls per step.
    """

    count: int = 1
    why: str = ""
    is_together: bool = False
    rows: Mapping[str, int] = field(default_factory=dict)
    answer: tuple[Shape, ...] = ()
    form: Any = None
    num_calls: int = 1

    @property
    def batch(self) -> int:
        """Samples per call."""
        return self.answer[0][0] if self.answer and self.answer[0] else 1


@dataclass
class _Asked:
    """One denoiser call: input shapes by path, output shapes and container."""

    given: dict[str, Shape]
    answer: tuple[Shape, ...]
    form: Any

    @property
    def is_of_tensors(self) -> bool:
        """Whether the output contains tensors only."""
        return bool(self.form.num_leaves == len(self.answer))


@dataclass
class ObservedCalls:
    """Denoiser calls observed in a dry run.

    Attributes:
        calls: the calls in order.
        unread: lengths of the series of calls whose results were not read in between.
        stopped: why the dry run did not reach the end of a step; empty if it did.
        in_parts: an encoder of which a submodule was called directly; empty if there is none.
    """

    calls: list[_Asked] = field(default_factory=list)
    unread: list[int] = field(default_factory=list)
    stopped: str = ""
    in_parts: str = ""


def find_cfg_branches(
    see: Callable[[bool], ObservedCalls], *, is_guided: bool, num_steps: int
) -> CfgBranches:
    """Find the guidance branches; ``see(guided)`` runs the call dry, with or without guidance.

    `is_guided`: guidance is requested. `num_steps`: denoising steps of such a call.
    """
    seen = see(is_guided)
    if not seen.calls:
        message = f" ({seen.stopped})" if seen.stopped else ""
        return CfgBranches(why=f"no dry run can follow its call to its denoiser's answer{message}")
    # It stops in its first step, or as the second begins: nothing casts what a scheduler makes.
    first, num_calls = seen.calls[0], -(-len(seen.calls) // (1 if seen.stopped else num_steps))
    whole = CfgBranches(answer=first.answer, form=first.form, num_calls=num_calls)
    if seen.in_parts:
        why = f"parts of its {seen.in_parts} are called by themselves, so one device can't encode"
        return _but(whole, why=f"{why} for all")
    at_once = max(seen.unread)
    if at_once > 1:
        if any(each.form != first.form or not each.is_of_tensors for each in seen.calls):
            return _but(whole, why="its denoiser's answers are not all of one form")
        return _but(whole, count=at_once)
    if not is_guided:
        return _but(whole, why="without guidance it has one branch")
    other = see(False)
    if not other.calls:
        return _but(whole, why="no dry run can follow its call without guidance")
    if first.given == other.calls[0].given and num_calls == 1:
        return _but(whole, why="it asks its denoiser about one branch")
    if num_calls > 1:
        why = f"it asks its denoiser {num_calls} times a step and looks at each answer"
        return _but(whole, why=f"{why} before it asks again")
    return _together(whole, first, other.calls[0])


def _together(whole: CfgBranches, guided: _Asked, plain: _Asked) -> CfgBranches:
    """Branches of one batch: arguments that are an integer number of times longer with guidance."""
    rows: dict[str, int] = {}
    ratios: set[float] = set()
    pairs = {path: (guided.given.get(path), plain.given.get(path)) for path in guided.given}
    pairs |= {path: (guided.given.get(path), shape) for path, shape in plain.given.items()}
    pairs |= {
        f"answer {number}": shapes
        for number, shapes in enumerate(zip(guided.answer, plain.answer, strict=True))
    }
    for path, (with_it, without) in pairs.items():
        is_answer = path.startswith("answer ")
        if with_it == without and not is_answer:
            continue
        if not with_it or not without or with_it[1:] != without[1:] or not without[0]:
            why = f"its denoiser's {path} is {with_it} with guidance and {without} without"
            return _but(whole, why=f"{why}, which are no branches beside each other")
        ratios.add(with_it[0] / without[0])
        if not is_answer:
            rows[path] = without[0]
    ratio = min(ratios)
    if len(ratios) > 1 or ratio != int(ratio) or ratio < 2:
        times = ", ".join(f"{each:g}" for each in sorted(ratios))
        return _but(whole, why=f"with guidance its denoiser gets {times} times as much")
    # Those of a text are the same ones, repeated, which the run makes sure of; others are not.
    several = [path for path, one in rows.items() if one > 1 and path != _TEXT]
    if several:
        why = f"its denoiser's {several[0]} has {rows[several[0]]} rows of each branch"
        return _but(whole, why=f"{why}, which can't be assigned to the branches")
    return _but(whole, count=int(ratio), is_together=True, rows=rows)


def _but(branches: CfgBranches, **other: Any) -> CfgBranches:
    return CfgBranches(**{**vars(branches), **other})


class _Enough(Exception):  # noqa: N818 - never leaves this module
    """The observed steps are over; the rest of the call is not needed."""


def observe_calls(modules: Mapping[str, nn.Module], call: Callable[[], object]) -> ObservedCalls:
    """Run the call dry with these components and record its denoiser calls."""
    seen = ObservedCalls()
    parts = {name: DryRunModule(module, None) for name, module in modules.items()}

    def steps(_: str) -> None:
        with _observe(modules, seen):
            try:
                call()
            except _Enough:
                return

    seen.stopped = dry_run_modules(parts, steps, _ANY, is_foreign=True).stopped
    return seen


@contextmanager
def _observe(modules: Mapping[str, nn.Module], seen: ObservedCalls) -> Iterator[None]:
    names = denoisers(modules)
    pending = _Pending(seen)
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(override_call(modules[name], partial(_note_call, seen, pending)))
        for name, module in modules.items():
            if name in encoders(modules):
                stack.enter_context(_whole(name, module, seen))
            if name not in names:
                for part in map(module.get_submodule, called_parts(module)):
                    stack.callback(part.register_forward_pre_hook(partial(_over, seen)).remove)
        stack.callback(pending.over)
        yield


def _over(seen: ObservedCalls, *_: Any) -> None:
    if seen.calls:
        raise _Enough


class _Pending:
    """Counts denoiser results that have not been read yet."""

    def __init__(self, seen: ObservedCalls) -> None:
        self._seen, self._number = seen, 0

    def given_out(self, answer: Any) -> Any:
        self._number += 1
        leaves, form = pytree.tree_flatten(answer)
        return pytree.tree_unflatten(
            [
                LazyTensor.of(partial(self._read, leaf)) if _is_tensor(leaf) else leaf
                for leaf in leaves
            ],
            form,
        )

    def _read(self, leaf: Tensor) -> Tensor:
        self.over()
        return leaf

    def over(self) -> None:
        if self._number:
            self._seen.unread.append(self._number)
        self._number = 0


def _note_call(seen: ObservedCalls, pending: _Pending, call: ModuleCall) -> Any:
    answer = call.compute()
    leaves, form = pytree.tree_flatten(answer)
    shapes = tuple(tuple(leaf.shape) for leaf in leaves if _is_tensor(leaf))
    given = tensors_by_path(call.module, call.args, call.kwargs)
    paths = {path: tuple(leaf.shape) for path, leaf in given.items()}
    seen.calls.append(_Asked(paths, shapes, form))
    return pending.given_out(answer)


@contextmanager
def _whole(name: str, encoder: nn.Module, seen: ObservedCalls) -> Iterator[None]:
    """Context: detect calls of an encoder's submodules outside a call of the encoder."""
    depth = 0

    def enters(*_: Any) -> None:
        nonlocal depth
        depth += 1

    def leaves(*_: Any) -> None:
        nonlocal depth
        depth -= 1

    def is_called(*_: Any) -> None:
        if not depth:
            seen.in_parts = name

    handles = [
        encoder.register_forward_pre_hook(enters, prepend=True),
        encoder.register_forward_hook(leaves, always_call=True),
        *(part.register_forward_pre_hook(is_called) for part in encoder.children()),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def tensors_by_path(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Tensor]:
    """All tensors that a module is called with, by their pytree path."""
    leaves, _ = pytree.tree_flatten_with_path(bind_arguments(module, args, kwargs))
    return {pytree.keystr(path): leaf for path, leaf in leaves if _is_tensor(leaf)}


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)
