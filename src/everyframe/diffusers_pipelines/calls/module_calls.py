"""Replay saved denoiser answers on resume, and run encoders on the lead rank only.

A pipeline's own loop always begins at its first step. On resume the pipeline is therefore called
again, and its denoisers return the saved answers. Everything around them is recomputed with the
same generator and scheduler, at almost no cost. An answer is replayed only to a call whose inputs
are bit for bit those of the original call. The denoisers are restored on exit.

With several ranks per video, the lead rank reads the answers and broadcasts them.
`everyframe.runs.replay_log` stores them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from everyframe.core.errors import CannotRunError
from everyframe.core.plan import Repair
from everyframe.diffusers_pipelines.calls.digests import digest_call, writable_state
from everyframe.diffusers_pipelines.calls.global_generators import is_same, states_of_torch
from everyframe.diffusers_pipelines.calls.step_caches import EmptyCaches
from everyframe.diffusers_pipelines.calls.step_tracking import StepTracker, notify_step_tracker
from everyframe.diffusers_pipelines.files.checkpoint import ComponentFolder
from everyframe.diffusers_pipelines.files.component_classes import empty_component
from everyframe.numerics.tensor_stats import iter_tensors
from everyframe.ops.call_override import ModuleCall, override_call
from everyframe.parallel.communicator import Communicator
from everyframe.precision.cast_hooks import map_tensors
from everyframe.runtime.components.meta_init import build_on_meta
from everyframe.runtime.interface import VideoState
from everyframe.runtime.run_logs import GivenInput, ReplayLog

_WHAT = "kept answers are broadcast"


class BroadcastReplayLog:
    """Replay log of the lead rank (`own`), broadcast to all ranks of `group`; the others save none.

    All ranks must request answers in the same order. Leaves that are not tensors become None.
    """

    def __init__(self, group: Communicator, own: ReplayLog | None) -> None:
        assert group.is_lead or own is None
        self._group, self._own = group, own

    def next(self, call: str) -> Any:
        """See `ReplayLog`."""
        answer = None if self._own is None else self._own.next(call)
        came = self._group.broadcast_tree(answer, 0, _WHAT)
        return answer if self._group.is_lead else came

    def keep(self, answer: Any, repairs: tuple[Repair, ...]) -> None:
        """See `ReplayLog`."""
        if self._own is not None:
            self._own.keep(answer, repairs)

    def again(self) -> None:
        """See `ReplayLog`."""
        raise AssertionError("one rank of several is not called again by itself")

    def repairs(self) -> tuple[Repair, ...]:
        """See `ReplayLog`."""
        mine = [] if self._own is None else [asdict(each) for each in self._own.repairs()]
        return tuple(Repair(**each) for each in self._group.broadcast_object(mine, 0, _WHAT))


class DenoiserReplay:
    """Context: replay and save the answers of these denoisers, by name.

    `watch` counts replayed calls and marks calls that are repeated for a repair. With `at_once`
    False results arrive after the call returns (CFG parallelism), and `GuardedCallHooks` saves them
    instead. Denoisers with a step cache of their owner are computed from the first step on, their
    caches empty.
    """

    def __init__(
        self,
        denoisers: Mapping[str, nn.Module],
        watch: StepTracker,
        video: VideoState,
        *,
        at_once: bool = True,
    ) -> None:
        self._caches = EmptyCaches(denoisers, watch)
        # What a cache holds of earlier calls is in the module and not in its answers.
        is_replayed = video.replay_log is not None and not self._caches.modules
        self._denoisers = dict(denoisers) if is_replayed else {}
        self._watch = watch
        self._video, self._at_once = video, at_once
        self._can_keep = True
        self._on = ExitStack()

    def __enter__(self) -> DenoiserReplay:
        self._on.enter_context(self._caches)
        answers = self._video.replay_log
        if self._denoisers and answers is not None:
            self._video.repairs = answers.repairs()
            for name, module in self._denoisers.items():
                served = partial(self._answer_call, answers, name)
                self._on.enter_context(override_call(module, served))
        return self

    def __exit__(self, *_: object) -> None:
        self._on.close()

    def _answer_call(self, answers: ReplayLog, name: str, call: ModuleCall) -> Any:
        """Return the saved answer if there is one; otherwise compute and save it."""
        args, kwargs = call.args, call.kwargs
        if self._watch.is_paused:
            return call.compute()
        # On every rank, as all have to look at the same tensors at the same time.
        answer = answers.next(digest_call(name, args, kwargs))
        if answer is not None:
            notify_step_tracker(self._watch, name, call.module, args, kwargs)
            # It lay in a file: to where the one that is computed would be, with its inputs.
            here = next(iter_tensors((args, kwargs)))
            return _follow(map_tensors(answer, lambda kept: kept.to(here.device)), kwargs)
        devices = {each.device for each in iter_tensors((args, kwargs))}
        before = states_of_torch(devices)
        keeps = self._at_once and self._can_keep
        state = writable_state(args, kwargs) if keeps else []
        answer = call.compute()
        # Where one is served nothing is drawn, and what draws after it would get other numbers: so
        # neither it nor what comes after it is kept.
        self._can_keep &= is_same(before, states_of_torch(devices))
        if keeps and self._can_keep:
            # A call that fills a cache for later ones is kept without its answer, and made again.
            is_changed = writable_state(args, kwargs) != state
            answers.keep(None if is_changed else _refer(answer, kwargs), self._video.repairs)
        return answer


def _refer(answer: Any, given: Mapping[str, Any]) -> Any:
    """The answer, with the containers that it hands back named: AnyFlow's has its cache in it."""
    if type(answer) is not tuple:
        return answer
    names = {id(value): name for name, value in given.items() if isinstance(value, (dict, list))}
    return tuple(GivenInput(names[id(each)]) if id(each) in names else each for each in answer)


