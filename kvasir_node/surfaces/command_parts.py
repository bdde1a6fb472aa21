"""What several verbs share: common flags, a client of the node that is meant, and how a document is printed.

It does not know any verb.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvasir_node.base.errors import Unreachable
from kvasir_node.base.settings import Settings
from kvasir_node.surfaces.completion import complete_model, complete_setting

if TYPE_CHECKING:
    from kvasir_node.surfaces.client import NodeClient

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
UrlOption = Annotated[
    str | None, typer.Option("--url", metavar="URL", help="A running node's API, such as http://127.0.0.1:9480.")
]
ModelArgument = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="demo, an id or name from ls, or a path.", autocompletion=complete_model),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="SECTION.KEY=VALUE", help="Any setting; repeatable.", autocompletion=complete_setting
    ),
]


def client_of(context: typer.Context, url: str | None) -> NodeClient:
    """The node at `url`, else that of the data directory; raises Unreachable when there is none."""
    from kvasir_node.surfaces.client import NodeClient, node_url

    settings = context.obj.settings()
    return NodeClient(node_url(settings, url), settings.api.key)


def print_json(document: dict[str, Any]) -> None:
    print(json.dumps(document, ensure_ascii=False))


def print_answer(document: dict[str, Any], lines: Iterable[str] | str, *, as_json: bool) -> None:
    """The document for programs, or `lines` for a person."""
    if as_json:
        print_json(document)
    else:
        print(lines if isinstance(lines, str) else "\n".join(lines))


def running_node(settings: Settings, url: str | None) -> NodeClient | None:
    """None when no node answers; with `url` that raises Unreachable."""
    from kvasir_node.surfaces.client import NodeClient, node_url

    try:
        client = NodeClient(node_url(settings, url), settings.api.key)
        client.get("/health")
    except Unreachable:
        if url is not None:
            raise
        return None
    return client
