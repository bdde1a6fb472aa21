"""The far end of `kvasir-node bench net`: a process that serves every stack until its standard input ends.

It does not know what is measured. Its first line on standard output is one JSON object that says where each
stack listens; run as `python -m kvasir_node.net.bench_peer`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import trio
from libp2p.custom_types import TProtocol

from kvasir_node.net.bench_stacks import (
    CALLS_PROTOCOL,
    PIPE_PROTOCOL,
    KvasirPipe,
    Pipe,
    StockPipe,
    TrioPipe,
    open_bench_transport,
    open_stock_host,
    serve_pipe,
    tls_contexts,
)
from kvasir_node.net.rpc import call_handler
from kvasir_node.net.transport import Stream

CALLS_IN_FLIGHT_MAX = 64
CALL_BYTES_MAX = 1024 * 1024


async def serve() -> None:
    """Serves until standard input ends."""
    server_tls, _ = tls_contexts()

    async def plain(stream: trio.SocketStream) -> None:
        await _serve_until_broken(TrioPipe(stream))

    async def tls(stream: trio.SocketStream) -> None:
        await _serve_until_broken(TrioPipe(trio.SSLStream(stream, server_tls, server_side=True, https_compatible=True)))

    async def stock(stream: Any) -> None:
        await _serve_until_broken(StockPipe(stream))

    async def kvasir(stream: Stream) -> None:
        await serve_pipe(KvasirPipe(stream))

    async def echo_call(method: int, body: memoryview) -> Sequence[memoryview]:
        return (body,)

    stdin = trio.lowlevel.FdStream(os.dup(sys.stdin.fileno()))
    async with stdin, trio.open_nursery() as nursery, open_stock_host() as host, open_bench_transport() as transport:
        ports = [await _listen(nursery, handler) for handler in (plain, tls)]
        host.set_stream_handler(TProtocol(PIPE_PROTOCOL), stock)
        transport.set_handler(PIPE_PROTOCOL, kvasir)
        calls = call_handler(lambda _: echo_call, in_flight_max=CALLS_IN_FLIGHT_MAX, body_bytes_max=CALL_BYTES_MAX)
        transport.set_handler(CALLS_PROTOCOL, calls)
        where = {
            "plain_tcp": ports[0],
            "tls": ports[1],
            "stock": [str(address) for address in host.get_addrs()],
            "kvasir": list(transport.addresses()),
        }
        print(json.dumps(where), flush=True)
        while await stdin.receive_some():
            pass
        nursery.cancel_scope.cancel()


async def _listen(nursery: trio.Nursery, handler: Any) -> int:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    nursery.start_soon(trio.serve_listeners, handler, [listener])
    return listener.socket.getsockname()[1]


async def _serve_until_broken(pipe: Pipe) -> None:
    # Every stack ends with errors of its own, and libp2p raises anything; the end of a pipe is all they mean here.
    with suppress(Exception):
        await serve_pipe(pipe)


if __name__ == "__main__":
    trio.run(serve)
