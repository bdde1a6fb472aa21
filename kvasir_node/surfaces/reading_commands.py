"""The verbs that only read a running node: `status`, `peers`, `demand`, `ps`, `doctor`.

They do not know where a node's documents come from, nor how text for people is made of them (reports.py).
"""

from __future__ import annotations

from typing import Annotated

import typer

from kvasir_node.surfaces.command_parts import JsonFlag, UrlOption, client_of, print_answer, running_node
from kvasir_node.surfaces.exits import UNHEALTHY

reading_app = typer.Typer(rich_markup_mode=None)


@reading_app.command()
def status(
    context: typer.Context,
    url: UrlOption = None,
    as_json: JsonFlag = False,
    check: Annotated[bool, typer.Option("--check", help="Exit 4 when the node is unhealthy, as /health says.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="With --check: a warning counts as unhealthy too.")] = False,
) -> None:
    """This node, warnings first."""
    from kvasir_node.surfaces.health import health_of
    from kvasir_node.surfaces.reports import status_text

    with client_of(context, url) as client:
        document = client.get("/kvasir/v1/status")
    print_answer(document, status_text(document), as_json=as_json)
    health = health_of(
        roles=document["roles"], has_model=document["model"] is not None, is_draining=document["draining"]
    )
    if check and (health != "ok" or (strict and document["warnings"])):
        raise typer.Exit(UNHEALTHY)


@reading_app.command()
def peers(context: typer.Context, url: UrlOption = None, as_json: JsonFlag = False) -> None:
    """The peers of this node, and how its workers do."""
    from kvasir_node.surfaces.reports import peers_text

    with client_of(context, url) as client:
        document = client.get("/kvasir/v1/peers")
    print_answer(document, peers_text(document), as_json=as_json)


@reading_app.command()
def demand(context: typer.Context, url: UrlOption = None, as_json: JsonFlag = False) -> None:
    """The slices of experts that are wanted, as this hub sees it."""
    from kvasir_node.surfaces.reports import demand_text

    with client_of(context, url) as client:
        document = client.get("/kvasir/v1/demand")
    print_answer(document, demand_text(document), as_json=as_json)


@reading_app.command()
def ps(context: typer.Context, url: UrlOption = None, as_json: JsonFlag = False) -> None:
    """What is loaded here, and the requests under way."""
    from kvasir_node.surfaces.reports import loaded_document, ps_text

    with client_of(context, url) as client:
        document = loaded_document(client.get("/kvasir/v1/status"), client.get("/kvasir/v1/requests"))
    print_answer(document, ps_text(document), as_json=as_json)


@reading_app.command()
def doctor(context: typer.Context, url: UrlOption = None, as_json: JsonFlag = False) -> None:
    """What may be wrong here, and what to do about it."""
    from kvasir_node.surfaces.doctor import FAIL, doctor_document, doctor_text, examine

    settings = context.obj.settings()
    client = running_node(settings, url)
    if client is None:
        checks = examine(settings, None, None)
    else:
        with client:
            checks = examine(settings, client.get("/kvasir/v1/status"), client.get("/kvasir/v1/peers"))
    print_answer(doctor_document(checks), doctor_text(checks), as_json=as_json)
    if any(check.level == FAIL for check in checks):
        raise typer.Exit(UNHEALTHY)
