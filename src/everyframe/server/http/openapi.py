"""The OpenAPI document: FastAPI's own, with bodies from the options and errors from their table."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from everyframe.core.request import Request
from everyframe.server.data_folder import MEDIA
from everyframe.server.errors import CODES
from everyframe.server.requests.client_fields import FORMATS, PIPELINE_FIELDS
from everyframe.server.requests.option_schema import option_schema

#: Routes that read a job's fields -> the fields that they need.
_BODIES = {
    ("/v1/videos", "post"): ["prompt"],
    ("/v1/videos/sync", "post"): ["prompt"],
    ("/v1/videos/{video_id}/remix", "post"): ["prompt"],
    ("/v1/videos/extensions", "post"): ["video"],
    ("/v1/videos/edits", "post"): ["video"],
    ("/v1/plan", "post"): [],
}
#: What a description of an option holds that a schema names otherwise, or not at all.
_OURS = ("name", "type", "group", "help", "unit", "accepts", "enum", "families", "default")


class DocumentedApp(FastAPI):
    """An application whose OpenAPI document describes its bodies and errors."""

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document; made once."""
        if self.openapi_schema is None:
            document = super().openapi()
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            for unused in ("HTTPValidationError", "ValidationError"):
                schemas.pop(unused, None)
            schemas["Error"] = _error_schema()
            schemas["VideoFields"] = _fields_schema()
            document["components"]["securitySchemes"] = {
                "key": {"type": "http", "scheme": "bearer"},
            }
            document["security"] = [{"key": []}, {}]
            for path, methods in document["paths"].items():
                for method, operation in methods.items():
                    _describe(operation, path, method)
        return self.openapi_schema or {}


def _describe(operation: dict[str, Any], path: str, method: str) -> None:
    answers = operation.setdefault("responses", {})
    answers.pop("422", None)
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    answers["default"] = {"description": "An error.", "content": content}
    needed = _BODIES.get((path, method))
    if needed is not None:
        fields: dict[str, Any] = {"$ref": "#/components/schemas/VideoFields"}
        body = {"allOf": [fields], "required": needed} if needed else fields
        kinds = ("application/json", "multipart/form-data", "application/x-www-form-urlencoded")
        operation["requestBody"] = {
            "required": bool(needed),
            "content": {kind: {"schema": body} for kind in kinds},
        }


def _fields_schema() -> dict[str, Any]:
    """The fields of a job, of every family."""
    own = set(Request.model_fields)
    properties = {
        each["name"]: _property(each, each["name"] in own) for each in option_schema(None)
    }
    properties |= {
        "input_reference": {"description": "The same as image.", **_media("picture")},
        "video": {
            "description": "The same as extend; for extensions and edits also an object with the "
            "id of a video of this server.",
            **_media("video"),
        },
        "output_format": {"enum": [*FORMATS]},
        **{name: {"description": "Of diffusers pipelines."} for name in PIPELINE_FIELDS},
        "priority": {"type": "integer", "description": "Higher goes first; above 0 for admins."},
    }
    return {
        "type": "object",
        "description": "Options of a video, by the names of the command line.",
        "properties": properties,
        "additionalProperties": False,
    }


def _property(described: dict[str, Any], is_common: bool) -> dict[str, Any]:
    text = described["help"] or ""
    if described.get("unit"):
        text += f" In {described['unit']}."
    if not is_common:
        text += " Of one family of models."
    found: dict[str, Any] = {"description": text}
    if described["name"] in MEDIA:
        return {**found, **_media(MEDIA[described["name"]])}
    found["type"] = described["type"]
    if described["name"] == "loras":
        text = "NAME[:STRENGTH][@COMPONENT] of a registered LoRA; may be repeated."
        found["description"] = text
    if described["type"] == "array":
        found["items"] = {"type": "string"}
    if "enum" in described:
        found["enum"] = described["enum"]
    if described.get("default") not in (None, [], {}):
        found["default"] = described["default"]
    return found | {name: value for name, value in described.items() if name not in _OURS}


def _media(kind: str) -> dict[str, Any]:
    return {
        "oneOf": [
            {"type": "string", "format": "binary", "description": f"A {kind} in a multipart body."},
            {"type": "string", "description": "A data URL; others where the server allows hosts."},
            {"type": "object", "description": "An object with a URL."},
        ]
    }


def _error_schema() -> dict[str, Any]:
    text = "; ".join(f"`{code}` {status}" for code, (status, _) in CODES.items())
    nullable = {"type": ["string", "null"]}
    return {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": {"type": "string", "description": "For a person."},
                    "type": {"enum": sorted({kind for _, kind in CODES.values()})},
                    "param": {**nullable, "description": "The field that it is about."},
                    "code": {"enum": [*CODES], "description": f"With HTTP status: {text}."},
                    "details": {"type": "object", "description": "Further data, such as a plan."},
                },
            }
        },
    }
