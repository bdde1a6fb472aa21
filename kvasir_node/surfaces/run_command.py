"""The verb `run`: one answer or a chat, through a running node, or through a private one that ends with it.

It does not know how a chat goes (chat.py), nor how a private node is started (talk.py).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvasir_node.base.errors import UsageError
from kvasir_node.base.settings import Settings, data_dir_of
from kvasir_node.surfaces.command_parts import JsonFlag, ModelArgument, UrlOption, print_json, running_node
from kvasir_node.surfaces.exits import say

if TYPE_CHECKING:
    from kvasir_node.surfaces.client import NodeClient

MAX_TOKENS = 256

run_app = typer.Typer(rich_markup_mode=None)


@run_app.command()
def run(
    context: typer.Context,
    model: ModelArgument = None,
    prompt: Annotated[str | None, typer.Argument(metavar="PROMPT", help="Without it: a chat, or stdin.")] = None,
    url: UrlOption = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="What the model is told before all else.")] = None,
    max_tokens: Annotated[
        int, typer.Option(metavar="N", min=0, help="Tokens of each answer at most; 0 = as many as the context holds.")
    ] = MAX_TOKENS,
    temperature: Annotated[
        float | None, typer.Option(metavar="X", min=0, max=2, help="0 = always the likeliest token.")
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Repeats a sampled answer.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """One answer, or a chat.

    It goes through a running node; without one, a private one is started, and ended afterwards.
    """
    from kvasir_node.surfaces.talk import Conversation

    is_chat = prompt is None and sys.stdin.isatty()
    if is_chat and as_json:
        raise UsageError("--json prints one answer; give a PROMPT, or one on stdin")
    text = "" if is_chat else sys.stdin.read() if prompt is None else prompt
    if not is_chat and not text.strip():
        raise UsageError("the prompt is empty; give a PROMPT, or one on stdin")
    given = {"max_tokens": max_tokens or None, "temperature": temperature, "seed": seed}
    options = {key: value for key, value in given.items() if value is not None}
    settings = context.obj.settings()
    with _node_for_run(settings, url, model, no_color=context.obj.no_color) as (client, served):
        talk = Conversation(client, served, options, system=system or "")
        if is_chat:
            from kvasir_node.surfaces.chat import chat

            chat(talk, data_dir_of(settings))
            return
        if as_json:
            print_json(talk.ask(text).document())
        else:
            talk.ask(text, sys.stdout)


@contextmanager
def _node_for_run(
    settings: Settings, url: str | None, model: str | None, *, no_color: bool
) -> Iterator[tuple[NodeClient, str | None]]:
    """A node, and the name to ask it by: of a private one, the only model that it has."""
    from kvasir_node.surfaces.client import NodeClient
    from kvasir_node.surfaces.talk import private_node

    client = running_node(settings, url)
    if client is not None:
        with client:
            yield client, model
        return
    folder = _folder_for_run(data_dir_of(settings), model or settings.coordinator.model)
    say("no node runs here: starting a private one for this command")
    with private_node(folder, no_color=no_color) as private_url, NodeClient(private_url, settings.api.key) as client:
        yield client, None


def _folder_for_run(data_dir: Path, model: str) -> Path | None:
    """None = the embedded model; raises UsageError for a model that is not whole on this disk."""
    from kvasir_node.roles.known_models import locate_model
    from kvasir_node.store.catalog import DEMO

    folder = locate_model(data_dir, model)
    if folder is None and model != DEMO:
        raise UsageError(f"{model} is not on this disk; `kvasir-node up {model} --join TICKET` fetches it")
    return folder
