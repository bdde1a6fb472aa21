"""The verb `ticket`: the running node's invite, cut to some roles, as text or as a code for a camera.

It does not know what a ticket's secret holds (wire/swarm_keys).
"""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Annotated

import typer

from kvasir_node.base.errors import Unreachable, UsageError
from kvasir_node.base.settings import data_dir_of

if TYPE_CHECKING:
    from kvasir_node.surfaces.nodefile import NodeFile

ticket_app = typer.Typer(rich_markup_mode=None)


@ticket_app.command()
def ticket(
    context: typer.Context,
    role: Annotated[
        list[str] | None,
        typer.Option(metavar="ROLE", help="What its holder may be: worker, hub, coordinator; all by default."),
    ] = None,
    qr: Annotated[bool, typer.Option("--qr", help="Show it as a QR code.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """The invite that another machine passes to `up --join`. It is a secret of the swarm."""
    if qr and as_json:
        raise UsageError("--qr and --json exclude each other")
    text = node_file(context).ticket
    if role:
        text = cut_ticket(text, [each.strip() for item in role for each in item.split(",") if each.strip()])
    if as_json:
        print(json.dumps({"schema": "kvasir.ticket/1", "ticket": text}))
    else:
        print(qr_text(text) if qr else text)


def cut_ticket(text: str, roles: list[str]) -> str:
    """The ticket with less in it: its holder may work, and take these roles. Raises UsageError."""
    from kvasir_node.wire.swarm_keys import lesser_secret
    from kvasir_node.wire.ticket import Ticket, read_ticket, write_ticket

    found = read_ticket(text)
    return write_ticket(Ticket(lesser_secret(found.secret, roles), found.addresses))


def qr_text(text: str) -> str:
    """A QR code of half blocks. In capitals, which take two thirds of the room; a ticket may be read from them."""
    import segno
    from segno.encoder import DataOverflowError

    try:
        code = segno.make_qr(text.upper(), error="l")
    except DataOverflowError as error:
        raise UsageError("the ticket has too many addresses for a QR code; pass it as text") from error
    drawn = io.StringIO()
    code.terminal(out=drawn, border=2, compact=True)
    return drawn.getvalue().rstrip("\n")


def node_file(context: typer.Context) -> NodeFile:
    """What the running node left for commands; raises Unreachable when none runs."""
    from kvasir_node.surfaces.nodefile import read_node_file

    data_dir = data_dir_of(context.obj.settings())
    found = read_node_file(data_dir)
    if found is None:
        raise Unreachable(f"no node runs on the data directory {data_dir}; start one with `kvasir-node up`")
    return found
