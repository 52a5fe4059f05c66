"""Caches between the blocks of Open-Sora's STDiT3, for `blockcache.py`; no method of Everyframe.

A cache is a function ``(x, t, blocks) -> x``: the hidden states before the first block, the
timestep, and the blocks as functions. In each step it calls those that it computes.
`CachedStack` makes it stand in the model for the loop over the blocks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor, nn

from everyframe.ops.call_override import ModuleCall, override_call
from everyframe.samplers.prediction import lagrange_weights

Block = Callable[[Tensor], Tensor]
Cache = Callable[[Tensor, float, Sequence[Block]], Tensor]


def through(x: Tensor, blocks: Sequence[Block]) -> Tensor:
    """All of these blocks computed."""
    for block in blocks:
        x = block(x)
    return x


class CachedStack:
    """Context: a cache stands for the loop over a model's blocks.

    Guidance branches are one call here: a call for each step, at falling timesteps.

    Attributes:
        num_steps: calls of the model so far.
        num_computed: blocks computed so far.
    """

    def __init__(self, model: Any, cache: Cache) -> None:
        self._model, self._cache = model, cache
        self._on = ExitStack()
        self._context: Any = None
        self._table: Any = None
        self._time = float("inf")
        self.num_steps = self.num_computed = 0

    def __enter__(self) -> CachedStack:
        first, *others = self._model.blocks_in_order()
        overrides = [
            (self._model, self._begun),
            (self._model.rope, self._rotated),
            (first, self._stacked),
            *((block, _passed) for block in others),
        ]
        for module, answer in overrides:
            self._on.enter_context(override_call(module, answer))
        return self

    def __exit__(self, *_: object) -> None:
        self._on.close()

    def _begun(self, call: ModuleCall) -> Any:
        time = float(call.args[1][0])
        if time >= self._time:
            raise AssertionError("a step calls the model once")
        self._time, self._context = time, call.args[2]
        self.num_steps += 1
        return call.compute()

    def _rotated(self, call: ModuleCall) -> Any:
        self._table = call.compute()
        return self._table

    def _stacked(self, call: ModuleCall) -> Any:
        x, tables = call.args[:2]
        blocks = self._model.blocks_in_order()
        calls = [partial(self._computed, call.base, *each) for each in enumerate(blocks)]
        return self._cache(x, self._time, [partial(each, tables) for each in calls])

    def _computed(self, base: Any, number: int, block: nn.Module, tables: Any, x: Tensor) -> Any:
        self.num_computed += 1
        text, mask = self._context.blocks[number], self._context.mask
        table = self._table if number % 2 else None  # the temporal ones
        return base.__call__(block, x, tables, text, mask, table)


def _passed(call: ModuleCall) -> Tensor:
    """A block that the stack has computed or left out."""
    x: Tensor = call.args[0]
    return x


class Residuals:
    """What the cached blocks added in the last whole steps, extrapolated over the timesteps."""

    def __init__(self, order: int) -> None:
        self._num = order + 1
        self._times: list[float] = []
        self._values: list[Tensor] = []

    def add(self, time: float, value: Tensor) -> None:
        """Those of a whole step."""
        self._times = [*self._times, time][-self._num :]
        self._values = [*self._values, value][-self._num :]

    def at(self, time: float) -> Tensor:
        """The value there: the last one, or on the polynomial through the last ones."""
        weights = lagrange_weights(self._times, time)
        terms = [w * each for w, each in zip(weights, self._values, strict=True)]
        return sum(terms[1:], start=terms[0])


class FixedSteps:
    """The first blocks in every step; what the others add is computed in the steps of a list."""

    def __init__(self, num_first: int, order: int, steps: Sequence[int]) -> None:
        self._num_first, self._steps = num_first, frozenset(steps)
        self._residuals = Residuals(order)
        self._step = -1

    def __call__(self, x: Tensor, t: float, blocks: Sequence[Block]) -> Tensor:
        self._step += 1
        x = through(x, blocks[: self._num_first])
        if self._step not in self._steps:
            return x + self._residuals.at(t)
        whole = through(x, blocks[self._num_first :])
        self._residuals.add(t, whole - x)
        return whole


class FirstBlockThreshold:
    """First-block cache: a step is whole where what the first block adds has changed by enough.

    Its change since the last whole step is relative, by mean magnitudes, as in ParaAttention's
    FBCache and diffusers' `FirstBlockCacheConfig`.
    """

    def __init__(self, threshold: float, order: int = 0) -> None:
        self._threshold, self._residuals = threshold, Residuals(order)
        self._first: Tensor | None = None

    def __call__(self, x: Tensor, t: float, blocks: Sequence[Block]) -> Tensor:
        after = blocks[0](x)
        added, before = after - x, self._first
        if before is not None:
            change = (added - before).abs().mean() / before.abs().mean()
            if float(change) <= self._threshold:
                return after + self._residuals.at(t)
        self._first = added
        whole = through(after, blocks[1:])
        self._residuals.add(t, whole - after)
        return whole


class Magnitudes:
    """MagCache (Ma et al. 2025, arXiv 2506.09045): what all blocks add is reused as it is.

    `ratios` are those of its mean magnitude to that of the step before, as exact runs have them.
    The product of the ratios since the last whole step, taken from 1, is an error; a step is whole
    where the sum of these errors passes the threshold, or after `most` steps that weren't.
    """

    def __init__(self, ratios: Sequence[float], threshold: float, *, first: int, most: int) -> None:
        self._ratios, self._threshold = ratios, threshold
        self._num_first, self._most = first, most
        self._value: Tensor | None = None
        self._step = -1
        self._begin()

    def _begin(self) -> None:
        self._product, self._error, self._num_skipped = 1.0, 0.0, 0

    def __call__(self, x: Tensor, t: float, blocks: Sequence[Block]) -> Tensor:
        self._step += 1
        if self._step >= self._num_first and self._value is not None:
            self._product *= self._ratios[self._step]
            self._error += abs(1 - self._product)
            self._num_skipped += 1
            if self._error <= self._threshold and self._num_skipped <= self._most:
                return x + self._value
        self._begin()
        whole = through(x, blocks)
        self._value = whole - x
        return whole


class MeasuredRatios:
    """A cache that computes everything, and sees the ratios that `Magnitudes` needs."""

    def __init__(self) -> None:
        self.ratios: list[float] = []
        self._before: Tensor | None = None

    def __call__(self, x: Tensor, t: float, blocks: Sequence[Block]) -> Tensor:
        whole = through(x, blocks)
        own = (whole - x).norm(dim=-1)
        self.ratios.append(1.0 if self._before is None else float((own / self._before).mean()))
        self._before = own
        return whole


class _Function(nn.Module):
    """A block as cache-dit takes it; what it calls is another one in each step."""

    run: Block

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.run(hidden_states)


class _Transformer(nn.Module):
    """A model of nothing but blocks."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Function() for _ in range(count)])

    def forward(self, hidden_states: Tensor) -> Tensor:
        return through(hidden_states, list(self._called()))

    def _called(self) -> Iterator[Any]:
        yield from self.blocks  # cache-dit puts its own list there while it runs


