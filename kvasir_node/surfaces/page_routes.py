"""The page at `/`: its files and its policy. It does not know what the page shows, nor who may ask the API."""

from __future__ import annotations

from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvasir_node.surfaces.static_files import StaticFiles

FOLDER = Path(__file__).parent / "page"
FILES_PATH = "/page/"
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)


def is_of_page(path: str) -> bool:
    """What needs no key: nothing of it is secret, and the page has to be there to ask for the key."""
    return path == "/" or path.startswith(FILES_PATH)


def page_routes() -> list[Route]:
    files = StaticFiles(FOLDER, {"content-security-policy": CSP})

    async def answer(request: Request) -> Response:
        """The page for browsers, and its files. Needs no key."""
        found = files.answer(request, str(request.path_params.get("name", "index.html")))
        if found is None:
            raise HTTPException(404)
        return found

    return [Route("/", answer), Route(FILES_PATH + "{name}", answer)]
