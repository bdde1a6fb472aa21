"""node.json: written whole, private, and not believed when its process is gone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvasir_node.base.errors import UsageError
from kvasir_node.surfaces.nodefile import NodeFile, claimed, read_node_file, remove_node_file, write_node_file


def test_what_is_written_is_read_until_it_is_removed(tmp_path):
    found = NodeFile(os.getpid(), "http://127.0.0.1:1", "peer", "kvasir1x")
    write_node_file(tmp_path, found)
    assert read_node_file(tmp_path) == found
    assert [path.name for path in tmp_path.iterdir()] == ["node.json"]
    remove_node_file(tmp_path)
    assert read_node_file(tmp_path) is None


def test_a_dead_nodes_file_counts_as_absent_and_is_left_to_the_next(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    write_node_file(tmp_path, NodeFile(gone.pid, None, "peer", "kvasir1x"))
    assert read_node_file(tmp_path) is None
    remove_node_file(tmp_path)
    assert (tmp_path / "node.json").exists()


DAMAGED = [
    "",
    "{",
    "[]",
    "5",
    "[" * 100_000,
    '{"pid": 1}',
    '{"pid": -1, "api": null, "peer_id": "", "ticket": ""}',
    '{"pid": true, "api": null, "peer_id": "", "ticket": ""}',
    '{"pid": 1, "api": 5, "peer_id": "", "ticket": ""}',
    '{"pid": 1, "api": null, "peer_id": null, "ticket": ""}',
    '{"pid": 1, "api": null, "peer_id": "", "ticket": []}',
]


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_file_counts_as_absent(tmp_path, text):
    (tmp_path / "node.json").write_text(text)
    assert read_node_file(tmp_path) is None


def test_a_directory_is_claimed_by_one(tmp_path):
    with claimed(tmp_path / "new"), pytest.raises(UsageError, match="already runs"), claimed(tmp_path / "new"):
        pass
    with claimed(tmp_path / "new"):
        pass


def test_a_directory_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be used"), claimed(tmp_path / "file" / "x"):
        pass
