"""What a call costs over an express channel and over a call stream, both from a thread: `python -m` this module.

It does not know experts. Two processes, 32 KiB asked and 32 KiB answered, in turns; per call the wall time and the
processor time of each process, all of its threads. Over the stream the far end answers from a thread, as a worker does.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import trio

from kvasir_node.base.errors import KvasirError, PeerError
from kvasir_node.net.bench_stacks import open_bench_transport
from kvasir_node.net.express import ExpressChannel, answer_body, result_of
from kvasir_node.net.rpc import CallStream
from kvasir_node.net.transport import Stream

PROTOCOL = "/kvasir/bench/express/1.0.0"
BODY_BYTES = 32 * 1024
CALLS = 2000
ROUNDS = 5
TIMEOUT_S = 30.0
_INVITE, _ECHO, _PROCESSOR_TIME = 1, 2, 3


def _echo(channel: ExpressChannel) -> None:
    with suppress(PeerError):  # the end
        while True:
            call = channel.receive(TIMEOUT_S)
            if call is not None:
                channel.send(call[0], answer_body([call[1]]), TIMEOUT_S)


async def serve() -> None:
    """The far end: its addresses on standard output; until standard input ends."""
    one_thread = trio.CapacityLimiter(1)
    async with open_bench_transport() as transport:

        def arrived(channel: ExpressChannel) -> None:
            threading.Thread(target=_echo, args=(channel,), daemon=True).start()

        async def serve_calls(stream: Stream) -> None:
            async def handle(method: int, body: memoryview) -> Sequence[bytes | memoryview]:
                if method == _INVITE:
                    return (transport.invite(stream.peer, arrived) or b"",)
                if method == _PROCESSOR_TIME:
                    return (json.dumps(time.process_time()).encode(),)
                return await trio.to_thread.run_sync(lambda: (body,), limiter=one_thread)

            await CallStream(stream, handler=handle, in_flight_max=8, body_bytes_max=1 << 20).run()

        transport.set_handler(PROTOCOL, serve_calls)
        print(json.dumps(transport.addresses()), flush=True)
        await trio.to_thread.run_sync(sys.stdin.read)


def _over_express(channel: ExpressChannel, body: bytes) -> None:
    channel.send(1, [body], TIMEOUT_S)
    answer = channel.receive(TIMEOUT_S)
    assert answer is not None
    assert isinstance(result_of(answer[1]), memoryview)


def _over_stream(token: trio.lowlevel.TrioToken, calls: CallStream, body: bytes) -> None:
    done, answers = threading.Event(), list[memoryview | KvasirError]()

    def deliver(answer: memoryview | KvasirError) -> None:
        answers.append(answer)
        done.set()

    token.run_sync_soon(lambda: calls.submit(_ECHO, [body], deliver))
    assert done.wait(TIMEOUT_S)
    assert isinstance(answers[0], memoryview)


async def measure(addresses: Sequence[str]) -> None:
    """Prints a line for each way and round."""
    async with open_bench_transport() as transport, trio.open_nursery() as nursery:
        peer = await transport.connect(addresses)
        calls = CallStream(
            await transport.open_stream(peer, PROTOCOL), handler=None, in_flight_max=8, body_bytes_max=1 << 20
        )
        nursery.start_soon(calls.run)
        channel = await transport.accept_invitation(peer, bytes(await calls.call(_INVITE, timeout_s=TIMEOUT_S)))
        token, body = trio.lowlevel.current_trio_token(), bytes(BODY_BYTES)

        async def far_time_s() -> float:
            return float(json.loads(bytes(await calls.call(_PROCESSOR_TIME, timeout_s=TIMEOUT_S))))

        def repeat(call: Callable[[], None]) -> None:
            for _ in range(CALLS):
                call()

        ways = {
            "express": lambda: _over_express(channel, body),
            "stream": lambda: _over_stream(token, calls, body),
        }
        for _ in range(ROUNDS):
            for name, call in ways.items():
                before = await far_time_s(), time.process_time(), time.perf_counter()
                await trio.to_thread.run_sync(repeat, call)
                wall_s, near_s = time.perf_counter() - before[2], time.process_time() - before[1]
                spent_us = [each / CALLS * 1e6 for each in (wall_s, near_s, await far_time_s() - before[0])]
                print("{:8} wall {:5.0f} µs, here {:5.0f} µs, there {:5.0f} µs".format(name, *spent_us))
        channel.close()
        nursery.cancel_scope.cancel()


def main() -> None:
    if sys.argv[1:] == ["serve"]:
        trio.run(serve)
        return
    command = [sys.executable, "-P", "-m", "kvasir_node.net.bench_express", "serve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as far:
        assert far.stdout is not None
        trio.run(measure, json.loads(far.stdout.readline()))


if __name__ == "__main__":
    main()
