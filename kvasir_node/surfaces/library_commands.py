"""The verbs about what is on this disk: `add`, `ls`, `pull`, `rm`, `verify`.

It does not know how models are indexed, fetched or checked. Nothing heavy is imported before a verb needs it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvasir_node.base.errors import DataError, KvasirError, Unreachable, UsageError
from kvasir_node.base.settings import Settings, data_dir_of

if TYPE_CHECKING:
    from kvasir_node.roles.upkeep import Verified
    from kvasir_node.surfaces.client import NodeClient

DEMO = "demo"
library_app = typer.Typer(rich_markup_mode=None)
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
RefArgument = Annotated[str, typer.Argument(metavar="REF", help="A name or id from ls.")]


@library_app.command()
def add(
    context: typer.Context,
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A Hugging Face checkpoint.")],
    name: Annotated[str | None, typer.Option(help="Its name here; the folder's by default.")] = None,
) -> None:
    """Index a checkpoint where it lies, copying nothing, and print its model id."""
    from kvasir_node.roles.library import open_library

    _, catalog = open_library(context.obj.settings())
    before = next((each for each in catalog.list() if each.path == path.absolute()), None)
    with _Percent() as percent:
        entry = catalog.add(path, name=name, progress=percent)
    if before is not None and before.model != entry.model:
        print(f"replaces {before.name} {before.model}: another name or other files, another id", file=sys.stderr)
    print(entry.model)


@library_app.command()
def ls(context: typer.Context, as_json: JsonFlag = False) -> None:
    """The models on this machine, and those of which it has slices."""
    from kvasir_node.roles.library import demo_folder, open_library
    from kvasir_node.roles.upkeep import stored_models

    settings = context.obj.settings()
    store, catalog = open_library(settings)
    models: list[dict[str, Any]] = [
        {
            "id": each.model,
            "name": each.name,
            "path": str(each.path) if each.path else None,
            "bytes": each.nbytes,
            "missing": each.path is not None and not each.path.exists(),
        }
        for each in stored_models(store, catalog)
    ]
    if not any(model["name"] == DEMO for model in models):  # it gets its id when it is first used
        folder = demo_folder()
        nbytes = sum(file.stat().st_size for file in folder.glob("*") if file.is_file())
        models.insert(0, {"id": None, "name": DEMO, "path": str(folder), "bytes": nbytes, "missing": False})
    if as_json:
        own_bytes = sum(size for _, size in store.own())
        blocks = {"bytes": own_bytes, "quota_bytes": settings.store.quota_bytes}
        _print_json({"schema": "kvasir.models/1", "models": models, "blocks": blocks})
        return
    for model in models:
        where = f"{model['path'] or '(blocks)'}{'  (missing)' if model['missing'] else ''}"
        print(f"{model['name']:<24} {_size(model['bytes']):>9} {model['id'] or '-':<59} {where}")


@library_app.command()
def pull(
    context: typer.Context,
    ref: Annotated[str, typer.Argument(metavar="REF", help="A model's id, or hf:ORG/NAME[@REVISION].")],
) -> None:
    """Fetch a model by its id through the running node, or a checkpoint from the Hugging Face hub; print its id."""
    settings = context.obj.settings()
    print(_pull_from_hub(settings, ref) if ref.startswith("hf:") else _pull(settings, ref))


@library_app.command()
def rm(context: typer.Context, ref: RefArgument) -> None:
    """Forget a model and free the room of what was fetched of it; a checkpoint that was added stays where it is."""
    from kvasir_node.roles.library import models_dir, open_library
    from kvasir_node.roles.upkeep import remove

    settings = context.obj.settings()
    store, catalog = open_library(settings)
    entry = catalog.find(ref)
    _refuse_in_use(settings, ref if entry is None else entry.model)
    freed = remove(store, catalog, models_dir(settings), ref)
    print(f"{ref}: {_size(freed)} freed", file=sys.stderr)


@library_app.command()
def verify(
    context: typer.Context,
    ref: Annotated[str | None, typer.Argument(metavar="REF", help="A name or id from ls; all without it.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Read every byte and compare it with its address; what is damaged is fetched again through a running node."""
    from kvasir_node.roles.library import models_dir, open_library
    from kvasir_node.roles.upkeep import verify as verify_library

    settings = context.obj.settings()
    store, catalog = open_library(settings)
    with _Percent() as percent:
        found = verify_library(store, catalog, models_dir(settings), ref, percent)
    mended, left = _mend(settings, found)
    if as_json:
        _print_json(_verified_document(found, mended))
    else:
        print(_verified_text(found, mended))
    if left:
        raise DataError("; ".join(left))


