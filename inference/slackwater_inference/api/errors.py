"""Every error of the API: its status, its message, and how OpenAPI declares it.

Owns the mapping from the engine's and the API's errors to the hosted form `{"status", "message"}`, exactly
these two keys: the official clients break on a third.  Used by every route, by the websocket and by the app.
"""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from slackwater_inference.core import (
    BadRequest,
    EngineError,
    QueueFull,
    TemporaryError,
)
from slackwater_inference.store.errors import CreditExhausted, Forbidden, NotFound

CLIENT_CLOSED = 499  # the outcome of an answer whose client left before its end; never sent to anybody
_SHOWN_FAULTS = 5
_SHOWN_CHARS = 500


class ApiError(Exception):
    """An answer that is an error: an HTTP status, one line for the caller, and headers of the answer."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers = dict(headers or {})


class ErrorBody(BaseModel):
    """What every error answer holds."""

    status: int
    message: str


_MEANING = {
    400: "A field is missing or out of range, the body cannot be read, or a voice is unknown",
    401: "No API key, or an unknown or revoked one",
    402: "The key's credit does not cover this text",
    403: "The key may not do this",
    404: "There is no such thing, or it is not yours to see",
    408: "The body stopped coming",
    413: "The body is over the size limit",
    429: "Too many requests at once or in this minute, every queue place is taken, or too many large "
    "bodies are here; see Retry-After",
    500: "A fault of the server; its log has the details",
    503: "Not ready, leaving, or not set up to do this",
}


def declared(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` argument of a route that can answer with `statuses`."""
    return {status: {"model": ErrorBody, "description": _MEANING[status]} for status in statuses}


def as_api_error(error: Exception) -> ApiError:
    """What `error` says to a caller.  An error that we did not foresee says nothing about its cause."""
    match error:
        case ApiError():
            return error
        case BadRequest():
            return ApiError(400, str(error))
        case QueueFull():
            return ApiError(429, str(error), _retry_after(error))
        case CreditExhausted():
            return ApiError(402, str(error))
        case Forbidden():
            return ApiError(403, str(error))
        case NotFound():
            return ApiError(404, str(error))
        case TemporaryError():
            return ApiError(503, str(error), _retry_after(error))
        case EngineError():
            return ApiError(500, str(error))
        case ValidationError() | RequestValidationError():
            return ApiError(400, faults(error.errors()))
        case HTTPException():
            return ApiError(error.status_code, str(error.detail), error.headers)
        case ClientDisconnect():
            return ApiError(CLIENT_CLOSED, "the client went away")  # nobody reads it; the access log does
        case _:
            return ApiError(500, "internal error; the server's log has the details")


def faults(errors: "list[ErrorDetails] | Any") -> str:
    """pydantic's findings in one line, each with the field's name; never the value, which may be long or private."""
    shown = []
    for fault in errors[:_SHOWN_FAULTS]:
        place = ".".join(str(step) for step in fault["loc"]) or "body"
        shown.append(f"{place[:80]}: {fault['msg'].removeprefix('Value error, ')}")
    if len(errors) > _SHOWN_FAULTS:
        shown.append(f"and {len(errors) - _SHOWN_FAULTS} more")
    return "; ".join(shown)[:_SHOWN_CHARS]


def error_response(error: ApiError) -> JSONResponse:
    """`error` as an answer."""
    body = ErrorBody(status=error.status, message=error.message)
    return JSONResponse(body.model_dump(), error.status, error.headers)


def add_error_handlers(app: FastAPI) -> None:
    """Answer every exception of a route in the one form."""

    async def answer(_: Request, error: Exception) -> Response:
        return error_response(as_api_error(error))

    for kind in (ApiError, EngineError, ValidationError, RequestValidationError, HTTPException, ClientDisconnect):
        app.add_exception_handler(kind, answer)
    app.add_exception_handler(Exception, answer)  # this one is logged and raised on by starlette, too


def _retry_after(error: TemporaryError) -> dict[str, str]:
    return {"Retry-After": str(max(1, round(error.retry_after_s)))}
