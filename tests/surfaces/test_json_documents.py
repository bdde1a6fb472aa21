"""Every document of a command is in docs/json.md, with the fields that are always there; and none is missing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_bench import FIGURES as NET_FIGURES
from test_bench_fanout_verb import FIGURES as FANOUT_FIGURES
from test_bench_model_verb import FIGURES as MODEL_FIGURES
from test_cli import SCRIPT

import kvasir_node
from kvasir_node.roles.bench_fetch import FetchFigures
from kvasir_node.surfaces.bench import fetch_document, model_document, net_document
from kvasir_node.surfaces.bench_fanout import fanout_document
from kvasir_node.surfaces.fake_node import fake_snapshot
from kvasir_node.surfaces.talk import Conversation
from kvasir_node.surfaces.views import health_document, revoked_document

ROOT = Path(kvasir_node.__file__).parent
LISTED = re.compile(r"^\| (.+?) \| `(kvasir\.[a-z._]+/\d)` \| (.+) \|$", re.MULTILINE)
SAID = re.compile(r'"(kvasir\.[a-z._]+/\d)"')
OF_OTHERS = {  # of the API (docs/api.md), and of a file
    *("kvasir.event/1", "kvasir.requests/1", "kvasir.experts/1"),
    "kvasir.folder/1",
}


def listed() -> dict[str, set[str]]:
    """The fields of each schema: what stands in backquotes, but for words in brackets."""
    rows = LISTED.findall((ROOT.parent / "docs" / "json.md").read_text())
    fields: dict[str, set[str]] = {}
    for _, schema, words in rows:
        fields.setdefault(schema, set()).update(re.findall(r"`([a-z0-9_]+)`", re.sub(r"\(.*?\)|as `.*", "", words)))
    return fields


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, Any]]]:
    """The data directory of a running fake node, and its ready line."""
    folder = str(tmp_path_factory.mktemp("node"))
    with subprocess.Popen([sys.executable, str(SCRIPT), folder], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield folder, json.loads(process.stdout.readline())
        process.terminate()


VERBS = "status|ps|peers|demand|pause|resume|doctor|ls|verify|run demo hello|ticket|ticket --phone|id|config show|drain"


def test_what_the_verbs_print_has_the_fields_of_the_list(run, node):
    folder, ready = node
    printed = {}
    for verb in VERBS.split("|"):
        code, out, err = run(*verb.split(), "--json", "--data-dir", folder)
        assert code in (0, 4), (verb, err)  # doctor may find something here
        printed[verb] = json.loads(out)
    printed["up"] = json.loads(run("up", "--dry-run", "--data-dir", folder)[1])
    for what, document in {**printed, "ready": ready, **made()}.items():
        assert listed()[document["schema"]] - {"headline"} <= set(document), what
    assert printed["doctor"]["checks"][0].keys() == {"name", "level", "says", "remedy"}
    assert printed["ls"]["models"][0].keys() >= {"id", "name", "path", "bytes", "missing"}
    assert printed["config show"]["settings"]["node.name"].keys() == {"value", "origin"}
    assert "headline" in printed["status"]


def made() -> dict[str, dict[str, Any]]:
    """Documents of commands that take long, of their figures in other tests."""
    return {
        "bench net": net_document(NET_FIGURES),
        "bench model": model_document(MODEL_FIGURES),
        "bench fanout": fanout_document(FANOUT_FIGURES, "x.png"),
        "bench fetch": fetch_document(FetchFigures({"http": 1.0}, {"http": [1.0]}, 64)),
        "health": health_document(fake_snapshot()),
        "revoke": revoked_document(fake_snapshot(), changed=True),
        "chat": Conversation(None).document(),  # type: ignore[arg-type]
    }


def test_no_document_is_missing_in_the_list():
    said = {schema for file in ROOT.rglob("*.py") for schema in SAID.findall(file.read_text())}
    assert said - OF_OTHERS == set(listed())
