"""The verb `top`: the live screen of a node that runs already, here or elsewhere.

It does not know what the screen shows, and leaving it leaves the node alone.
"""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING, Annotated

import typer

from kvasir_node.base.errors import UsageError
from kvasir_node.base.settings import Settings, data_dir_of

if TYPE_CHECKING:
    from kvasir_node.base.snapshot import NodeSnapshot

top_app = typer.Typer(rich_markup_mode=None)


@top_app.command()
def top(
    context: typer.Context,
    url: Annotated[str | None, typer.Option("--url", help="A node's API, such as http://127.0.0.1:9480.")] = None,
) -> None:
    """The live screen of a running node; leaving it leaves the node alone."""
    import trio

    from kvasir_node.base.snapshot import NodeSnapshot
    from kvasir_node.surfaces.client import NodeClient, node_url
    from kvasir_node.surfaces.remote_source import read_document
    from kvasir_node.surfaces.terminal import can_show_screen

    settings, no_color = context.obj.settings(), context.obj.no_color
    if not can_show_screen(no_color):
        raise UsageError("top needs a terminal on stdin and stdout; elsewhere use `kvasir-node status`")
    found = node_url(settings, url)
    with NodeClient(found, settings.api.key) as client:
        first = read_document(json.dumps(client.get("/kvasir/v1/status")).encode(), NodeSnapshot)
    trio.run(_watch, found, settings, first, no_color)


async def _watch(url: str, settings: Settings, first: NodeSnapshot, no_color: bool) -> None:
    """Until `q` or a signal; both leave the terminal as it was."""
    import trio

    from kvasir_node.surfaces.beside import run_beside
    from kvasir_node.surfaces.remote_source import open_remote
    from kvasir_node.surfaces.screen import shown

    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
        async with (
            open_remote(url, settings.api.key, first, _ticket_of(url, settings)) as source,
            shown(source, no_color=no_color) as quit_key,
        ):
            await run_beside(quit_key.wait, lambda: anext(signals))


def _ticket_of(url: str, settings: Settings) -> str:
    """Of a node of this machine's data directory; the API never tells a ticket."""
    from kvasir_node.surfaces.nodefile import read_node_file

    found = read_node_file(data_dir_of(settings))
    return found.ticket if found is not None and found.api == url else ""
