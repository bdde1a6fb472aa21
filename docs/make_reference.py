"""Writes docs/reference/ from the code: commands, settings, HTTP paths, metrics, events, errors.

    python docs/make_reference.py

It knows no fact of its own but the titles: what stands in the pages is said in the code, once. A test makes the
pages anew and compares them with those in the folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, cast, get_args

import typer.main
from starlette.routing import Route

import kvasir_node
from kvasir_node.base import errors
from kvasir_node.base.errors import KvasirError, RejectReason
from kvasir_node.base.events import Happening
from kvasir_node.base.settings import LOG_PARTS, PROFILES, SECTIONS, Settings, setting_choices
from kvasir_node.surfaces import exits
from kvasir_node.surfaces.answers import ERROR_CODES, ERROR_TYPES
from kvasir_node.surfaces.cli import app
from kvasir_node.surfaces.config_text import field_meanings, toml_value
from kvasir_node.surfaces.fake_node import FakeNode
from kvasir_node.surfaces.http import build_app
from kvasir_node.surfaces.metrics import metrics_text
from kvasir_node.surfaces.phone_door import PhoneDoor
from kvasir_node.surfaces.phone_page import PhonePage

FOLDER = Path(__file__).parent / "reference"
MADE = "Made from the code by `docs/make_reference.py`; do not edit."
Row = tuple[str, ...]


def pages() -> dict[str, str]:
    """The text of each page, by its file's name."""
    return {
        "commands.md": _page("Commands", _commands()),
        "settings.md": _page("Settings", _settings()),
        "http.md": _page("HTTP paths", _paths()),
        "metrics.md": _page("Metrics", _metrics()),
        "events.md": _page("Events", _events()),
        "errors.md": _page("Errors", _errors()),
    }


def _page(title: str, lines: Iterable[str]) -> str:
    return "\n".join((f"# {title}", "", MADE, "", *lines)).rstrip() + "\n"


def _table(head: Row, rows: Iterable[Row]) -> Iterator[str]:
    for row in (head, ("---",) * len(head), *rows):
        yield "| " + " | ".join(cell.replace("\n", " ").replace("|", "\\|") for cell in row) + " |"
    yield ""


def _code(text: str) -> str:
    return f"`{text}`"


def _commands() -> Iterator[str]:
    root: Any = typer.main.get_command(app)
    context = root.context_class(root, info_name="kvasir-node")
    yield f"{root.help} What commands print with `--json`: [json.md](../json.md)."
    yield ""
    yield "Before or after any command:"
    yield ""
    yield from _table(("option", "meaning"), _parameters(root, context, "option"))
    yield from _verbs(root, context)


def _verbs(group: Any, context: Any) -> Iterator[str]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command.hidden:
            continue
        inner = command.context_class(command, info_name=name, parent=context)
        yield f"## `{inner.command_path}`"
        yield ""
        yield command.help or ""
        yield ""
        if hasattr(command, "list_commands"):
            yield from _verbs(command, inner)
            continue
        yield _code(" ".join(inner.get_usage().removeprefix("Usage: ").split()))
        yield ""
        for kind in ("argument", "option"):
            rows = list(_parameters(command, inner, kind))
            yield from _table((kind, "meaning"), rows) if rows else ()


def _parameters(command: Any, context: Any, kind: str) -> Iterator[Row]:
    for each in command.params:
        record = each.get_help_record(context) if each.param_type_name == kind else None
        if record is not None:
            yield _code(record[0].split(" <")[0]), record[1]


def _settings() -> Iterator[str]:
    yield "Strongest first: a flag, `KVASIR_SECTION__KEY` in the environment, the file, the profile, the default."
    yield "Set in the file (`kvasir-node config init` writes it), in the environment, or once by"
    yield '`--set section.key=value`. Sizes are bytes, or text such as "4G"; `_s` are seconds,'
    yield f"`_bytes_s` bytes a second. Parts of the program that `log.level` knows: {', '.join(map(_code, LOG_PARTS))}."
    yield ""
    meanings = field_meanings()
    for section in SECTIONS:
        part = getattr(Settings(), section)
        rows = []
        for each in fields(part):
            key = f"{section}.{each.name}"
            choices = setting_choices(key)
            allowed = " · ".join(map(_code, choices)) if choices else ""
            rows.append((_code(key), _code(toml_value(getattr(part, each.name))), meanings[key], allowed))
        yield f"## {section}"
        yield ""
        yield from _table(("setting", "default", "meaning", "values"), rows)
    yield "## Profiles"
    yield ""
    yield "`node.profile` sets other defaults; what is set elsewhere is stronger."
    yield ""
    rows = [
        (_code(name), _code(key), _code(str(value))) for name, part in PROFILES.items() for key, value in part.items()
    ]
    yield from _table(("profile", "setting", "default there"), rows)


