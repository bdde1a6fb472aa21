"""The command line: verbs, flags and exit codes. Data goes to stdout, words to stderr.

It does not know how a node works. Nothing heavy is imported before a verb needs it: `--help`, `--version`,
`status` and `id` must answer at once.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from kvasir_node import __version__
from kvasir_node.base.errors import Unreachable, UsageError
from kvasir_node.base.settings import Settings, data_dir_of, default_config_path, environment, load_settings
from kvasir_node.surfaces.bench import bench_app
from kvasir_node.surfaces.exits import INTERRUPTED, exit_code_of, say
from kvasir_node.surfaces.library_commands import library_app
from kvasir_node.surfaces.sim_command import sim_app
from kvasir_node.surfaces.ticket_command import node_file, ticket_app

if TYPE_CHECKING:
    from kvasir_node.surfaces.client import NodeClient
    from kvasir_node.surfaces.ports import NodePort

UNHEALTHY = 4
MAX_TOKENS_OF_RUN = 256

app = typer.Typer(
    help="A peer-to-peer node that serves Mixture-of-Experts models larger than any of its machines.",
    no_args_is_help=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="Settings: where they are, and where each value comes from.", rich_markup_mode=None)
app.add_typer(config_app, name="config")
app.add_typer(bench_app, name="bench")
app.add_typer(library_app)
app.add_typer(sim_app)
app.add_typer(ticket_app)


@dataclass(frozen=True)
class Globals:
    """Flags that stand before or after any verb."""

    config: Path | None = None
    no_color: bool = False
    flags: dict[str, Any] = field(default_factory=dict)

    def settings(self, flags: dict[str, Any] | None = None) -> Settings:
        path = self.config or default_config_path()
        env = {k: v for k, v in environment().items() if k.startswith("KVASIR_")}
        return load_settings(flags={**self.flags, **(flags or {})}, env=env, file=path, file_required=bool(self.config))


def _option(metavar: str, help_: str) -> Any:
    return typer.Option(metavar=metavar, help=help_)


JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
UrlOption = Annotated[str | None, typer.Option("--url", help="A running node's API, such as http://127.0.0.1:9480.")]
ModelArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help="demo, an id or name from ls, or a path.")]


@app.callback(invoke_without_command=True)
def _globals(
    context: typer.Context,
    config: Annotated[Path | None, _option("PATH", "Settings file.")] = None,
    data_dir: Annotated[Path | None, _option("PATH", "Keys, models and blocks of this node.")] = None,
    log_level: Annotated[str | None, _option("LEVEL", "debug, info, warning or error.")] = None,
    log_format: Annotated[str | None, _option("FORMAT", "auto, console or json.")] = None,
    no_color: Annotated[bool, typer.Option("--no-color", help="No colours (NO_COLOR works too).")] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    flags = {"node.data_dir": data_dir and str(data_dir), "log.level": log_level, "log.format": log_format}
    context.obj = Globals(config, no_color, {key: value for key, value in flags.items() if value is not None})
    if version:
        print(f"kvasir-node {__version__}")
        raise typer.Exit()
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit()


@app.command()
def up(
    context: typer.Context,
    model: ModelArgument = None,
    role: Annotated[list[str] | None, _option("ROLE", "coordinator, hub, worker; repeatable or a comma list.")] = None,
    headless: Annotated[bool, typer.Option("--headless", help="No screen: one JSON line when ready.")] = False,
    join: Annotated[list[str] | None, _option("TICKET", "A ticket or multiaddr of a swarm; repeatable.")] = None,
    api: Annotated[str | None, _option("HOST:PORT", "Where the HTTP API listens; port 0 = any.")] = None,
    no_api: Annotated[bool, typer.Option("--no-api", help="Serve no HTTP API.")] = False,
    phone: Annotated[str | None, _option("HOST:PORT", "Serves the page for phones, and nothing else.")] = None,
    listen: Annotated[list[str] | None, _option("MULTIADDR", "Where peers are listened for; repeatable.")] = None,
    slots: Annotated[str | None, _option("N", "Answers computed at once.")] = None,
    queue: Annotated[str | None, _option("N", "Requests that may wait.")] = None,
    memory: Annotated[str | None, _option("SIZE", "For experts held as worker or coordinator, such as 2G.")] = None,
    device: Annotated[str | None, _option("DEVICE", "auto, cpu or cuda:N.")] = None,
    threads: Annotated[str | None, _option("N", "torch threads of each computing thread.")] = None,
    name: Annotated[str | None, _option("NAME", "Shown to other peers.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Any setting.")] = None,
    new_swarm: Annotated[bool, typer.Option("--new-swarm", help="Leave the swarm for a new one of its own.")] = False,
    new_secret: Annotated[
        bool, typer.Option("--new-secret", help="Replace the swarm's secret: old tickets end, by and by.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and print the settings; start nothing.")] = False,
) -> None:
    """Run a node: a live screen in a terminal, else headless."""
    if api is not None and no_api:
        raise UsageError("--api and --no-api exclude each other")
    if new_swarm and new_secret:
        raise UsageError("--new-swarm and --new-secret exclude each other: a new swarm has a secret of its own")
    renewal = "swarm" if new_swarm else "secret" if new_secret else "keep"
    flags = {
        "coordinator.model": model,
        "node.roles": ",".join(role) if role else None,
        "network.join": tuple(join) if join else None,
        "api.listen": "" if no_api else api,
        "phone.listen": phone,
        "network.listen": tuple(listen) if listen else None,
        "coordinator.slots": slots,
        "coordinator.queue": queue,
        "worker.memory_bytes": memory,
        "coordinator.memory_bytes": memory,
        "node.device": device,
        "node.threads": threads,
        "node.name": name,
    }
    given = {key: value for key, value in flags.items() if value is not None}
    given |= _assignments(set_ or [], given)
    settings = context.obj.settings(given)
    with _ending_at_once():
        from kvasir_node.surfaces.config_text import settings_document
        from kvasir_node.surfaces.preflight import check_settings

        check_settings(settings)
        if not dry_run:

            def recheck() -> None:
                check_settings(context.obj.settings(given))

            raise typer.Exit(_run_node(settings, renewal, recheck, headless=headless, no_color=context.obj.no_color))
        _print_json({"schema": "kvasir.dry_run/1", "settings": settings_document(settings)})


def _assignments(texts: Sequence[str], flags: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or "." not in key:
            raise UsageError(f"--set takes section.key=value; got {text!r}")
        if key in flags:
            raise UsageError(f"{key} is given by a flag and by --set; give it once")
        found[key] = value
    return found


def _run_node(settings: Settings, renewal: str, recheck: Callable[[], None], *, headless: bool, no_color: bool) -> int:
    from functools import partial

    import trio

    from kvasir_node.surfaces import log, screen
    from kvasir_node.surfaces.app import run_up

    shown = not headless and screen.can_show_screen(no_color)
    lines = log.pane()
    log.set_up_logging(settings.log, lines=lines if shown else None)
    if shown:
        say("starting; the screen opens when the node is ready")
    view = partial(screen.terminal_screen, no_color=no_color) if shown else None
    return trio.run(
        partial(run_up, partial(_open_node, renewal), settings, screen=view, log_lines=lines, recheck=recheck)
    )


def _open_node(renewal: str, settings: Settings) -> AbstractAsyncContextManager[NodePort]:
    """Imports torch and the rest only after a wrong flag or a port in use would have been told."""
    from kvasir_node.roles.node import open_node
    from kvasir_node.roles.swarm_key import Renewal

    return open_node(settings, renewal=Renewal(renewal))


@contextmanager
def _ending_at_once() -> Iterator[None]:
    """SIGINT and SIGTERM end the process at once, until run_up listens for them: nothing has been opened yet.

    An exception in the middle of an import would come out of some libraries as another one.
    """
    previous = {number: signal.signal(number, _end_at_once) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _end_at_once(number: int, frame: object) -> NoReturn:
    os._exit(INTERRUPTED if number == signal.SIGINT else 0)


@app.command()
def run(
    context: typer.Context,
    model: ModelArgument = None,
    prompt: Annotated[str | None, typer.Argument(metavar="PROMPT", help="Without it: a chat, or stdin.")] = None,
    url: UrlOption = None,
    max_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens of each answer at most; 0 = as many as the context holds.")
    ] = MAX_TOKENS_OF_RUN,
    temperature: Annotated[float | None, typer.Option(min=0, max=2, help="0 = always the likeliest token.")] = None,
    seed: Annotated[int | None, typer.Option(help="Repeats a sampled answer.")] = None,
) -> None:
    """One answer, or a chat, through a running node; starts a private one if none runs."""
    from kvasir_node.surfaces.talk import Conversation

    given = {"max_tokens": max_tokens or None, "temperature": temperature, "seed": seed}
    options = {key: value for key, value in given.items() if value is not None}
    with _node_for_run(context.obj.settings(), url, model) as (client, served):
        talk = Conversation(client, served, options)
        if prompt is not None:
            talk.ask(prompt, sys.stdout)
        elif sys.stdin.isatty():
            say("end with Ctrl-D")
            talk.chat(_typed_lines(), sys.stdout)
        else:
            talk.ask(sys.stdin.read(), sys.stdout)


def _typed_lines() -> Any:
    try:
        while True:
            yield input(">>> ")
    except EOFError:
        print()


@contextmanager
def _node_for_run(settings: Settings, url: str | None, model: str | None) -> Iterator[tuple[NodeClient, str | None]]:
    """A node, and the name to ask it by: of a private one, the only model that it has."""
    from kvasir_node.surfaces.client import NodeClient
    from kvasir_node.surfaces.talk import private_node

    client = _running_node(settings, url)
    if client is not None:
        with client:
            yield client, model
        return
    folder = _folder_for_run(data_dir_of(settings), model or settings.coordinator.model)
    say("no node runs here: starting a private one for this command")
    with private_node(folder) as private_url, NodeClient(private_url, settings.api.key) as client:
        yield client, None


def _running_node(settings: Settings, url: str | None) -> NodeClient | None:
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


def _folder_for_run(data_dir: Path, model: str) -> Path | None:
    """None = the embedded model; raises UsageError for a model that is not whole on this disk."""
    from kvasir_node.roles.known_models import locate_model
    from kvasir_node.store.catalog import DEMO

    folder = locate_model(data_dir, model)
    if folder is None and model != DEMO:
        raise UsageError(f"{model} is not on this disk; `kvasir-node up {model} --join TICKET` fetches it")
    return folder


@app.command()
def status(
    context: typer.Context,
    url: UrlOption = None,
    as_json: JsonFlag = False,
    check: Annotated[bool, typer.Option("--check", help="Exit 4 when the node is unhealthy or warns.")] = False,
) -> None:
    """This node, warnings first."""
    from kvasir_node.surfaces.reports import status_text

    with _client(context, url) as client:
        document = client.get("/kvasir/v1/status")
    _print_json(document) if as_json else print(status_text(document))
    serving = "coordinator" not in document.get("roles", ()) or document.get("model") is not None
    if check and (document.get("warnings") or not serving):
        raise typer.Exit(UNHEALTHY)


@app.command()
def peers(context: typer.Context, url: UrlOption = None, as_json: JsonFlag = False) -> None:
    """The peers of this node, and how its workers do."""
    from kvasir_node.surfaces.reports import peers_text

    with _client(context, url) as client:
        document = client.get("/kvasir/v1/peers")
    _print_json(document) if as_json else print(peers_text(document))


@app.command()
def demand(context: typer.Context, url: UrlOption = None, as_json: JsonFlag = False) -> None:
    """Which slices of experts are wanted, as this node's hub sees it."""
    from kvasir_node.surfaces.reports import demand_text

    with _client(context, url) as client:
        document = client.get("/kvasir/v1/demand")
    _print_json(document) if as_json else print(demand_text(document))


