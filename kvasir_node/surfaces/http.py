"""The HTTP API: routes, guards and the life of one answer, as an ASGI application over a NodePort.

It does not know how text is generated, how the swarm works, or which socket it is served on; OpenAI's documents
are made in `answers.py` and `openai.py`.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import urlsplit

import trio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kvasir_node.base.errors import BugError, KvasirError, NotFoundError, UsageError
from kvasir_node.base.generation import AnswerEvent, ChoiceEnded, Finished, GenerationRequest
from kvasir_node.surfaces import views
from kvasir_node.surfaces.address import check_key_policy, is_loopback_host, parse_address
from kvasir_node.surfaces.answers import (
    AnswerShape,
    answer_shape,
    document_of_error,
    error_document,
    headers_of_error,
    model_document,
)
from kvasir_node.surfaces.beside import run_beside
from kvasir_node.surfaces.events import EventFeed
from kvasir_node.surfaces.exchange import Exchange, disconnected, end_body, send_part
from kvasir_node.surfaces.listener import serve_connections
from kvasir_node.surfaces.metrics import METRICS_MEDIA_TYPE, metrics_text
from kvasir_node.surfaces.openai import ApiRequest, parse_chat, parse_completion, parse_json_object
from kvasir_node.surfaces.page_routes import is_of_page, page_routes
from kvasir_node.surfaces.phone_page import is_of_phone_page
from kvasir_node.surfaces.ports import AnswerEvents, LifePort, ModelCard, NodePort
from kvasir_node.surfaces.pull_answer import PullAnswer
from kvasir_node.surfaces.sse import DONE, HEADERS, HEARTBEAT, Outbox, sse_data

BODY_TIMEOUT_S = 30.0  # a request's body must have arrived by then
REQUESTS_MAX = 1024  # under way at once, on all connections

logger = logging.getLogger(__name__)


async def serve_api(
    node: NodePort, life: LifePort, listeners: list[trio.SocketListener], *, stop: trio.Event, grace_s: float
) -> None:
    """Serves the API on the listeners until `stop`, then cuts what still runs after `grace_s`; closes them."""
    await serve_connections(cast("Any", build_app(node, life)), listeners, stop=stop, grace_s=grace_s)


def build_app(node: NodePort, life: LifePort) -> ASGIApp:
    """The whole API of one node. Raises UsageError when the address needs a key and none is set."""
    check_key_policy(node.settings.api.listen, node.settings.api.key)
    api = _Api(node, life)
    app = Starlette(
        routes=[
            Route("/v1/models", api.list_models),
            Route("/v1/models/{name:path}", api.show_model),
            Route("/v1/chat/completions", api.chat, methods=["POST"]),
            Route("/v1/completions", api.complete, methods=["POST"]),
            Route("/metrics", api.metrics),
            Route("/health", api.health),
            Route("/v1/health", api.health),
            Route("/kvasir/v1/status", api.status),
            Route("/kvasir/v1/peers", api.peers),
            Route("/kvasir/v1/demand", api.demand),
            Route("/kvasir/v1/experts", api.experts),
            Route("/kvasir/v1/requests", api.requests),
            Route("/kvasir/v1/events", api.events),
            Route("/kvasir/v1/pull", api.pull, methods=["POST"]),
            Route("/kvasir/v1/phone", api.invite_phone, methods=["POST"]),
            *life.door.page.routes(),
            Route("/kvasir/v1/pause", api.pause, methods=["POST"]),
            Route("/kvasir/v1/resume", api.resume, methods=["POST"]),
            Route("/kvasir/v1/revoke", api.revoke, methods=["POST"]),
            Route("/kvasir/v1/drain", api.drain, methods=["POST"]),
            Route("/kvasir/v1/stop", api.stop, methods=["POST"]),
            Route("/kvasir/v1/restart", api.restart, methods=["POST"]),
            *page_routes(),
        ],
        exception_handlers={
            KvasirError: _on_kvasir_error,
            HTTPException: _on_http_error,
            Exception: _on_surprise,
        },
    )
    app.router.redirect_slashes = False
    return _Guard(app, key=node.settings.api.key, loopback=parse_address(node.settings.api.listen).is_loopback)


class _Api:
    """The endpoints; docs/make_reference.py copies the first line of each into the reference."""

    def __init__(self, node: NodePort, life: LifePort) -> None:
        self.node, self.life = node, life
        self._feed = EventFeed(node.events, node.settings.api.heartbeat_s)

    async def list_models(self, request: Request) -> Response:
        """The models that this node serves."""
        return JSONResponse({"object": "list", "data": [model_document(card) for card in self.node.models()]})

    async def show_model(self, request: Request) -> Response:
        """One of them, by name or id."""
        return JSONResponse(model_document(self._model(request.path_params["name"])))

    async def chat(self, request: Request) -> Response:
        """A chat completion, whole or streamed (server-sent events)."""
        return await self._answer(request, parse_chat, chat=True)

    async def complete(self, request: Request) -> Response:
        """A completion of one prompt or several, whole or streamed."""
        return await self._answer(request, parse_completion, chat=False)

    async def health(self, request: Request) -> Response:
        """200 and `ok`, or 503 and why no request should come here now. Needs no key."""
        document = views.health_document(self.node.snapshot())
        return JSONResponse(document, 200 if document["status"] == "ok" else 503)

    async def status(self, request: Request) -> Response:
        """All that `kvasir-node status --json` prints."""
        return JSONResponse(views.status_document(self.node.snapshot()))

    async def metrics(self, request: Request) -> Response:
        """Figures for Prometheus."""
        return Response(metrics_text(self.node.snapshot(), self.node.metrics()), media_type=METRICS_MEDIA_TYPE)

    async def peers(self, request: Request) -> Response:
        """Who is connected, and who is shut out."""
        return JSONResponse(views.peers_document(self.node.snapshot()))

    async def demand(self, request: Request) -> Response:
        """What is in demand, as this node's hub sees it."""
        return JSONResponse(views.demand_document(self.node.snapshot()))

    async def invite_phone(self, request: Request) -> Response:
        """A code that lets one page join as a worker."""
        raw = await _read_body(request, self.node.settings.api.body_bytes_max)
        body = parse_json_object(raw) if raw else {}
        expires_s = body.get("expires_s")
        is_number = isinstance(expires_s, int | float) and not isinstance(expires_s, bool)
        if set(body) - {"expires_s"} or not (is_number or expires_s is None):
            raise UsageError('the body must be empty or {"expires_s": SECONDS}', param="expires_s")
        return JSONResponse(self.life.door.invite(self.node, expires_s), headers={"cache-control": "no-store"})

    async def experts(self, request: Request) -> Response:
        """Where each expert of the model is computed, and how much it is used."""
        return JSONResponse(views.experts_document(self.node.snapshot(), self.node.experts()))

    async def requests(self, request: Request) -> Response:
        """The requests under way, and how the latest ended."""
        return JSONResponse(views.requests_document(self.node.requests_snapshot()))

    async def events(self, request: Request) -> Response:
        """What happens in the node, as server-sent events that do not end."""
        return self._feed.answer(request.headers.get("last-event-id", ""))

    async def pause(self, request: Request) -> Response:
        """Lends nothing until `resume`."""
        self.node.pause()
        return JSONResponse(self.node.snapshot().to_json())

    async def resume(self, request: Request) -> Response:
        """Ends `pause`."""
        self.node.resume()
        return JSONResponse(self.node.snapshot().to_json())

    async def revoke(self, request: Request) -> Response:
        """Shuts a peer out of the swarm, or lets it in again."""
        body = parse_json_object(await _read_body(request, self.node.settings.api.body_bytes_max))
        peer, is_revoked = body.get("peer"), body.get("revoked", True)
        if not isinstance(peer, str) or not isinstance(is_revoked, bool) or set(body) - {"peer", "revoked"}:
            raise UsageError('the body must be {"peer": PEER_ID, "revoked": true or false}', param="peer")
        changed = self.node.revoke(peer, is_revoked=is_revoked)
        return JSONResponse(views.revoked_document(self.node.snapshot(), changed=changed))

    async def drain(self, request: Request) -> Response:
        """Takes no new work from now on, and finishes what runs."""
        self.node.begin_drain()
        return JSONResponse(self.node.snapshot().to_json())

    async def stop(self, request: Request) -> Response:
        """Drains, then ends the process with 0."""
        self.life.stop()
        return JSONResponse(self.node.snapshot().to_json(), 202)

    async def restart(self, request: Request) -> Response:
        """Drains, then ends the process with 75, if the settings as they are now would start."""
        self.life.restart()
        return JSONResponse(self.node.snapshot().to_json(), 202)

    async def pull(self, request: Request) -> Response:
        """Brings a model here from the swarm; progress as JSON, one object a line."""
        body = parse_json_object(await _read_body(request, self.node.settings.api.body_bytes_max))
        ref = body.get("model")
        if not isinstance(ref, str) or set(body) != {"model"}:
            raise UsageError('the body must be {"model": NAME or ID}', param="model")
        return PullAnswer(self.node, ref)

    async def _answer(self, request: Request, parse: Callable[..., ApiRequest], *, chat: bool) -> Response:
        settings = self.node.settings.api
        asked = parse(parse_json_object(await _read_body(request, settings.body_bytes_max)))
        shape = answer_shape(
            chat=chat,
            model=self._model(asked.model).name,
            created=int(time.time()),
            choices=asked.generation.answer_count,
            logprobs=asked.generation.top_logprobs is not None,
        )
        if asked.stream:
            return _StreamedAnswer(self.node, asked.generation, shape, asked.include_usage, settings.heartbeat_s)
        return _WholeAnswer(self.node, asked.generation, shape)

    def _model(self, name: str) -> ModelCard:
        card = self.node.find_model(name)
        if card is None:
            served = ", ".join(card.name for card in self.node.models()) or "none"
            message = f"the model {name[:100]!r} is not served here; served: {served}"
            raise NotFoundError(message, param="model", code="model_not_found")
        return card


