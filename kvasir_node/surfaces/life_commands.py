"""The verbs about a running node's work and life: `pause`, `resume`, `drain`, `stop`.

They do not know how a node drains. A node without `--url` is the one of the data directory, and is ended by a signal,
so that it can be stopped when it serves no API, or when its API no longer answers.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvasir_node.base.errors import KvasirError, Unreachable, UsageError
from kvasir_node.base.settings import Settings, data_dir_of
from kvasir_node.surfaces.command_parts import JsonFlag, UrlOption, client_of, print_answer
from kvasir_node.surfaces.exits import UNHEALTHY, say

if TYPE_CHECKING:
    from kvasir_node.surfaces.client import NodeClient
    from kvasir_node.surfaces.nodefile import NodeFile

LOOK_S = 0.2
WORDS_S = 5.0  # between two lines that say the same
QUIET_S = 1.0  # what is over by then needs no words
END_GRACE_S = 10.0  # after its drain's deadline a node closes connections and gives memory back

life_app = typer.Typer(rich_markup_mode=None)
NoWaitFlag = Annotated[bool, typer.Option("--no-wait", help="Return at once.")]


@life_app.command()
def pause(context: typer.Context, url: UrlOption = None, as_json: JsonFlag = False) -> None:
    """The worker gives back what it holds, and takes nothing new."""
    _tell_worker(context, url, "pause", as_json)


@life_app.command()
def resume(context: typer.Context, url: UrlOption = None, as_json: JsonFlag = False) -> None:
    """The worker may work again, as far as its settings allow."""
    _tell_worker(context, url, "resume", as_json)


def _tell_worker(context: typer.Context, url: str | None, verb: str, as_json: bool) -> None:
    with client_of(context, url) as client:
        document = client.post(f"/kvasir/v1/{verb}")
    worker = document["worker"]
    why = f": {worker['reason']}" if worker["reason"] else ""
    print_answer(document, f"{worker['state']}{why}", as_json=as_json)


@life_app.command()
def drain(
    context: typer.Context, url: UrlOption = None, no_wait: NoWaitFlag = False, as_json: JsonFlag = False
) -> None:
    """Take no new work, for good, and wait until all work has ended.

    The node goes on running and says at /health that it drains; `stop` ends it. An interrupted wait ends no drain.
    """
    with client_of(context, url) as client:
        document = client.post("/kvasir/v1/drain")
        if not no_wait:
            document = _wait_for_end_of_work(client, document)
    print_answer(document, _drained_text(document), as_json=as_json)


def _drained_text(status: dict[str, Any]) -> str:
    from kvasir_node.surfaces.reports import work_left

    left = work_left(status)
    return f"draining: {left} left" if left else "drained; `kvasir-node stop` ends the node"


def _wait_for_end_of_work(client: NodeClient, document: dict[str, Any]) -> dict[str, Any]:
    from kvasir_node.surfaces.reports import work_left

    words = _Words()
    while left := work_left(document):
        words(f"waiting for {left}")
        time.sleep(LOOK_S)
        document = client.get("/kvasir/v1/status")
    return document


@life_app.command()
def stop(
    context: typer.Context,
    url: UrlOption = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="The node exits 75: whoever supervises it starts it again.")
    ] = False,
    no_wait: NoWaitFlag = False,
) -> None:
    """End a node once its work has ended; waits until it is gone."""
    if url is not None:
        with client_of(context, url) as client:
            before = client.post("/kvasir/v1/restart" if restart else "/kvasir/v1/stop")
            if not no_wait:
                _wait_for_silence(client, before)
    else:
        _stop_here(context.obj.settings(), restart=restart, wait=not no_wait)
    if not no_wait:
        say("stopped")


def _stop_here(settings: Settings, *, restart: bool, wait: bool) -> None:
    """By a signal, but for a restart, which the node may refuse: then its API says why."""
    from kvasir_node.surfaces.client import NodeClient

    data_dir = data_dir_of(settings)
    found = _node_of(data_dir)
    if restart and found.api is not None:
        with NodeClient(found.api, settings.api.key) as client:
            client.post("/kvasir/v1/restart")
    else:
        _signal(found.pid, data_dir, signal.SIGHUP if restart else signal.SIGTERM)
    if wait:
        _wait_for_exit(settings, found, data_dir)


def _node_of(data_dir: Path) -> NodeFile:
    from kvasir_node.surfaces.nodefile import is_claimed, read_node_file, why_none

    found = read_node_file(data_dir) if is_claimed(data_dir) else None
    if found is None:
        raise Unreachable(f"{why_none(data_dir)}; name another with --data-dir, or an API with --url")
    return found


def _signal(pid: int, data_dir: Path, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass  # it ended meanwhile, which was the wish
    except PermissionError as error:
        raise UsageError(f"process {pid} on {data_dir} is another user's; stop it as that user, or by --url") from error


def _wait_for_exit(settings: Settings, found: NodeFile, data_dir: Path) -> None:
    """Bounded by the deadline of a drain, as far as our settings are those of the node."""
    from kvasir_node.surfaces.nodefile import is_running

    deadline = time.monotonic() + settings.node.drain_timeout_s + END_GRACE_S
    words = _Words()
    while is_running(data_dir, found.pid):
        if time.monotonic() > deadline:
            say(f"error: process {found.pid} still runs; `kill -9 {found.pid}` ends it, with all that it works on")
            raise typer.Exit(UNHEALTHY)
        words(f"waiting for {_work_left_at(found.api, settings.api.key) or f'process {found.pid} to end'}")
        time.sleep(LOOK_S)


def _work_left_at(api: str | None, key: str) -> str:
    from kvasir_node.surfaces.client import NodeClient
    from kvasir_node.surfaces.reports import work_left

    if api is not None:
        with suppress(KvasirError), NodeClient(api, key) as client:  # an API closes before its process ends
            return work_left(client.get("/kvasir/v1/status"))
    return ""


def _wait_for_silence(client: NodeClient, before: dict[str, Any]) -> None:
    """Until nobody answers there, or another run does."""
    from kvasir_node.surfaces.reports import work_left

    words, document = _Words(), before
    with suppress(Unreachable):
        while document["uptime_s"] >= before["uptime_s"]:
            words(f"waiting for {work_left(document) or 'the node to end'}")
            time.sleep(LOOK_S)
            document = client.get("/kvasir/v1/status")


class _Words:
    """Says on stderr what is waited for: when it is something else, and every few seconds; nothing within the first."""

    def __init__(self) -> None:
        self._began_at = self._said_at = time.monotonic()
        self._said = ""

    def __call__(self, words: str) -> None:
        now = time.monotonic()
        is_due = words != self._said or now - self._said_at >= WORDS_S
        if now - self._began_at >= QUIET_S and is_due:
            self._said, self._said_at = words, now
            say(words)
