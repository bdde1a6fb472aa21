"""The page for phones: what its build has left in the package, its policy, and a port that serves nothing else.

It does not know what the page does, nor who may join by it. The page itself holds no secret; the code for joining
stands behind the # of its address, which browsers do not send.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import trio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import kvasir_node
from kvasir_node.surfaces.answers import error_document
from kvasir_node.surfaces.listener import serve_connections
from kvasir_node.surfaces.static_files import StaticFiles

PAGE_PATH = "/phone"
CONNECTIONS_MAX = 128  # of a port that serves only the page
DIST = Path(kvasir_node.__file__).parent / "phone" / "dist"
NOT_BUILT = (
    "phone page not built: this installation has no page for phones (its build needs Node.js and npm); install a "
    "released wheel, or install Node.js and reinstall from the sources"
)
CSP = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self' ws: wss:; manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class PhonePage:
    """The built page; of no files when there is none."""

    def __init__(self, folder: Path = DIST) -> None:
        """Raises DataError for a folder that holds more than a page does."""
        headers = {"content-security-policy": CSP, "cross-origin-embedder-policy": "require-corp"}
        self._files = StaticFiles(folder, headers)

    @property
    def is_built(self) -> bool:
        return "index.html" in self._files

    def routes(self) -> list[Route]:
        return [Route(PAGE_PATH, self._answer), Route(PAGE_PATH + "/{name}", self._answer)]

    async def _answer(self, request: Request) -> Response:
        """The page for phones, and its files. Needs no key."""
        if not self.is_built:
            return JSONResponse(error_document(404, NOT_BUILT, code="phone_page_not_built"), 404)
        name = str(request.path_params.get("name", "index.html"))
        found = self._files.answer(request, name)
        if found is None:
            return JSONResponse(error_document(404, f"the page for phones has no file {name[:100]!r}"), 404)
        return found


def is_of_phone_page(path: str) -> bool:
    """What needs no key."""
    return path == PAGE_PATH or path.startswith(f"{PAGE_PATH}/")


async def serve_page(
    page: PhonePage, listeners: list[trio.SocketListener], *, stop: trio.Event, grace_s: float
) -> None:
    """Serves the page, and nothing else, until `stop`; closes the listeners."""
    app = cast("Any", _page_app(page))
    await serve_connections(app, listeners, stop=stop, grace_s=grace_s, connections_max=CONNECTIONS_MAX)


def _page_app(page: PhonePage) -> Starlette:
    app = Starlette(routes=page.routes(), exception_handlers={HTTPException: _on_http_error})
    app.router.redirect_slashes = False
    return app


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"this port serves the page for phones at {PAGE_PATH}, by GET, and nothing else"
    return JSONResponse(error_document(error.status_code, message), error.status_code, error.headers)
