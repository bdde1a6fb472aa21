"""The verbs about what is on this disk: `add`, `ls`, `pull`, `rm`, `verify`.

It does not know how models are indexed, fetched or checked. Nothing heavy is imported before a verb needs it.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvasir_node.base.errors import DataError, KvasirError, Unreachable, UsageError
from kvasir_node.base.settings import Settings, data_dir_of
from kvasir_node.surfaces.command_parts import JsonFlag, print_json
from kvasir_node.surfaces.completion import complete_model
from kvasir_node.surfaces.progress import progress
from kvasir_node.surfaces.words import short_id, size_text

if TYPE_CHECKING:
    from kvasir_node.roles.upkeep import Verified
    from kvasir_node.surfaces.client import NodeClient

DEMO = "demo"
WIDE_CELLS = 120  # of a terminal that shows whole ids
library_app = typer.Typer(rich_markup_mode=None)
RefArgument = Annotated[str, typer.Argument(metavar="REF", help="A name or id from ls.", autocompletion=complete_model)]


@library_app.command()
def add(
    context: typer.Context,
    path: Annotated[Path, typer.Argument(metavar="PATH", exists=True, help="A Hugging Face checkpoint.")],
    name: Annotated[str | None, typer.Option(help="Its name here; the folder's by default.")] = None,
) -> None:
    """Index a checkpoint where it lies, and print its model id.

    Nothing is copied.
    """
    from kvasir_node.roles.library import open_library

    _, catalog = open_library(context.obj.settings())
    before = next((each for each in catalog.list() if each.path == path.absolute()), None)
    with progress(f"indexing {path.name}", no_color=context.obj.no_color) as advance:
        entry = catalog.add(path, name=name, progress=advance)
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
        print_json({"schema": "kvasir.models/1", "models": models, "blocks": blocks})
        return
    print("\n".join(_models_lines(models, shutil.get_terminal_size((WIDE_CELLS, 24)).columns)))


def _models_lines(models: Sequence[Mapping[str, Any]], width: int) -> Iterator[str]:
    """Ids are shown in full where there is room, as in a pipe."""
    id_of = (lambda text: text) if width >= WIDE_CELLS else short_id
    id_cells = max(len(id_of(model["id"] or "-")) for model in models)
    yield f"{'NAME':<24} {'SIZE':>9} {'ID':<{id_cells}} PLACE"
    for model in models:
        place = f"{model['path'] or '(blocks)'}{'  (missing)' if model['missing'] else ''}"
        yield f"{model['name']:<24} {size_text(model['bytes']):>9} {id_of(model['id'] or '-'):<{id_cells}} {place}"


@library_app.command()
def pull(
    context: typer.Context,
    ref: Annotated[str, typer.Argument(metavar="REF", help="A model's id, or hf:ORG/NAME[@REVISION].")],
) -> None:
    """Fetch a model through the running node, and print its id.

    A checkpoint of the Hugging Face hub (hf:...) needs no node.
    """
    settings, no_color = context.obj.settings(), context.obj.no_color
    fetch = _pull_from_hub if ref.startswith("hf:") else _pull
    print(fetch(settings, ref, no_color=no_color))


@library_app.command()
def rm(context: typer.Context, ref: RefArgument) -> None:
    """Forget a model, and free what was fetched of it.

    A checkpoint that was added stays where it is.
    """
    from kvasir_node.roles.library import models_dir, open_library
    from kvasir_node.roles.upkeep import remove

    settings = context.obj.settings()
    store, catalog = open_library(settings)
    entry = catalog.find(ref)
    _refuse_in_use(settings, ref if entry is None else entry.model)
    freed = remove(store, catalog, models_dir(settings), ref)
    print(f"{ref}: {size_text(freed)} freed", file=sys.stderr)


@library_app.command()
def verify(
    context: typer.Context,
    ref: Annotated[
        str | None,
        typer.Argument(metavar="REF", help="A name or id from ls; all without it.", autocompletion=complete_model),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Compare every byte here with its address.

    What is damaged is fetched again through a running node.
    """
    from kvasir_node.roles.library import models_dir, open_library
    from kvasir_node.roles.upkeep import verify as verify_library

    settings = context.obj.settings()
    store, catalog = open_library(settings)
    no_color = context.obj.no_color
    with progress("reading", no_color=no_color) as advance:
        found = verify_library(store, catalog, models_dir(settings), ref, advance)
    mended, left = _mend(settings, found, no_color=no_color)
    if as_json:
        print_json(_verified_document(found, mended))
    else:
        print(_verified_text(found, mended))
    if left:
        raise DataError("; ".join(left))


def _mend(settings: Settings, found: Verified, *, no_color: bool) -> tuple[list[str], list[str]]:
    """(ids of models that were fetched again, what is left to do in words)."""
    mended: list[str] = []
    left = [
        f"{entry.name} at {entry.path} is no longer what was added: put its files back, or add it again"
        for entry in found.to_add
    ]
    for model in found.to_fetch:
        try:
            mended.append(_pull(settings, model, no_color=no_color))
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
    lines = [f"{size_text(found.checked_bytes)} read"]
    lines += [f"damaged and deleted: block {cid}; it is fetched again when it is needed" for cid in found.dropped]
    lines += [f"damaged: {path}, {count} blocks" for path, count in found.damaged]
    lines += [f"fetched again: {model}" for model in mended]
    return "\n".join(lines if len(lines) > 1 else [f"{lines[0]}, all of it right"])


def _pull(settings: Settings, ref: str, *, no_color: bool) -> str:
    model = ""
    with _client(settings) as client, progress("fetching", no_color=no_color) as advance:
        for document in client.pull(ref):
            model = document.get("id", model)
            if document.get("total"):
                advance(document["done"], document["total"])
    if not model:
        raise Unreachable("the node ended before the model had come; what came is kept, so pull again")
    return model


def _pull_from_hub(settings: Settings, ref: str, *, no_color: bool) -> str:
    """A newer snapshot of a repository takes the name of the one before it."""
    from kvasir_node.roles.hugging_face import fetch_checkpoint, parse_hub_ref
    from kvasir_node.roles.library import open_library

    wanted = parse_hub_ref(ref)
    _, catalog = open_library(settings)
    with progress(f"fetching {wanted.name}", no_color=no_color) as advance:
        folder = fetch_checkpoint(wanted, advance)
    print(f"{ref} is at {folder}", file=sys.stderr)
    before = catalog.find(wanted.name)
    if before is not None and before.path is not None and before.path != folder and before.path.parent == folder.parent:
        catalog.remove(before.model)
    with progress(f"indexing {wanted.name}", no_color=no_color) as advance:
        return catalog.add(folder, name=wanted.name, progress=advance).model


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