class _NoLife:
    """Paths are listed, none is asked."""

    door = PhoneDoor(PhonePage(), None)

    def stop(self) -> None: ...

    def restart(self) -> None: ...


def _paths() -> Iterator[str]:
    yield "Bodies, answers and bounds: [api.md](../api.md) for what is ours, OpenAI's reference for the rest; the"
    yield "fields of documents: [json.md](../json.md). With `api.key` set, all but what says otherwise want"
    yield "`Authorization: Bearer KEY`."
    yield ""
    guard = cast("Any", build_app(FakeNode(), _NoLife()))
    rows = []
    for route in cast("list[Route]", guard._app.routes):
        methods = ", ".join(sorted((route.methods or set()) - {"HEAD"}))
        said = (route.endpoint.__doc__ or "").strip().splitlines()
        rows.append((_code(f"{methods} {route.path}"), said[0]))
    yield from _table(("path", "what it does"), rows)


def _metrics() -> Iterator[str]:
    yield "`GET /metrics`, Prometheus' text format 0.0.4. What the labels' values mean: [api.md](../api.md#metrics)."
    yield ""
    text = metrics_text(FakeNode().status, FakeNode().metrics())
    rows = []
    for name, meaning in re.findall(r"^# HELP (\S+) (.*)$", text, re.MULTILINE):
        kind = re.findall(rf"^# TYPE {name} (\w+)$", text, re.MULTILINE)[0]
        labels = re.findall(rf'^{name}{{(\w+)="([^"]+)"}}', text, re.MULTILINE)
        label = f"{_code(labels[0][0])}: {', '.join(_code(value) for _, value in labels)}" if labels else ""
        rows.append((_code(name), kind, meaning, label))
    yield from _table(("name", "kind", "meaning", "label"), rows)


def _events() -> Iterator[str]:
    yield "`GET /kvasir/v1/events` ([api.md](../api.md#events)); beside these fields each has `schema`, `id`, `at`,"
    yield "`type`, `level` and `words`."
    yield ""
    rows = []
    for kind in get_args(Happening):
        names = ", ".join(_code(each.name) for each in fields(kind))
        said = (kind.__doc__ or "") if not (kind.__doc__ or "").startswith(f"{kind.__name__}(") else ""
        rows.append((_code(kind.type), " ".join(said.split()), names))
    yield from _table(("type", "when", "fields"), rows)


def _errors() -> Iterator[str]:
    yield 'A failed request is answered with `{"error": {"message", "type", "param", "code"}}`, a failed command with'
    yield "one line on stderr. Kinds:"
    yield ""
    kinds = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, KvasirError)]
    rows = [
        (
            _code(kind.__name__),
            " ".join((kind.__doc__ or "").split()),
            str(kind.blame),
            "yes" if kind.retryable else "no",
            str(kind.http_status),
            str(kind.exit_code),
        )
        for kind in kinds
    ]
    yield from _table(("kind", "meaning", "whose to change", "may pass by itself", "HTTP", "exit code"), rows)
    yield from _error_codes()
    more = {
        exits.UNHEALTHY: "`status --check`: the node is not healthy",
        exits.RESTART: "asked to be restarted: start it again",
        exits.INTERRUPTED: "interrupted (Ctrl-C)",
    }
    yield "More exit codes:"
    yield ""
    yield from _table(("exit code", "meaning"), [(str(code), meaning) for code, meaning in more.items()])
    yield "Why something that a peer sent was refused (`kvasir_peer_rejections_total`):"
    yield ""
    yield ", ".join(_code(reason) for reason in RejectReason) + "."


def _error_codes() -> Iterator[str]:
    """Those of a status, and those that the sources name where they raise."""
    sources = (path.read_text() for path in sorted(Path(kvasir_node.__file__).parent.rglob("*.py")))
    named = sorted({code for source in sources for code in re.findall(r'\bcode="(\w+)"', source)})
    yield "`type` and `code` of answers, by status (no type: `invalid_request_error`, from 500 `server_error`):"
    yield ""
    by_status = [
        (str(status), _code(ERROR_TYPES[status]) if status in ERROR_TYPES else "", _code(code))
        for status, code in ERROR_CODES.items()
    ]
    yield from _table(("HTTP", "type", "code"), by_status)
    yield f"Other codes: {', '.join(map(_code, named))}."
    yield ""


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
