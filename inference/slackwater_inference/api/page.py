"""The pages for people: `/` speaks, `/docs` describes the API.

Owns the two HTML files beside this module, which load nothing from elsewhere: networks may be closed.
"""

from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

_HEADERS = {
    # No address but ours, and no other page may show this one in a frame: it holds an API key while it is open.
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; media-src blob:; img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def page_routes() -> APIRouter:
    """`/` and `/docs`."""
    router = APIRouter(include_in_schema=False)
    speak, docs = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("page.html", "docs.html"))

    @router.get("/")
    async def page() -> HTMLResponse:
        return HTMLResponse(speak, headers=_HEADERS)

    @router.get("/docs")
    async def docs_page() -> HTMLResponse:
        return HTMLResponse(docs, headers=_HEADERS)

    return router
