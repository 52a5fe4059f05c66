"""Create jobs: a parsed body and its plan become a row of the queue."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fastapi import Request

from everyframe.checkpoints.shapes_prompts import CAN_DRAW, Refusal, read_prompt
from everyframe.core.errors import EveryframeError
from everyframe.core.plan import Plan
from everyframe.planning.find_model import EMBEDDED_MODEL
from everyframe.server.dispatch.plan_summary import resolved_of
from everyframe.server.errors import ApiError, api_error
from everyframe.server.http.access import Principal
from everyframe.server.http.context import ServerContext, in_thread
from everyframe.server.monitoring.traces import HEADER, trace_parent
from everyframe.server.queue.jobs import Job, NewJob
from everyframe.server.requests.body import Body
from everyframe.server.requests.plans import ANY_PROMPT
from everyframe.server.requests.request_parser import ParsedBody

#: Header of OpenAI's clients: which repetition of a request this is.
RETRY_COUNT = "x-stainless-retry-count"
IDEMPOTENCY = "idempotency-key"


async def parse_body(
    context: ServerContext, body: Body, base: Mapping[str, Any] | None = None
) -> ParsedBody:
    """Parse a body, in a thread where pictures are written to disk. Raises `ApiError`."""
    parser = context.parser
    if parser.is_quick(body):
        parsed = parser.parse(body, base)
    else:
        parsed = await in_thread(parser.parse, body, base)
    if "model" not in parsed.options:
        if not parsed.options.get("prompt"):
            raise ApiError(
                "missing_required_parameter", "prompt is missing; say what to show", "prompt"
            )
        _refuse_if_not_drawable(context, str(parsed.options["prompt"]))
    return parsed


def _refuse_if_not_drawable(context: ServerContext, prompt: str) -> None:
    """Raise `ApiError` if the embedded model is only the default and can't draw the prompt."""
    read = read_prompt(prompt)
    if isinstance(read, Refusal):
        others = [each.name for each in context.models if each is not context.models.default]
        served = f"; other models here: {', '.join(others[:10])}" if others else ""
        raise ApiError(
            "invalid_value",
            f"the embedded model can't draw this: {read.reason}. It draws {CAN_DRAW}{served}; "
            f"model {EMBEDDED_MODEL!r} tries anyway",
            "prompt",
        )


async def default_plan(context: ServerContext, model: str | None = None) -> Plan:
    """The plan of a model's default video. Raises `ApiError` if it needs more than a prompt."""
    name = model or context.models.default.name
    body = Body({"model": name, "prompt": ANY_PROMPT})
    return await context.plans.plan(await in_thread(context.parser.parse, body))


async def plan_of(context: ServerContext, body: Body) -> tuple[ParsedBody, Plan]:
    """A body and its plan; a missing prompt is filled in, since no plan depends on its words.

    Raises:
        ApiError: the body is wrong, or its plan does not fit.
    """
    try:
        parsed = await parse_body(context, body)
        return parsed, await context.plans.plan(parsed)
    except ApiError as error:
        if error.param != "prompt" or "prompt" in body.fields:
            raise
    parsed = await parse_body(context, replace(body, fields={**body.fields, "prompt": ANY_PROMPT}))
    return parsed, await context.plans.plan(parsed)


async def create_job(
    context: ServerContext,
    caller: Principal,
    request: Request,
    body: Body,
    *,
    base: Mapping[str, Any] | None = None,
    parent: str | None = None,
) -> tuple[Job, int | None]:
    """Add a job for a body, on top of the options `base` of an earlier job.

    Returns the job and its place in the queue.

    Raises:
        ApiError: the body is wrong, the plan does not fit, or a limit is reached.
    """
    context.check_not_draining()
    context.creations.take(caller.name)
    priority, body = split_priority(caller, body)
    parsed = await parse_body(context, body, base)
    plan = await context.plans.plan(parsed)
    max_queued, max_queued_of_owner = context.settings.queue_limits
    new = NewJob(
        request=parsed.options,
        owner=caller.name,
        model=parsed.model.name,
        resolved=resolved_of(plan),
        report={"warnings": [*parsed.warnings, *plan.notes], **_trace(request)},
        priority=priority,
        idempotency=_idempotency(request),
        body_hash=f"{request.url.path} {body.digest}",
        retry_count=_retry_count(request),
        parent=parent,
        max_queued=max_queued,
        max_queued_of_owner=max_queued_of_owner,
    )
    try:
        return await context.adder.add(new)
    except EveryframeError as error:
        raise api_error(error) from error


def split_priority(caller: Principal, body: Body) -> tuple[int, Body]:
    """The `priority` of a body, and the body without it."""
    if "priority" not in body.fields:
        return 0, body
    text = str(body.fields["priority"])
    if not re.fullmatch(r"-?\d{1,2}", text):
        raise ApiError("invalid_value", "priority must be a whole number", "priority")
    if int(text) > 0 and caller.role != "admin":
        raise ApiError("forbidden", "only an admin's key may go ahead of others", "priority")
    rest = {name: value for name, value in body.fields.items() if name != "priority"}
    return int(text), replace(body, fields=rest)


def _idempotency(request: Request) -> str | None:
    key = request.headers.get(IDEMPOTENCY)
    if key is not None and not 0 < len(key) <= 255:
        raise ApiError("invalid_value", "the idempotency key must have 1 to 255 letters")
    return key


def _trace(request: Request) -> dict[str, str]:
    """The caller's trace id, for the job's report."""
    parent = trace_parent(request.headers.get(HEADER))
    return {HEADER: parent} if parent is not None else {}


def _retry_count(request: Request) -> int:
    text = request.headers.get(RETRY_COUNT, "0")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0
