"""What a shell offers after Tab, where the words are ours: models, roles, settings and their values.

It does not know shells (typer does). Nothing here may fail or take long: no network, and no file but the catalog's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import typer

from kvasir_node.base.errors import KvasirError
from kvasir_node.base.settings import LOG_LEVELS, ROLES, data_dir_of, environment, load_settings, setting_choices
from kvasir_node.base.settings import setting_keys as all_keys

DEMO = "demo"


def complete_model(context: typer.Context, incomplete: str) -> list[str]:
    """Names of `ls`."""
    return _starting(_model_names(context), incomplete)


def complete_role(incomplete: str) -> list[str]:
    """Of a comma list, its last part."""
    before, comma, last = incomplete.rpartition(",")
    left = [role for role in ROLES if role not in before.split(",")]
    return [f"{before}{comma}{role}" for role in _starting(left, last)]


def complete_setting(incomplete: str) -> list[str]:
    """`section.key=`, and after it the values, where there are only some."""
    key, equals, value = incomplete.partition("=")
    if not equals:
        return [f"{each}=" for each in _starting(all_keys(), key)]
    return [f"{key}={choice}" for choice in _starting(setting_choices(key), value)]


def complete_log_level(incomplete: str) -> list[str]:
    return _starting(LOG_LEVELS, incomplete)


def complete_log_format(incomplete: str) -> list[str]:
    return _starting(setting_choices("log.format"), incomplete)


def _starting(words: Iterable[str], incomplete: str) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]


def _model_names(context: typer.Context) -> Sequence[str]:
    """The verb was not run, so its callback has left nothing: the data directory is read again from the words."""
    from kvasir_node.roles.known_models import known_names

    given = context.find_root().params.get("data_dir")
    try:
        env = {name: value for name, value in environment().items() if name.startswith("KVASIR_")}
        data_dir = Path(given) if given else data_dir_of(load_settings(env=env))
        return known_names(data_dir)
    except (KvasirError, OSError):
        return [DEMO]
