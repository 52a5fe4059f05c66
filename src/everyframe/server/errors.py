"""Errors of the API: one table of codes, and the envelope.

Every error is ``{"error": {"message", "type", "param", "code"}}``, as OpenAI's clients read it.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable, Mapping
from typing import Any

from everyframe.core.errors import (
    CannotRunError,
    DistributedOutOfMemoryError,
    EveryframeError,
    InputError,
    NoSuchVideoError,
    QueueFullError,
    StoreError,
    VideoStatusError,
)
from everyframe.engine.workers.executor import InfeasiblePlanError
from everyframe.runs.resume_hint import without_hint

#: Code -> (HTTP status, type), for every error that a route answers.
CODES: Mapping[str, tuple[int, str]] = {
    "invalid_value": (400, "invalid_request_error"),
    "missing_required_parameter": (400, "invalid_request_error"),
    "unknown_parameter": (400, "invalid_request_error"),
    "not_supported": (400, "invalid_request_error"),
    "invalid_host": (400, "invalid_request_error"),
    "invalid_api_key": (401, "authentication_error"),
    "forbidden": (403, "permission_error"),
    "foreign_origin": (403, "permission_error"),
    "not_found": (404, "invalid_request_error"),
    "not_ready": (404, "invalid_request_error"),
    "method_not_allowed": (405, "invalid_request_error"),
    "too_slow": (408, "invalid_request_error"),
    "conflict": (409, "invalid_request_error"),
    "too_large": (413, "invalid_request_error"),
    "plan_does_not_fit": (422, "invalid_request_error"),
    "queue_full": (429, "rate_limit_error"),
    "rate_limited": (429, "rate_limit_error"),
    "server_error": (500, "server_error"),
    "job_failed": (500, "server_error"),
    "draining": (503, "server_error"),
    "storage_unavailable": (503, "server_error"),
}

#: What the system lacks for a while: files, processes, memory.
_LACKING = frozenset({errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM})


class ApiError(Exception):
    """An error response: a code of `CODES` and a message for a person.

    Attributes:
        param: the parameter that caused it.
        details: further data.
        headers: further headers; ``x-should-retry`` keeps clients from repeating the request.
    """

    def __init__(
        self,
        code: str,
        message: str,
        param: str | None = None,
        *,
        details: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        assert code in CODES, code
        super().__init__(_encodable(message))
        self.code = code
        self.param = param and _encodable(param)
        self.details = details
        self.headers = {"x-should-retry": "false", **(headers or {})}

    @property
    def status(self) -> int:
        """The HTTP status."""
        return CODES[self.code][0]

    def to_json(self) -> dict[str, Any]:
        """The envelope."""
        error: dict[str, Any] = {
            "message": str(self),
            "type": CODES[self.code][1],
            "param": self.param,
            "code": self.code,
        }
        if self.details is not None:
            error["details"] = dict(self.details)
        return {"error": error}


def draining() -> ApiError:
    """The error for a request that arrives while the server shuts down."""
    return ApiError(
        "draining", "the server shuts down; try again soon", headers={"retry-after": "10"}
    )


def _encodable(text: str) -> str:
    """The text with lone surrogates, which a JSON body may hold, as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def api_error(error: EveryframeError, names: Iterable[str] = ()) -> ApiError:
    """The response for an error of the library; `names` are the parameters it may be about."""
    text = str(error)
    if isinstance(error, QueueFullError):
        return ApiError("queue_full", text, headers={"retry-after": "10"})
    if isinstance(error, NoSuchVideoError):
        return ApiError("not_found", text, "id")
    if isinstance(error, VideoStatusError):
        return ApiError("conflict", text)
    if isinstance(error, StoreError):
        return ApiError("storage_unavailable", text, headers={"retry-after": "30"})
    if isinstance(error, CannotRunError):
        details = error.plan.to_json() if isinstance(error, InfeasiblePlanError) else None
        return ApiError("plan_does_not_fit", text, details=details)
    if isinstance(error, InputError):
        return ApiError("invalid_value", text, param_of(text, names))
    return ApiError("server_error", text)


def param_of(message: str, names: Iterable[str]) -> str | None:
    """The parameter that a message is about: the first word of it that is in `names`."""
    known = frozenset(names)
    return next((word for word in re.findall(r"[a-z_]+", message) if word in known), None)


def code_of(error: Exception) -> str:
    """Code of a failed job: our error's class in snake case, such as ``worker_died``."""
    if isinstance(error, DistributedOutOfMemoryError):
        return "out_of_memory"
    if not isinstance(error, EveryframeError):
        return "internal"
    name = type(error).__name__.removesuffix("Error")
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def is_system_exhausted(error: BaseException | None) -> bool:
    """Whether the system ran out of files, processes or memory, by the error or its causes."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _LACKING:
            return True
        error = error.__cause__
    return False


def message_of(error: Exception) -> str:
    """The error's text without the advice to resume by hand, since the server resumes it."""
    return without_hint(str(error)) or type(error).__name__
