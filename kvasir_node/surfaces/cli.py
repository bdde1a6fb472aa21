"""The command line: verbs, flags and exit codes. Data goes to stdout, words to stderr.

It does not know how a node works. Nothing heavy is imported before a verb needs it: `--help`, `--version`,
`status` and `id` must answer at once.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from kvasir_node import __version__
from kvasir_node.base.errors import UsageError
from kvasir_node.base.settings import Settings, data_dir_of, default_config_path, environment, load_settings
from kvasir_node.surfaces.bench import bench_app
from kvasir_node.surfaces.command_parts import JsonFlag, ModelArgument, SetOption, print_json
from kvasir_node.surfaces.completion import complete_log_format, complete_log_level, complete_role
from kvasir_node.surfaces.exits import INTERRUPTED, exit_code_of
from kvasir_node.surfaces.library_commands import library_app
from kvasir_node.surfaces.life_commands import life_app
from kvasir_node.surfaces.reading_commands import reading_app
from kvasir_node.surfaces.revoke_command import revoke_app
from kvasir_node.surfaces.run_command import run_app
from kvasir_node.surfaces.signals import handled
from kvasir_node.surfaces.sim_command import sim_app
from kvasir_node.surfaces.ticket_command import node_file, ticket_app
from kvasir_node.surfaces.top_command import top_app

if TYPE_CHECKING:
    from kvasir_node.surfaces.ports import NodePort

_ORDER = (  # of the verbs in the help: as they are met
    *("up", "run", "add", "pull", "ls", "rm", "verify"),
    *("status", "ps", "peers", "demand", "top", "doctor", "pause", "resume", "drain", "stop"),
    *("ticket", "revoke", "id", "config", "bench", "sim"),
)


class _Verbs(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        rank = {name: place for place, name in enumerate(_ORDER)}
        return sorted(super().list_commands(ctx), key=lambda name: rank.get(name, len(rank)))


app = typer.Typer(
    cls=_Verbs,
    help="A peer-to-peer node that serves Mixture-of-Experts models larger than any of its machines.",
    no_args_is_help=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="Settings: where they are, and where each value comes from.", rich_markup_mode=None)
app.add_typer(config_app, name="config")
app.add_typer(bench_app, name="bench")
app.add_typer(library_app)
app.add_typer(life_app)
app.add_typer(reading_app)
app.add_typer(revoke_app)
app.add_typer(run_app)
app.add_typer(sim_app)
app.add_typer(ticket_app)
app.add_typer(top_app)


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


@app.callback(invoke_without_command=True)
def _globals(
    context: typer.Context,
    config: Annotated[Path | None, _option("PATH", "Settings file.")] = None,
    data_dir: Annotated[Path | None, _option("PATH", "Keys, models and blocks of this node.")] = None,
    log_level: Annotated[
        str | None,
        typer.Option(
            metavar="LEVEL",
            help="debug, info, warning or error; of parts too: info,net=debug.",
            autocompletion=complete_log_level,
        ),
    ] = None,
    log_format: Annotated[
        str | None,
        typer.Option(metavar="FORMAT", help="auto, console or json.", autocompletion=complete_log_format),
    ] = None,
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
    role: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ROLE",
            help="coordinator, hub, worker; repeatable or a comma list.",
            autocompletion=complete_role,
        ),
    ] = None,
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
    set_: SetOption = None,
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
    with handled((signal.SIGINT, signal.SIGTERM), _end_at_once):
        from kvasir_node.surfaces.config_text import settings_document
        from kvasir_node.surfaces.preflight import check_settings

        check_settings(settings)
        if not dry_run:

            def recheck() -> None:
                check_settings(context.obj.settings(given))

            raise typer.Exit(_run_node(settings, renewal, recheck, headless=headless, no_color=context.obj.no_color))
        print_json({"schema": "kvasir.dry_run/1", "settings": settings_document(settings)})


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

    from kvasir_node.surfaces import log, screen, terminal
    from kvasir_node.surfaces.app import run_up
    from kvasir_node.surfaces.progress import waiting

    shown = not headless and terminal.can_show_screen(no_color)
    lines = log.pane()
    log.set_up_logging(settings.log, lines=lines if shown else None)
    with ExitStack() as starting:

        def view(node: NodePort, api: str | None, lines: deque[str]) -> AbstractAsyncContextManager[trio.Event]:
            starting.close()
            return screen.terminal_screen(node, api, lines, no_color=no_color)

        if shown:
            newest = partial(log.newest_message, lines, "starting; the screen opens when the node is ready")
            starting.enter_context(waiting(newest, no_color=no_color))
        run = partial(run_up, partial(_open_node, renewal), settings, log_lines=lines, recheck=recheck)
        return trio.run(partial(run, screen=view if shown else None))


def _open_node(renewal: str, settings: Settings) -> AbstractAsyncContextManager[NodePort]:
    """Imports torch and the rest only after a wrong flag or a port in use would have been told."""
    from kvasir_node.roles.node import open_node
    from kvasir_node.roles.swarm_key import Renewal

    return open_node(settings, renewal=Renewal(renewal))


def _end_at_once(number: int, frame: object) -> NoReturn:
    """On SIGINT or SIGTERM before run_up listens for them: nothing has been opened yet.

    An exception in the middle of an import would come out of some libraries as another one.
    """
    os._exit(INTERRUPTED if number == signal.SIGINT else 0)


@app.command("id")
def id_(context: typer.Context, as_json: JsonFlag = False) -> None:
    """This node's peer id, whether it runs or not."""
    from kvasir_node.surfaces.nodefile import KEY_NAME

    key = data_dir_of(context.obj.settings()) / KEY_NAME
    peer_id = _peer_id_of(key) if key.exists() else node_file(context).peer_id
    print_json({"schema": "kvasir.id/1", "peer_id": peer_id}) if as_json else print(peer_id)


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
        print_json({"schema": "kvasir.config/1", "settings": settings_document(settings)})
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
