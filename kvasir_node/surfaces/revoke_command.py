"""The verb `revoke`: a peer is shut out of the whole swarm, or let in again. It does not know how all are told."""

from __future__ import annotations

from typing import Annotated

import typer

from kvasir_node.surfaces.command_parts import JsonFlag, UrlOption, client_of, print_answer

revoke_app = typer.Typer(rich_markup_mode=None)


@revoke_app.command()
def revoke(
    context: typer.Context,
    peer: Annotated[str, typer.Argument(metavar="PEER_ID", help="As `id` prints it there, or `peers --json` here.")],
    undo: Annotated[bool, typer.Option("--undo", help="Let it in again.")] = False,
    url: UrlOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Shut a peer out of the whole swarm; needs a node with the swarm's whole secret.

    It keeps out a machine's identity, and not who knows a ticket: he may come back as another peer. Against that
    there is `up --new-secret`.
    """
    with client_of(context, url) as client:
        document = client.post("/kvasir/v1/revoke", {"peer": peer, "revoked": not undo})
    state = "may come in again" if undo else "is shut out; members hear of it when they are connected"
    print_answer(document, f"{peer} {state}" if document["changed"] else f"{peer}: nothing to change", as_json=as_json)
