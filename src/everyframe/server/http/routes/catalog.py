"""Routes of plans, and of models with their options."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from everyframe.core.errors import EveryframeError
from everyframe.server.dispatch.plan_summary import plan_data
from everyframe.server.errors import ApiError
from everyframe.server.http.context import Caller, Context, RequestBody, ServerContext
from everyframe.server.http.creation import default_plan, plan_of, split_priority
from everyframe.server.requests.models import RegisteredModel
from everyframe.server.requests.option_schema import option_schema

router = APIRouter(tags=["models"])


@router.post("/v1/plan")
async def make_plan(context: Context, caller: Caller, body: RequestBody) -> Any:
    """Plan a video: what would run, with how much memory and for how long. Nothing is queued."""
    context.creations.take(f"plan {caller.name}")
    _, body = split_priority(caller, body)
    parsed, plan = await plan_of(context, body)
    return JSONResponse({
        "object": "plan", **plan_data(plan), "warnings": [*parsed.warnings],
        "details": plan.to_json(),
    })  # fmt: skip


@router.get("/v1/models")
async def list_models(context: Context) -> Any:
    """The models that are served; the first is the default."""
    return JSONResponse({"object": "list", "data": [_row(context, m) for m in context.models]})


@router.get("/v1/models/{name}")
async def retrieve_model(name: str, context: Context, defaults: bool = True) -> Any:
    """A model's card: its options with limits and help, and the defaults of its video.

    Defaults come from a plan, which takes a while the first time; `defaults=false` omits them.
    """
    try:
        model = context.models.get(name)
    except ApiError as error:
        raise ApiError("not_found", str(error), "model") from None
    planned, note = (await _plan_of(context, model)) if defaults else (None, "")
    family = model.family or (planned or {}).get("family")
    return JSONResponse({
        **_row(context, model),
        "family": family,
        "licence": model.licence,
        "defaults": planned,
        "note": note,
        "options": option_schema(family),
        "loras": context.loras.names(),
    })  # fmt: skip


async def _plan_of(
    context: ServerContext, model: RegisteredModel
) -> tuple[dict[str, Any] | None, str]:
    """The plan of a model's default video, or None and the reason."""
    try:
        return plan_data(await default_plan(context, model.name)), ""
    except (ApiError, EveryframeError) as error:
        return None, str(error)


def _row(context: ServerContext, model: RegisteredModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": int(context.started_at),
        "owned_by": "everyframe",
        "title": model.title,
        "family": model.family,
        "licence": model.licence,
        "is_default": model is context.models.default,
    }
