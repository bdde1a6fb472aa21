"""The verb `ticket`: the running node's invite, cut to some roles or for one phone, as text or for a camera.

It does not know what a ticket's secret holds (wire/swarm_keys).
"""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from kvasir_node.base.errors import Unreachable, UsageError
from kvasir_node.base.settings import data_dir_of
from kvasir_node.surfaces.qr import qr_text

if TYPE_CHECKING:
    from kvasir_node.surfaces.nodefile import NodeFile

ticket_app = typer.Typer(rich_markup_mode=None)
_TIME = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)([smh]?)\Z", re.ASCII)
_UNIT_S = {"s": 1, "m": 60, "h": 3600}


@ticket_app.command()
def ticket(
    context: typer.Context,
    role: Annotated[
        list[str] | None,
        typer.Option(metavar="ROLE", help="What its holder may be: worker, hub, coordinator; all by default."),
    ] = None,
    phone: Annotated[bool, typer.Option("--phone", help="Instead: a link that lets one phone's browser join.")] = False,
    expires: Annotated[
        str | None, typer.Option(metavar="TIME", help="With --phone: how long it serves, such as 10m or 2h.")
    ] = None,
    qr: Annotated[bool, typer.Option("--qr", help="Show it as a QR code.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """The invite for `up --join` elsewhere: a secret of the swarm."""
    if qr and as_json:
        raise UsageError("--qr and --json exclude each other")
    if phone:
        if role:
            raise UsageError("--phone and --role exclude each other: a phone can only be a worker")
        invite_phone(context, expires, qr=qr, as_json=as_json)
        return
    if expires is not None:
        raise UsageError("--expires goes with --phone; a ticket lasts as long as the swarm's secret")
    text = node_file(context).ticket
    if role:
        text = cut_ticket(text, [each.strip() for item in role for each in item.split(",") if each.strip()])
    if as_json:
        print(json.dumps({"schema": "kvasir.ticket/1", "ticket": text}))
    else:
        print(qr_text(text.upper(), "ticket") if qr else text)  # a ticket may be read from capitals


def invite_phone(context: typer.Context, expires: str | None, *, qr: bool, as_json: bool) -> None:
    """Has the running node make a code, and prints the page's URL with it."""
    from kvasir_node.surfaces.client import NodeClient, node_url
    from kvasir_node.surfaces.invitation import invite_lines

    settings = context.obj.settings()
    body = {} if expires is None else {"expires_s": parse_seconds(expires)}
    with NodeClient(node_url(settings, None), settings.api.key) as client:
        document = client.post("/kvasir/v1/phone", body)
    for warning in document["warnings"]:
        print(f"warning: {warning}", file=sys.stderr)
    if as_json:
        print(json.dumps(document))
        return
    *shown, words = invite_lines(document, qr=qr)
    print("\n".join(shown))
    print(words, file=sys.stderr)


def parse_seconds(text: str) -> float:
    """Of "90", "90s", "10m" or "2h"; raises UsageError."""
    match = _TIME.match(text)
    if match is None:
        raise UsageError(f"--expires is a time such as 90s, 10m or 2h; got {text[:40]!r}")
    return float(match[1]) * _UNIT_S[match[2] or "s"]


def cut_ticket(text: str, roles: list[str]) -> str:
    """The ticket with less in it: its holder may work, and take these roles. Raises UsageError."""
    from kvasir_node.wire.swarm_keys import lesser_secret
    from kvasir_node.wire.ticket import Ticket, read_ticket, write_ticket

    found = read_ticket(text)
    return write_ticket(Ticket(lesser_secret(found.secret, roles), found.addresses))


def node_file(context: typer.Context) -> NodeFile:
    """What the running node left for commands; raises Unreachable when none runs."""
    from kvasir_node.surfaces.nodefile import is_claimed, read_node_file, why_none

    data_dir = data_dir_of(context.obj.settings())
    found = read_node_file(data_dir)
    if found is None:
        start = f"start one with `kvasir-node up --data-dir {data_dir}`"
        raise Unreachable(f"{why_none(data_dir)}; {'ask again once it is ready' if is_claimed(data_dir) else start}")
    return found
