"""Settings as the text of a settings file: what `config show` prints and `config init` writes.

It does not know where settings come from; a secret's value is never written.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from kvasir_node.base.settings import FILE_VERSION, SECTIONS, Settings

SECRET_KEYS = frozenset({"api.key"})
_FIELD = re.compile(r"^    (\w+): .*?  # (.+)$", re.MULTILINE)


def settings_text(settings: Settings) -> str:
    """All values, each with its origin as a comment: itself a settings file that loads to the same values."""

    def line(key: str, name: str, value: Any) -> str:
        origin = settings.origins.get(key, "default")
        if key in SECRET_KEYS:
            return f"# {name} is {'set' if value else 'not set'} ({origin})"
        return f"{name} = {toml_value(value)}  # {origin}"

    return _file_text(settings, line)


def template_text() -> str:
    """Every key with its default and meaning, commented out: a file to edit that changes nothing as it stands."""
    meanings = field_meanings()

    def line(key: str, name: str, value: Any) -> str:
        return f"# {name} = {toml_value(value)}  # {meanings.get(key, '')}".removesuffix("  # ")

    return _file_text(Settings(), line)


def field_meanings() -> dict[str, str]:
    """The comments beside the fields in base/settings.py, so that there is one place for them.

    Nothing where the sources are not installed.
    """
    found: dict[str, str] = {}
    for section in SECTIONS:
        try:
            source = inspect.getsource(type(getattr(Settings(), section)))
        except OSError:
            return {}
        found |= {f"{section}.{name}": meaning for name, meaning in _FIELD.findall(source)}
    return found


def settings_document(settings: Settings) -> dict[str, Any]:
    """`{"section.key": {"value", "origin"}}`; of a secret only whether it is set."""
    document = {}
    for section, part in _sections(settings):
        for name, value in part.items():
            key = f"{section}.{name}"
            shown = bool(value) if key in SECRET_KEYS else value
            document[key] = {"value": shown, "origin": settings.origins.get(key, "default")}
    return document


def toml_value(value: Any) -> str:
    """TOML for the types that settings have."""
    if isinstance(value, tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    # JSON escapes all that TOML wants escaped but DEL, and writes numbers and booleans as TOML does
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _file_text(settings: Settings, line: Callable[[str, str, Any], str]) -> str:
    blocks = [f"version = {FILE_VERSION}\n"]
    for section, part in _sections(settings):
        lines = [f"[{section}]", *(line(f"{section}.{name}", name, value) for name, value in part.items())]
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


def _sections(settings: Settings) -> list[tuple[str, dict[str, Any]]]:
    parts = [(section, getattr(settings, section)) for section in SECTIONS]
    return [(section, {f.name: getattr(part, f.name) for f in fields(part)}) for section, part in parts]
