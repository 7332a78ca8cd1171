"""The FastAPI application: every route, in one place.

Owns which routes there are, the probes, and what OpenAPI says of all of them.  Called by the server, which serves
it, and by tests.
"""

from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.routing import compile_path

from slackwater_inference.api.access import AccessLog
from slackwater_inference.api.asr import asr_routes
from slackwater_inference.api.body import HeldBodies
from slackwater_inference.api.errors import ApiError, add_error_handlers, declared, error_response
from slackwater_inference.api.limits import Limits
from slackwater_inference.api.live import live_routes
from slackwater_inference.api.page import page_routes
from slackwater_inference.api.services import Services
from slackwater_inference.api.timestamps import timestamp_routes
from slackwater_inference.api.tts import tts_routes
from slackwater_inference.api.voices import voice_routes
from slackwater_inference.api.wallet import wallet_routes
from slackwater_inference.core import Stage
from slackwater_inference.engine import Engine

_ABOUT = """Text to speech, as the Fish Audio API speaks it.

Errors are always `{"status", "message"}`.

Text that is still being written goes over the websocket `/v1/tts/live`, in msgpack: the client sends `start` (its \
`request` has the fields of `POST /v1/tts`), `text`, `flush` and `stop`; the server sends `audio` and at last \
`finish` with the reason `stop`, or `error` and a message.
"""


def create_app(services: Services) -> FastAPI:
    """The application on top of `services`."""
    app = FastAPI(title="Slackwater speech", description=_ABOUT, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.services = services
    app.state.limits = Limits(services.settings.max_open_requests, services.engine.metrics)
    app.add_middleware(HeldBodies, max_bytes=services.settings.max_held_bytes)
    app.add_middleware(AccessLog, metrics=services.engine.metrics)
    add_error_handlers(app)
    # Only says in OpenAPI that a key is needed, where one is; `caller_of` checks it.
    needs_key = [] if services.keys is None else [Depends(HTTPBearer(auto_error=False))]
    for routes in (tts_routes, timestamp_routes, asr_routes, voice_routes, wallet_routes):
        app.include_router(routes(services), dependencies=needs_key)
    app.include_router(live_routes(services))
    app.include_router(_probe_routes(services.engine))
    app.include_router(page_routes())
    _describe(app)
    _say_every_method(app)
    return app


def _probe_routes(engine: Engine) -> APIRouter:
    router = APIRouter(tags=["Operation"])

    @router.get("/healthz", summary="The process is alive")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @router.get("/readyz", summary="The engine takes requests", responses=declared(503))
    async def readyz() -> Response:
        status = engine.status()
        if status.stage is not Stage.READY:
            raise ApiError(503, f"not ready: {status.stage}")
        return JSONResponse({"status": "ready", "slots": status.slots})

    @router.get(
        "/metrics",
        summary="Prometheus metrics",
        response_class=Response,
        responses={200: {"content": {CONTENT_TYPE_LATEST.partition(";")[0]: {"schema": {"type": "string"}}}}},
    )
    async def metrics() -> Response:
        return Response(generate_latest(engine.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return router


def _describe(app: FastAPI) -> None:
    """Take FastAPI's own 422 out of the schema: a bad parameter is a 400 here, as at the hosted service."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        schema = generate()
        for path in schema["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            schema.get("components", {}).get("schemas", {}).pop(name, None)
        return schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to change it


def _say_every_method(app: FastAPI) -> None:
    """Name every method of a path where one is refused: the router knows only those of one of its routes."""

    @app.exception_handler(405)
    async def refused(request: Request, error: HTTPException) -> Response:
        paths = app.openapi()["paths"].items()
        found = {
            method.upper()
            for path, methods in paths
            for method in methods
            if compile_path(path)[0].match(request.url.path)
        }
        allowed = ", ".join(sorted(found)) or (error.headers or {}).get("Allow", "")
        message = f"{request.method} is not allowed here; use {allowed}"
        return error_response(ApiError(405, message, {"Allow": allowed}))