class CacheDit:
    """cache-dit itself, by its `BlockAdapter`; `mask` has 1 for each step that is whole.

    Without a mask its threshold decides, after `warm` whole steps.
    """

    def __init__(
        self, num_steps: int, *, order: int, mask: Sequence[int] | None = None,
        threshold: float = 0.08, warm: int = 4, first: int = 1, count: int = 8,
    ) -> None:  # fmt: skip
        os.environ.setdefault("CACHE_DIT_LOG_LEVEL", "error")
        import cache_dit

        model = _Transformer(count)
        adapter = cache_dit.BlockAdapter(
            transformer=model,
            blocks=model.blocks,
            forward_pattern=cache_dit.ForwardPattern.Pattern_3,
            check_forward_pattern=False,
        )
        config = cache_dit.DBCacheConfig(
            Fn_compute_blocks=first,
            Bn_compute_blocks=0,
            residual_diff_threshold=threshold,
            max_warmup_steps=0 if mask else warm,
            num_inference_steps=num_steps,
            enable_separate_cfg=False,
            steps_computation_mask=None if mask is None else [*mask],
            steps_computation_policy="static" if mask else "dynamic",
        )
        taylor = cache_dit.TaylorSeerCalibratorConfig(taylorseer_order=order) if order else None
        # The blocks that it holds are these; its own list replaces theirs during a call.
        self._functions = [*model.blocks]
        cache_dit.enable_cache(adapter, cache_config=config, calibrator_config=taylor)
        self._model = model

    def __call__(self, x: Tensor, t: float, blocks: Sequence[Block]) -> Tensor:
        for function, block in zip(self._functions, blocks, strict=True):
            function.run = block
        answer: Tensor = self._model(x)
        return answer
