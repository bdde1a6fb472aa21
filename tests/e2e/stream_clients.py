"""Many streaming clients in a process of their own, so that what they cost is not the node's: prints what they saw.

    python stream_clients.py PORT READING STALLED TOKENS

Each reading client takes its whole stream; a stalled one sends its request and never reads. When all readers are done
a line of JSON says how many streams were complete, their events, and how long it took; stalled ones stay open until
stdin ends.
"""

from __future__ import annotations

import json
import socket
import sys
import time

import trio

PROMPT = "The evening was spent in conversation with"


def request(tokens: int, seed: int) -> bytes:
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": tokens, "seed": seed, "stream": True}
    data = json.dumps(body).encode()
    lines = ("POST /v1/completions HTTP/1.1", "host: localhost", "content-type: application/json")
    return "\r\n".join([*lines, f"content-length: {len(data)}", "connection: close", "", ""]).encode() + data


async def read(port: int, tokens: int, seed: int, seen: list[dict]) -> None:
    """One stream to its end; a connection that is cut shows as one that is not complete."""
    data = bytearray()
    try:
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(request(tokens, seed))
            async for part in stream:
                data += part
    except trio.BrokenResourceError:
        data += b" cut"
    events = [line for line in bytes(data).split(b"\n") if line.startswith(b"data: ")]
    is_complete = bool(events) and events[-1].startswith(b"data: [DONE]")
    finish = json.loads(events[-2][6:]) if is_complete else {}
    length = is_complete and finish["choices"][0]["finish_reason"] in ("length", "stop")
    seen.append({"complete": length, "events": len(events), "status": data[9:12].decode()})


async def stall(port: int, tokens: int, seed: int, opened: list[socket.socket]) -> None:
    sock = trio.socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    await sock.connect(("127.0.0.1", port))
    await sock.send(request(tokens, seed))
    opened.append(sock)


async def main(port: int, reading: int, stalled: int, tokens: int) -> None:
    seen: list[dict] = []
    opened: list = []
    began = time.monotonic()
    async with trio.open_nursery() as nursery:
        for seed in range(stalled):
            nursery.start_soon(stall, port, tokens, seed, opened)
        for seed in range(reading):
            nursery.start_soon(read, port, tokens, seed, seen)
    took_s = time.monotonic() - began
    complete = sum(each["complete"] for each in seen)
    statuses = sorted({each["status"] for each in seen})
    told = {
        "complete": complete,
        "events": sum(each["events"] for each in seen),
        "statuses": statuses,
        "took_s": took_s,
    }
    print(json.dumps(told | {"stalled": len(opened)}), flush=True)
    await trio.to_thread.run_sync(sys.stdin.read)


if __name__ == "__main__":
    trio.run(main, *map(int, sys.argv[1:]))