@app.command()
def pause(context: typer.Context, url: UrlOption = None, as_json: JsonFlag = False) -> None:
    """This node's worker gives back what it holds, in good order, and takes nothing new until `resume`."""
    _tell_worker(context, url, "pause", as_json)


@app.command()
def resume(context: typer.Context, url: UrlOption = None, as_json: JsonFlag = False) -> None:
    """This node's worker may work again, as far as its settings allow."""
    _tell_worker(context, url, "resume", as_json)


def _tell_worker(context: typer.Context, url: str | None, verb: str, as_json: bool) -> None:
    with _client(context, url) as client:
        document = client.post(f"/kvasir/v1/{verb}")
    worker = document["worker"]
    why = f": {worker['reason']}" if worker["reason"] else ""
    _print_json(document) if as_json else print(f"{worker['state']}{why}")


@app.command()
def doctor(context: typer.Context, url: UrlOption = None, as_json: JsonFlag = False) -> None:
    """What may be wrong here, and what to do about it: disk, memory, kernels, ports, clock, how others reach us."""
    from kvasir_node.surfaces.doctor import FAIL, doctor_document, doctor_text, examine

    settings = context.obj.settings()
    client = _running_node(settings, url)
    if client is None:
        checks = examine(settings, None, None)
    else:
        with client:
            checks = examine(settings, client.get("/kvasir/v1/status"), client.get("/kvasir/v1/peers"))
    _print_json(doctor_document(checks)) if as_json else print(doctor_text(checks))
    if any(check.level == FAIL for check in checks):
        raise typer.Exit(UNHEALTHY)