class _WholeAnswer(Response):
    """Collects the text, then answers once; a client that leaves meanwhile frees its slot."""

    def __init__(self, node: NodePort, request: GenerationRequest, shape: AnswerShape) -> None:
        super().__init__()
        self._node, self._request, self._shape = node, request, shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await run_beside(lambda: disconnected(receive), self._collect)
        if response is not None:
            await response(scope, receive, send)

    async def _collect(self) -> Response:
        collected: list[AnswerEvent] = []
        async with self._node.generate(self._request) as events:
            async for event in events:
                collected.append(event)
                if isinstance(event, Finished):
                    return JSONResponse(self._shape.whole(collected, event))
        raise BugError("an answer ended without a Finished event")


class _StreamedAnswer(Response):
    """Server-sent events. Refusals come before the first byte, as ordinary error answers."""

    def __init__(
        self, node: NodePort, request: GenerationRequest, shape: AnswerShape, include_usage: bool, heartbeat_s: float
    ) -> None:
        super().__init__()
        self._node, self._request, self._shape = node, request, shape
        self._include_usage, self._heartbeat_s = include_usage, heartbeat_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if await run_beside(lambda: disconnected(receive), lambda: self._stream(send)):
            await end_body(send)

    async def _stream(self, send: Send) -> bool:
        """True when all but the end of the body is sent."""
        outbox = Outbox()
        async with trio.open_nursery() as writing:
            refusal = await self._pump(outbox, lambda: writing.start_soon(self._write, outbox, send))
        if refusal is not None:
            raise refusal
        return True

    async def _pump(self, outbox: Outbox, start_writing: Callable[[], None]) -> KvasirError | None:
        """Moves all events to the outbox and frees the slot, however slowly the client reads."""
        started = False
        try:
            async with self._node.generate(self._request) as events:
                started = True
                start_writing()
                await _drain_into(outbox, events)
        except KvasirError as error:
            if not started:
                return error
            _log_failure(error)
            outbox.fail(error)
        except Exception as error:
            _log_failure(error)
            bug = BugError("the answer failed")
            if not started:
                return bug
            outbox.fail(bug)
        return None

    async def _write(self, outbox: Outbox, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        await send_part(send, HEARTBEAT)
        for document in self._shape.first(self._include_usage):
            await send_part(send, sse_data(document))
        while not await self._write_one(await outbox.take(self._heartbeat_s), send):
            pass

    async def _write_one(self, event: AnswerEvent | KvasirError | None, send: Send) -> bool:
        """True after the last event."""
        if event is None:
            await send_part(send, HEARTBEAT)
        elif isinstance(event, KvasirError):
            await send_part(send, sse_data(document_of_error(event)))
        elif isinstance(event, Finished):
            last = b"".join(sse_data(document) for document in self._shape.last(event, self._include_usage))
            await send_part(send, last + DONE)
        elif isinstance(event, ChoiceEnded):
            await send_part(send, sse_data(self._shape.choice_end(event, self._include_usage)))
        else:
            await send_part(send, sse_data(self._shape.delta(event, self._include_usage)))
        return isinstance(event, Finished | KvasirError)


async def _drain_into(outbox: Outbox, events: AnswerEvents) -> None:
    async for event in events:
        outbox.put(event)
        if isinstance(event, Finished):
            return
    raise BugError("an answer ended without a Finished event")


async def _read_body(request: Request, bytes_max: int) -> bytes:
    """Raises HTTPException 408, 413 or 415."""
    content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise HTTPException(415, f"the body must be application/json, got {content_type[:60]!r}")
    body = bytearray()
    with trio.move_on_after(BODY_TIMEOUT_S) as scope:
        while await _read_part(request.receive, body):
            if len(body) > bytes_max:
                raise HTTPException(413, f"the body must be at most {bytes_max} bytes")
    if scope.cancelled_caught:
        raise HTTPException(408, f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s")
    return bytes(body)


async def _read_part(receive: Receive, body: bytearray) -> bool:
    """False after the last part. (starlette's own generator would be left open by an early answer.)"""
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientDisconnect()
    body += message.get("body", b"")
    return message.get("more_body", False)


async def _on_kvasir_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, KvasirError)
    if error.http_status >= 500:
        _log_failure(error)
    return JSONResponse(document_of_error(error), error.http_status, headers_of_error(error))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = error.detail
    if error.status_code == 404:
        message = f"there is nothing at {request.url.path[:100]!r}; the API's paths begin with /v1/ or /kvasir/v1/"
    elif error.status_code == 405:
        message = f"{request.method[:20]} is not allowed here; allowed: {(error.headers or {}).get('Allow', 'GET')}"
    return JSONResponse(error_document(error.status_code, message), error.status_code, error.headers)


async def _on_surprise(request: Request, error: Exception) -> Response:
    """starlette sends this and raises the error again, for `_Guard` to log."""
    return JSONResponse(document_of_error(BugError("unexpected")), 500)


def _log_failure(error: Exception) -> None:
    if isinstance(error, KvasirError) and not isinstance(error, BugError):
        logger.warning("a request failed: %s", error)
    else:  # its kind and its place: what a library says of a text may quote it
        told = error if isinstance(error, BugError) else BugError(f"{type(error).__name__}; its words are not logged")
        logger.error("a request failed", exc_info=(type(told), told, error.__traceback__))


class _Guard:
    """Outermost: who may ask at all, how many at once, and that no failure shows its insides."""

    def __init__(self, app: ASGIApp, *, key: str, loopback: bool) -> None:
        self._app, self._key, self._loopback = app, key.encode(), loopback
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
        elif scope["type"] == "http":
            await self._http(scope, Exchange(receive, send))

    async def _http(self, scope: Scope, exchange: Exchange) -> None:
        self._running += 1
        try:
            await (self._refusal(Request(scope)) or self._app)(scope, exchange.receive, exchange.send)
        except ClientDisconnect:
            pass
        except Exception as error:
            if exchange.stalled:
                logger.info("cut a client that took nothing for a minute")
            else:
                _log_failure(error)
        finally:
            self._running -= 1

    def _refusal(self, request: Request) -> Response | None:
        if self._loopback and not _is_local_request(request):
            message = "only pages and programs of this machine may ask: Host and Origin must be loopback names"
            return JSONResponse(error_document(403, message, code="host_not_allowed"), 403)
        path = request.url.path
        is_open = path in ("/health", "/v1/health") or is_of_page(path) or is_of_phone_page(path)
        if self._key and not is_open and not self._has_key(request):
            message = "a key is needed: send it as Authorization: Bearer KEY"
            return JSONResponse(error_document(401, message), 401, {"www-authenticate": "Bearer"})
        if self._running > REQUESTS_MAX:
            return JSONResponse(error_document(503, f"{REQUESTS_MAX} requests are under way; try again"), 503)
        return None

    def _has_key(self, request: Request) -> bool:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(key.strip().encode("latin-1"), self._key)


def _is_local_request(request: Request) -> bool:
    """Defends against DNS rebinding: a page of evil.example cannot make a browser send a loopback Host or Origin."""
    host = request.headers.get("host", "")
    origin = request.headers.get("origin")
    return _is_loopback_authority(host) and (origin is None or _is_loopback_authority(_authority(origin)))


def _authority(origin: str) -> str:
    return origin.partition("://")[2]


def _is_loopback_authority(authority: str) -> bool:
    try:
        host = urlsplit(f"//{authority}").hostname
    except ValueError:
        return False
    return host is not None and "@" not in authority and is_loopback_host(host)