def _mend(settings: Settings, found: Verified) -> tuple[list[str], list[str]]:
    """(ids of models that were fetched again, what is left to do in words)."""
    mended: list[str] = []
    left = [
        f"{entry.name} at {entry.path} is no longer what was added: put its files back, or add it again"
        for entry in found.to_add
    ]
    for model in found.to_fetch:
        try:
            mended.append(_pull(settings, model))
        except KvasirError as error:
            left.append(f"{model} is damaged and could not be fetched again: {error}")
    return mended, left


def _verified_document(found: Verified, mended: list[str]) -> dict[str, Any]:
    return {
        "schema": "kvasir.verify/1",
        "checked_bytes": found.checked_bytes,
        "dropped": list(found.dropped),
        "damaged": [{"path": str(path), "blocks": count} for path, count in found.damaged],
        "mended": mended,
    }


def _verified_text(found: Verified, mended: list[str]) -> str:
    lines = [f"{_size(found.checked_bytes)} read"]
    lines += [f"damaged and deleted: block {cid}; it is fetched again when it is needed" for cid in found.dropped]
    lines += [f"damaged: {path}, {count} blocks" for path, count in found.damaged]
    lines += [f"fetched again: {model}" for model in mended]
    return "\n".join(lines if len(lines) > 1 else [f"{lines[0]}, all of it right"])


def _pull(settings: Settings, ref: str) -> str:
    model = ""
    with _client(settings) as client, _Percent() as percent:
        for document in client.pull(ref):
            model = document.get("id", model)
            if document.get("total"):
                percent(document["done"], document["total"])
    if not model:
        raise Unreachable("the node ended before the model had come; what came is kept, so pull again")
    return model


def _pull_from_hub(settings: Settings, ref: str) -> str:
    """A newer snapshot of a repository takes the name of the one before it."""
    from kvasir_node.roles.hugging_face import fetch_checkpoint, parse_hub_ref
    from kvasir_node.roles.library import open_library

    wanted = parse_hub_ref(ref)
    _, catalog = open_library(settings)
    with _Percent() as percent:
        folder = fetch_checkpoint(wanted, percent)
    print(f"{ref} is at {folder}", file=sys.stderr)
    before = catalog.find(wanted.name)
    if before is not None and before.path is not None and before.path != folder and before.path.parent == folder.parent:
        catalog.remove(before.model)
    with _Percent() as percent:
        return catalog.add(folder, name=wanted.name, progress=percent).model


def _refuse_in_use(settings: Settings, model: str) -> None:
    """A running node computes with the files of its model."""
    from kvasir_node.surfaces.nodefile import read_node_file

    found = read_node_file(data_dir_of(settings))
    if found is None:
        return
    if found.api is not None:
        with _client(settings) as client:
            served = client.get("/kvasir/v1/status").get("model")
            if served is None or served.get("id") != model:
                return
    raise UsageError(f"{model} may be in use by the node that runs on this data directory; stop it first", param="ref")


def _client(settings: Settings) -> NodeClient:
    from kvasir_node.surfaces.client import NodeClient, node_url

    return NodeClient(node_url(settings, None), settings.api.key)


class _Percent:
    """Progress on a terminal's stderr; nothing elsewhere."""

    def __init__(self) -> None:
        self._shown: Callable[[str], None] | None = _write_stderr if sys.stderr.isatty() else None
        self._last = -1

    def __enter__(self) -> _Percent:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown is not None and self._last >= 0:
            self._shown("\n")

    def __call__(self, done: int, total: int) -> None:
        percent = 100 * done // max(total, 1)
        if self._shown is not None and percent != self._last:
            self._last = percent
            self._shown(f"\r{percent:3d} %")


def _write_stderr(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)


def _size(nbytes: int) -> str:
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << power:
            return f"{nbytes / (1 << power):.1f} {unit}"
    return f"{nbytes} B"


def _print_json(document: dict[str, Any]) -> None:
    print(json.dumps(document, ensure_ascii=False))