@app.command("id")
def id_(context: typer.Context, as_json: JsonFlag = False) -> None:
    """This node's peer id, whether it runs or not."""
    from kvasir_node.surfaces.nodefile import KEY_NAME

    key = data_dir_of(context.obj.settings()) / KEY_NAME
    peer_id = _peer_id_of(key) if key.exists() else node_file(context).peer_id
    _print_json({"schema": "kvasir.id/1", "peer_id": peer_id}) if as_json else print(peer_id)


def _peer_id_of(key: Path) -> str:
    from kvasir_node.net.identity import load_or_create_key, peer_id_of

    return peer_id_of(load_or_create_key(key))


@config_app.command("path")
def config_path(context: typer.Context) -> None:
    """Where the settings file is."""
    print(context.obj.config or default_config_path())


@config_app.command("show")
def config_show(context: typer.Context, as_json: JsonFlag = False) -> None:
    """Every setting, with where its value comes from."""
    from kvasir_node.surfaces.config_text import settings_document, settings_text

    settings = context.obj.settings()
    if as_json:
        _print_json({"schema": "kvasir.config/1", "settings": settings_document(settings)})
    else:
        print(settings_text(settings), end="")


@config_app.command("init")
def config_init(context: typer.Context) -> None:
    """Write a settings file with every key commented out; never overwrites one."""
    from kvasir_node.surfaces.config_text import template_text

    path = context.obj.config or default_config_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "x", encoding="utf-8") as file:
            file.write(template_text())
    except FileExistsError as error:
        raise UsageError(f"{path} exists already; edit it, or remove it first") from error
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    print(path)


