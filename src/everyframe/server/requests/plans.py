"""Plan cache: the executor makes plans, and similar requests share one.

A plan does not depend on a prompt's words, the seed or a picture's content.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from weakref import WeakValueDictionary

import anyio
import anyio.to_thread

from everyframe.core.errors import EveryframeError
from everyframe.core.plan import Plan
from everyframe.engine.workers.executor import Executor
from everyframe.server.data_folder import MEDIA, DataFolder, is_input
from everyframe.server.errors import api_error
from everyframe.server.requests.client_options import client_options
from everyframe.server.requests.request_parser import ParsedBody, request_of

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
        kind = _kind_of(parsed)
        async with self._locks.setdefault(kind, asyncio.Lock()):
            if kind not in self._plans:
                self._plans[kind] = await self._make(parsed)
        self._plans.move_to_end(kind)
        while len(self._plans) > _MOST_PLANS:
            self._plans.popitem(last=False)
        return self._plans[kind]

    async def _make(self, parsed: ParsedBody) -> Plan:
        values = self._folder.request_of(parsed.options).given()
        request = request_of({**values.pop("family_options", {}), **values})
        try:
            return await anyio.to_thread.run_sync(
                self._executor.plan, request, limiter=self._limiter
            )
        except EveryframeError as error:
            raise api_error(error, client_options()) from error


def _kind_of(parsed: ParsedBody) -> str:
    values = dict(parsed.options)
    values.pop("seed", None)
    for name in ("prompt", "negative_prompt"):
        if name in values:
            values[name] = bool(values[name])
    for name in MEDIA:
        if is_input(values.get(name)):
            values[name] = parsed.shapes.get(name, values[name])
    return json.dumps(values, sort_keys=True)
