"""`ls`, `verify`, `rm`, `pull`: what they print and how they end."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from surfaces_helpers import serve, settings_with
from test_cli import SCRIPT

from kvasir_node.base.errors import BugError, CapacityError, KvasirError, NotFoundError, UsageError
from kvasir_node.surfaces import cli
from kvasir_node.surfaces.answers import document_of_error
from kvasir_node.surfaces.client import NodeClient
from kvasir_node.surfaces.exits import exit_code_of
from kvasir_node.surfaces.fake_node import FAKE_CARD, FakeNode


@pytest.fixture
def running(tmp_path) -> Iterator[str]:
    folder = str(tmp_path / "running")
    with subprocess.Popen([sys.executable, str(SCRIPT), folder], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield folder
        process.terminate()


def test_ls_shows_sizes(run):
    code, out, _ = run("ls", "--json")
    document = json.loads(out)
    assert (code, document["schema"]) == (0, "kvasir.models/1")
    assert document["models"][0]["name"] == "demo"
    assert document["models"][0]["bytes"] > 1 << 20
    assert document["blocks"]["bytes"] == 0
    code, out, _ = run("ls")
    assert "MiB" in out


@pytest.fixture
def mine(tmp_path) -> Path:
    """A checkpoint outside of the data directory."""
    folder = tmp_path / "mine"
    demo = Path(cli.__file__).parents[1] / "demo"
    shutil.copytree(demo, folder)
    return folder


def test_ls_marks_a_model_whose_folder_is_gone(run, mine):
    assert run("add", str(mine))[0] == 0
    assert "missing" not in run("ls")[1]
    mine.rename(mine.with_name("elsewhere"))
    assert f"{mine}  (missing)" in run("ls")[1]
    models = json.loads(run("ls", "--json")[1])["models"]
    assert {model["name"]: model["missing"] for model in models} == {"demo": False, "mine": True}


def test_another_name_for_the_same_folder_says_that_the_id_changes(run, mine):
    code, first, err = run("add", str(mine))
    assert (code, err) == (0, "")
    assert run("add", str(mine)) == (0, first, "")
    code, second, err = run("add", str(mine), "--name", "yours")
    assert (code, err) == (0, f"replaces mine {first.strip()}: another name or other files, another id\n")
    assert second != first
    assert run("add", str(mine), "--name", "")[0] == 2
    code, out, err = run("add", str(mine) + "x")
    assert (code, out, f"'{mine}x' does not exist" in err) == (2, "", True)


@pytest.mark.parametrize("text", [None, "{}", "not json"])
def test_a_checkpoint_without_a_readable_tokenizer_is_not_added(run, mine, text):
    tokenizer = mine / "tokenizer.json"
    tokenizer.unlink() if text is None else tokenizer.write_text(text)
    code, out, err = run("add", str(mine))
    assert (code, out) == (5, "")
    assert "tokenizer.json" in err
    assert "mine" not in run("ls")[1]


def test_verify_reads_all_and_finds_an_edited_checkpoint(run, mine):
    assert run("add", str(mine))[0] == 0
    code, out, err = run("verify", "mine")
    assert (code, err) == (0, "")
    assert "all of it right" in out
    data = bytearray((mine / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (mine / "model.safetensors").write_bytes(data)
    code, out, err = run("verify", "--json")
    assert code == 5
    assert "add it again" in err
    assert [each["path"] for each in json.loads(out)["damaged"]] == [str(mine / "model.safetensors")]
    assert run("rm", "mine") == (0, "", "mine: 0 B freed\n")
    assert (mine / "model.safetensors").exists()


@pytest.mark.parametrize("verb", ["verify", "rm"])
def test_what_is_not_here_is_a_usage_error(run, verb):
    code, out, err = run(verb, "nothing")
    assert (code, out) == (2, "")
    assert "kvasir-node ls" in err


def test_what_the_running_node_serves_is_not_removed(run, running):
    code, _, err = run("rm", FAKE_CARD.id, "--data-dir", running)
    assert code == 2
    assert "stop it first" in err
    code, _, err = run("rm", "another", "--data-dir", running)
    assert "kvasir-node ls" in err


def test_pull_goes_through_the_running_node_and_prints_the_id(run, running):
    assert run("pull", "something", "--data-dir", running) == (0, f"{FAKE_CARD.id}\n", "")


def test_pull_without_a_node_says_how_to_start_one(run, monkeypatch):
    monkeypatch.setenv("KVASIR_API__LISTEN", "127.0.0.1:9")
    code, out, err = run("pull", "something")
    assert (code, out) == (3, "")
    assert "kvasir-node up" in err


async def test_the_apis_pull_tells_how_far_it_is_and_how_it_ended():
    for failure, last in ((None, {"id": FAKE_CARD.id}), (CapacityError("the disk is full"), None)):
        async with serve(FakeNode(settings_with(), failure=failure)) as api:
            client = api.client
            response = await client.post("/kvasir/v1/pull", json={"model": "x"})
            lines = [json.loads(line) for line in response.text.splitlines()]
            assert response.status_code == 200
            assert lines[0] == {"model": "x", "done": 0, "total": 0} or lines[0]["total"] == 100
            assert lines[-1] == last or lines[-1]["error"]["message"] == "the disk is full"
            assert lines[-1].get("status") == (None if failure is None else 503)
            for body in ({}, {"model": 3}, {"model": "x", "y": 1}):
                assert (await client.post("/kvasir/v1/pull", json=body)).status_code == 400


class _Ending(BaseHTTPRequestHandler):
    """A node whose pulls end as the server's `failure` says."""

    def do_POST(self) -> None:
        failure: KvasirError = self.server.failure  # type: ignore[attr-defined]
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({**document_of_error(failure), "status": failure.http_status}).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("failure", "kind", "code"),
    [
        (NotFoundError("no model 'x' here"), UsageError, 2),
        (CapacityError("full"), CapacityError, 6),
        (BugError("oops"), KvasirError, 1),
    ],
)
def test_what_a_pull_ended_with_keeps_its_kind_and_is_no_bug_of_the_client(failure, kind, code):
    with HTTPServer(("127.0.0.1", 0), _Ending) as server:
        server.failure = failure  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        with NodeClient(f"http://127.0.0.1:{server.server_port}") as client, pytest.raises(kind) as caught:
            list(client.pull("x"))
        thread.join()
    assert not isinstance(caught.value, BugError)
    assert exit_code_of(caught.value) == code
