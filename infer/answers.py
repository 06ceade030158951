"""Requests' bodies and their answers as JSON. Lean: one decoder, no response models.

Errors are `{"error": {"type", "message"}}`: 400 bad input, 404 not live, 409 policy refused (`type` is the reason) or
stale_run, 503 engine at fault (`engine_ended` where its process is gone) or `asleep`, 504 deadline.
"""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from infer.versions import NotLive, UnknownAdapter
from infer.vllm_api import EngineEnded, EngineError
from transport.errors import DeadlineError, PolicyRefused, RunFolderError

B = TypeVar("B", bound=msgspec.Struct)


class BadRequest(ValueError):
    """A request's value that cannot be served; the message says which and what is expected."""


def decode(data: bytes, body: type[B]) -> B:
    """The request's body. Raises BadRequest."""
    try:
        return msgspec.json.decode(data, type=body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadRequest(str(error)) from error


def require(holds: bool, message: str) -> None:
    """Raises BadRequest unless it holds."""
    if not holds:
        raise BadRequest(message)


def as_json(content: object, status: int = 200) -> Response:
    """The content as a response."""
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def as_error(status: int, kind: str, message: object) -> Response:
    """An error as a response."""
    return as_json({"error": {"type": kind, "message": str(message)}}, status)


def answer_to(error: Exception) -> Response | None:
    """The response that says it; None for what is not expected here, which stays a 500 of the framework."""
    match error:
        case BadRequest() | UnknownAdapter():
            return as_error(400, "bad_request", error)
        case NotLive():
            return as_error(404, "not_live", error)
        case PolicyRefused():
            return as_error(409, error.reason, error)
        case RunFolderError():
            return as_error(409, "stale_run", error)
        case EngineEnded():
            return as_error(503, "engine_ended", error)
        case EngineError():
            return as_error(503, "engine", error)
        case DeadlineError():
            return as_error(504, "deadline", error)
    return None


Handler = Callable[[Request], Awaitable[Response]]


def answering(handler: Handler) -> Handler:
    """The handler with its errors as responses."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except Exception as error:
            if (response := answer_to(error)) is None:
                raise
            return response

    return answer