def _follow(answer: Any, given: Mapping[str, Any]) -> Any:
    """The answer with the inputs that `_refer` named."""
    if type(answer) is not tuple:
        return answer
    return tuple(given[each.name] if isinstance(each, GivenInput) else each for each in answer)


_ENCODED = "what is encoded is broadcast"

_NAMES = ("text_encoder", "image_encoder")


def encoders(names: Any) -> tuple[str, ...]:
    """Names of the components that encode text and images by calls of the whole module."""
    return tuple(name for name in names if name.startswith(_NAMES))


def without_weights(part: ComponentFolder, dtype: torch.dtype) -> nn.Module:
    """An encoder on meta, for ranks that do not encode; pipelines read its config and dtype."""
    module: nn.Module = build_on_meta(partial(empty_component, part))
    return module.to(dtype).eval()


class EncodeOnLeadRank:
    """Context: the lead rank of `group` computes calls of these modules and broadcasts the results.

    All ranks must make the same calls in the same order. Results arrive on `device`, bit for bit.
    """

    def __init__(self, modules: Mapping[str, nn.Module], group: Communicator, device: str) -> None:
        self._modules, self._group, self._device = dict(modules), group, device
        self._on = ExitStack()

    def __enter__(self) -> EncodeOnLeadRank:
        # EasyAnimate puts a text's tokens, and what comes of them, where the encoder is.
        place = {} if self._group.is_lead else {"device": property(lambda _: self._here)}
        for module in self._modules.values():
            self._on.enter_context(override_call(module, self._answer_call, place))
        return self

    @property
    def _here(self) -> torch.device:
        return torch.device(self._device)

    def __exit__(self, *_: object) -> None:
        self._on.close()

    def _answer_call(self, call: ModuleCall) -> Any:
        answer = call.compute() if self._group.is_lead else None
        leaves, form = pytree.tree_flatten(answer, is_leaf=_is_leaf)
        plain = pytree.tree_unflatten([_plain(leaf) for leaf in leaves], form)
        # Of what is left: an output of transformers has no entry for a cache that became None.
        left = pytree.tree_leaves(plain)
        is_here = [isinstance(leaf, Tensor) and leaf.device.type != "cpu" for leaf in left]
        came, is_here = self._group.broadcast_tree((plain, is_here), 0, _ENCODED)
        if self._group.is_lead:
            return answer
        leaves, form = pytree.tree_flatten(came)
        placed = [
            leaf.to(self._device) if here else leaf
            for leaf, here in zip(leaves, is_here, strict=True)
        ]
        return pytree.tree_unflatten(placed, form)


def _is_leaf(value: Any) -> bool:
    """Flatten containers and transformers' outputs only."""
    return not isinstance(value, (dict, list, tuple))


def _plain(value: Any) -> Any:
    """A tensor or plain value as it is; a language model's KV cache becomes None."""
    if value is None or isinstance(value, (bool, int, float, str, Tensor)):
        return value
    if type(value).__name__.endswith("Cache"):
        return None
    raise CannotRunError(
        f"an encoder answers with a {type(value).__name__}, which can't be sent to other "
        "devices; give one device"
    )
