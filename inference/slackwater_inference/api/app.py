"""The FastAPI application: routes, and every error as {"status", "message"}.

Owns the mapping from the engine's errors to HTTP.  Called by the cli, which serves it, and by tests.
"""

import asyncio
from collections.abc import Iterable

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from slackwater_inference.api.access import AccessLog
from slackwater_inference.api.audio import AudioResponse
from slackwater_inference.api.auth import KeyRing, Unauthorized
from slackwater_inference.api.body import MAX_BODY_BYTES, BodyTooLarge, client_gone, read_body
from slackwater_inference.api.schemas import TtsRequest, parse_tts
from slackwater_inference.core import BadRequest, Chunk, Draining, EngineFailed, QueueFull, Stage
from slackwater_inference.engine import AudioStream, Engine

_ERROR_SCHEMA = {
    "type": "object",
    "properties": {"status": {"type": "integer"}, "message": {"type": "string"}},
    "required": ["status", "message"],
}
_BODY_SCHEMA = TtsRequest.model_json_schema()
_ERRORS = {
    400: "A field is missing, out of range or not supported yet",
    401: "No or an unknown API key",
    413: "The body is over 32 MiB",
    429: "Every slot and queue place is taken; Retry-After says when to come back",
    500: "The engine failed",
    503: "The engine is not ready",
}


def create_app(engine: Engine, keys: Iterable[str] = ()) -> FastAPI:
    """The application on top of `engine`.  keys: the API keys that may speak; none = everybody."""
    ring = KeyRing(keys)
    app = FastAPI(title="Slackwater speech", description="Fish Audio's text-to-speech API.", redoc_url=None)
    app.add_middleware(AccessLog, metrics=engine.metrics)
    _add_error_handlers(app)

    @app.post(
        "/v1/tts",
        summary="Speak a text",
        response_class=Response,
        responses={
            200: {"description": "Audio, as it is made", "content": {"audio/wav": {}, "audio/pcm": {}}},
            **{
                code: {"description": text, "content": {"application/json": {"schema": _ERROR_SCHEMA}}}
                for code, text in _ERRORS.items()
            },
        },
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {kind: {"schema": _BODY_SCHEMA} for kind in ("application/json", "application/msgpack")},
            }
        },
    )
    async def tts(request: Request) -> Response:
        ring.check(request.headers.get("authorization"))
        body = parse_tts(await read_body(request))
        stream = engine.submit(
            body.text, temperature=body.temperature, top_p=body.top_p, max_new_tokens=body.max_frames()
        )
        first = await _first_chunk(stream, request)
        return AudioResponse(stream, first, body.format, engine.model.codec.sample_rate_hz)

    @app.get("/healthz", summary="The process is alive")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz", summary="The engine takes requests")
    async def readyz() -> Response:
        status = engine.status()
        if status.stage is not Stage.READY:
            return _error(503, f"not ready: {status.stage}")
        return JSONResponse({"status": "ready", "slots": status.slots})

    @app.get("/metrics", summary="Prometheus metrics", response_class=Response)
    async def metrics() -> Response:
        return Response(generate_latest(engine.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return app


async def _first_chunk(stream: AudioStream, request: Request) -> Chunk:
    """Wait for the first audio, so that an error before it can still be a status.

    Closes the stream if there is none: when the client goes away first (ClientDisconnect) or the engine fails.
    """
    first = asyncio.ensure_future(anext(stream))
    gone = asyncio.ensure_future(client_gone(request))
    has_audio = False
    try:
        await asyncio.wait({first, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not first.done():
            raise ClientDisconnect
        chunk = first.result()
        has_audio = True
        return chunk
    finally:
        first.cancel()
        gone.cancel()
        if not has_audio:
            stream.close()


def _error(status: int, message: str, **headers: str) -> JSONResponse:
    return JSONResponse({"status": status, "message": message}, status, headers)


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(BadRequest)
    async def bad_request(_: Request, error: BadRequest) -> Response:
        return _error(400, str(error))

    @app.exception_handler(Unauthorized)
    async def unauthorized(_: Request, error: Unauthorized) -> Response:
        return _error(401, str(error), **{"WWW-Authenticate": "Bearer"})

    @app.exception_handler(BodyTooLarge)
    async def too_large(_: Request, __: BodyTooLarge) -> Response:
        return _error(413, f"the body is over {MAX_BODY_BYTES} bytes")

    @app.exception_handler(QueueFull)
    async def queue_full(_: Request, error: QueueFull) -> Response:
        return _error(429, str(error), **{"Retry-After": f"{error.retry_after_s:.0f}"})

    @app.exception_handler(Draining)
    async def draining(_: Request, error: Draining) -> Response:
        return _error(503, str(error), **{"Retry-After": f"{error.retry_after_s:.0f}"})

    @app.exception_handler(EngineFailed)
    async def failed(_: Request, error: EngineFailed) -> Response:
        return _error(500, str(error))

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, __: ClientDisconnect) -> Response:
        return _error(499, "the client went away")  # nobody reads it; the access log does

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> Response:
        return _error(error.status_code, str(error.detail), **(error.headers or {}))

    @app.exception_handler(Exception)
    async def unexpected(_: Request, __: Exception) -> Response:
        return _error(500, "internal error; the server's log has the details")
