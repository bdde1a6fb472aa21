"""The API under many clients, some of whom mean no good."""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest
from local_swarm import node

pytestmark = [pytest.mark.soak, pytest.mark.timeout(580)]

CLIENTS = Path(__file__).parent / "stream_clients.py"
DRAIN_S = 20.0  # node.drain_timeout_s
MEMORY_MAX = 200 << 20  # that 300 clients, 200 idle connections and large bodies may take on top


def start_clients(port: int, reading: int, stalled: int, tokens: int) -> subprocess.Popen[str]:
    command = [sys.executable, str(CLIENTS), *map(str, (port, reading, stalled, tokens))]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def connect(port: int, *, sends: bytes = b"") -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port))
    sock.sendall(sends)
    return sock


def large_body_status(port: int) -> str:
    """Of 20 MB, sent whole before the answer is read, as many clients do."""
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    sock = connect(port, sends=(head + "content-length: 20000000\r\n\r\n").encode())
    try:
        for _ in range(20):
            sock.sendall(b"x" * 1_000_000)
    except OSError:
        pass  # it is cut when it goes on too long after the answer
    with sock:
        try:
            return sock.recv(64)[9:12].decode()
        except OSError:
            return "cut"


def test_two_hundred_readers_get_every_token_beside_a_hundred_who_read_nothing(tmp_path):
    flags = ("--role", "coordinator", "--slots", "16", "--queue", "400")
    with node(tmp_path, "node", *flags) as running:
        port = int(running.ready["api"].rsplit(":", 1)[1])
        process = psutil.Process(running.popen.pid)
        start_clients(port, 4, 0, 8).communicate()  # what the first answers take stays
        before = process.memory_info().rss
        idle = [connect(port) for _ in range(100)] + [connect(port, sends=b"POST / HT") for _ in range(100)]
        clients = start_clients(port, 200, 100, 120)
        most, latencies, bodies = before, [], []
        with httpx.Client(base_url=running.ready["api"], timeout=30) as asking:
            time.sleep(2)
            asking_body = threading.Thread(target=lambda: bodies.extend(large_body_status(port) for _ in range(5)))
            asking_body.start()
            done: list[str] = []
            waiting = threading.Thread(target=lambda: done.append(clients.stdout.readline()))
            waiting.start()
            while waiting.is_alive():
                began = time.perf_counter()
                assert asking.get("/kvasir/v1/status").status_code == 200
                latencies.append(time.perf_counter() - began)
                most = max(most, process.memory_info().rss)
                time.sleep(0.25)
            asking_body.join()
        seen = json.loads(done[0])
        began = time.monotonic()
        running.popen.terminate()
        assert running.popen.wait(60) == 0
        ended_s = time.monotonic() - began
        clients.communicate()
        for each in idle:
            each.close()
    median_ms, high_ms = (1000 * statistics.quantiles(latencies, n=20)[index] for index in (9, 18))
    print(
        f"{seen}; memory +{(most - before) >> 20} MiB; status {median_ms:.0f} ms median, {high_ms:.0f} ms at 95 %; "
        f"20 MB bodies {bodies}; ended {ended_s:.1f} s after SIGTERM"
    )
    assert (seen["complete"], seen["stalled"], seen["statuses"]) == (200, 100, ["200"])
    assert set(bodies) <= {"413", "cut"}
    assert most - before < MEMORY_MAX
    assert ended_s < DRAIN_S
    assert median_ms <= 50