def _client(context: typer.Context, url: str | None) -> NodeClient:
    from kvasir_node.surfaces.client import NodeClient, node_url

    settings = context.obj.settings()
    return NodeClient(node_url(settings, url), settings.api.key)


def _print_json(document: dict[str, Any]) -> None:
    print(json.dumps(document, ensure_ascii=False))


_GLOBAL_VALUES = ("--config", "--data-dir", "--log-level", "--log-format")
_GLOBAL_FLAGS = ("--no-color",)


def hoisted(arguments: Sequence[str]) -> list[str]:
    """Moves global options in front of the verb, where click wants them; what follows `--` stays."""
    front: list[str] = []
    rest: list[str] = []
    queue = list(arguments)
    while queue:
        argument = queue.pop(0)
        if argument == "--":
            rest += [argument, *queue]
            break
        if argument in _GLOBAL_FLAGS or argument.startswith(tuple(f"{o}=" for o in _GLOBAL_VALUES)):
            front.append(argument)
        elif argument in _GLOBAL_VALUES:
            front += [argument, *queue[:1]]
            queue = queue[1:]
        else:
            rest.append(argument)
    return front + rest


def run_command(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit code; every failure is one line on stderr."""
    try:
        code = app(hoisted(arguments), standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except BaseException as error:
        return exit_code_of(error)


def main() -> NoReturn:
    """The whole program. Interrupts are KeyboardInterrupt from here on: `run` has a process to end."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that lacks a letter is no reason to fail
    sys.exit(run_command(sys.argv[1:]))


if __name__ == "__main__":
    main()
