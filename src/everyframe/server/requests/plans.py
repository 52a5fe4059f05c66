"""Plan cache: the executor makes plans, and similar requests share one.

A plan does not depend on a prompt's words, the seed or a picture's content, but it holds words and
seed, and its notes quote the end of a long prompt. Those of one client are not shown to another.
In place of a model's folder it has the name by which clients know it.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import anyio
import anyio.to_thread

from everyframe.core.errors import EveryframeError
from everyframe.core.limits import random_seed
from everyframe.core.plan import Plan
from everyframe.engine.workers.executor import Executor, InfeasiblePlanError
from everyframe.server.data_folder import MEDIA, DataFolder, is_input
from everyframe.server.errors import api_error
from everyframe.server.requests.client_options import client_options
from everyframe.server.requests.request_parser import ParsedBody, request_of

#: A prompt that every model with prompts can read.
ANY_PROMPT = "a red circle"
#: Bytes of a text that every text encoder reads to its end: a token has one at least.
_SHORT_BYTES = 32
_PROMPTS = ("prompt", "negative_prompt")
#: Plans that are remembered, and that are made at once.
_MOST_PLANS = 256
_AT_ONCE = 4


class PlanCache:
    """Plans by the fields that they depend on. Its methods run in the server's event loop."""

    def __init__(self, executor: Executor, folder: DataFolder) -> None:
        self._executor, self._folder = executor, folder
        self._plans: OrderedDict[str, Plan] = OrderedDict()
        # Of requests under way alone: what a client asks for may have any number of kinds.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._limiter = anyio.CapacityLimiter(_AT_ONCE)

    async def plan(self, parsed: ParsedBody) -> Plan:
        """The plan of a request. Raises `ApiError` if it is wrong, or can't run here."""
        kind, own = _kind_of(parsed), None
        async with self._locks.setdefault(kind, asyncio.Lock()):
            if kind not in self._plans:
                own = shared = await self._make(parsed)
                if not _is_short(parsed.options):
                    options = _with_any_words(parsed.options)
                    shared = await self._make(replace(parsed, options=options))
                self._plans[kind] = shared
        self._plans.move_to_end(kind)
        while len(self._plans) > _MOST_PLANS:
            self._plans.popitem(last=False)
        plan = own or _of_request(self._plans[kind], parsed.options)
        return replace(plan, model=parsed.model.name)

    async def _make(self, parsed: ParsedBody) -> Plan:
        values = self._folder.request_of(parsed.options).given()
        request = request_of({**values.pop("family_options", {}), **values})
        try:
            return await anyio.to_thread.run_sync(
                self._executor.plan, request, limiter=self._limiter
            )
        except InfeasiblePlanError as error:
            plan = replace(error.plan, model=parsed.model.name)
            raise api_error(InfeasiblePlanError(plan, str(error))) from error
        except EveryframeError as error:
            raise api_error(error, client_options()) from error


def _kind_of(parsed: ParsedBody) -> str:
    values = dict(parsed.options)
    values.pop("seed", None)
    for name in _PROMPTS:
        if name in values:
            values[name] = bool(values[name])
    for name in MEDIA:
        if is_input(values.get(name)):
            values[name] = parsed.shapes.get(name, values[name])
    return json.dumps(values, sort_keys=True)


def _is_short(options: Mapping[str, Any]) -> bool:
    texts = [str(options.get(name) or "") for name in _PROMPTS]
    return all(len(text.encode()) <= _SHORT_BYTES for text in texts)


def _with_any_words(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with other words, where there are any."""
    return {k: ANY_PROMPT if k in _PROMPTS and v else v for k, v in options.items()}


def _of_request(shared: Plan, options: Mapping[str, Any]) -> Plan:
    """A shared plan with the words and the seed of a request."""
    request = request_of(options)
    settings = shared.settings
    negative = request.negative_prompt
    settings = replace(
        settings,
        prompt=request.prompt or "",
        negative_prompt=settings.negative_prompt if negative is None else negative,
        seed=random_seed() if request.seed is None else request.seed,
    )
    return replace(shared, settings=settings)
