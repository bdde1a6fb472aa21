"""Checkpoints from a hub on localhost: what is fetched and what not, going on after a break, errors with a remedy."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hugging_face import COMMIT, REPO, FakeHub, serve_hub
from role_fakes import tiny_checkpoint

from kvasir_node.base.errors import CapacityError, DataError, KvasirError, NotFoundError, Unreachable, UsageError
from kvasir_node.base.settings import load_settings
from kvasir_node.model.checkpoint import INDEX_FILE, SINGLE_FILE, open_checkpoint
from kvasir_node.roles import hugging_face
from kvasir_node.roles.hugging_face import HubRef, fetch_checkpoint, parse_hub_ref
from kvasir_node.roles.library import demo_folder, open_library

TINY = HubRef(REPO, None)


@pytest.fixture
def folder(tmp_path) -> Path:
    """A repository of a model in two files, with much that no node should fetch."""
    folder = tiny_checkpoint(tmp_path / "tiny")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "modeling_tiny.py").write_text("raise SystemExit")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / "consolidated.safetensors").write_bytes(b"the same again")
    (folder / "original").mkdir()
    (folder / "original" / "model.safetensors").write_bytes(b"once more")
    return folder


@pytest.fixture
def hub(folder) -> Iterator[FakeHub]:
    with serve_hub(folder) as hub:
        yield hub


@pytest.fixture
def fetch(hub, tmp_path):
    def fetch_it(ref: HubRef = TINY, progress=lambda *_: None) -> Path:
        return fetch_checkpoint(ref, progress, endpoint=hub.url, cache_dir=tmp_path / "cache")

    return fetch_it


def in_two_files(folder: Path) -> None:
    """The weights and a second file, as the index says."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(folder / SINGLE_FILE, "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    (folder / SINGLE_FILE).unlink()
    weight_map = {key: f"model-0000{1 + ('layers.1' in key)}-of-00002.safetensors" for key in tensors}
    for name in set(weight_map.values()):
        save_file({key: tensors[key] for key in tensors if weight_map[key] == name}, folder / name, {"format": "pt"})
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_a_ref_names_a_repository_and_maybe_a_revision():
    assert parse_hub_ref("hf:org/tiny") == TINY
    assert parse_hub_ref("hf:org/tiny@v1.0") == HubRef("org/tiny", "v1.0")
    assert TINY.name == "tiny"
    for bad in ("hf:tiny", "hf:", "hf:/tiny", "hf:org/", "hf:a/b/c", "org/tiny", "hf:org"):
        with pytest.raises(UsageError, match="hf:ORG/NAME"):
            parse_hub_ref(bad)


def test_config_tokenizer_and_safetensors_are_fetched_and_nothing_else(hub, fetch, folder):
    seen: list[tuple[int, int]] = []
    path = fetch(progress=lambda *values: seen.append(values))
    assert path.name == COMMIT
    assert {file.name for file in path.iterdir()} == {"config.json", "tokenizer.json", SINGLE_FILE}
    assert open_checkpoint(path).experts.keys() == open_checkpoint(folder).experts.keys()
    total = sum(file.stat().st_size for file in path.iterdir())
    assert seen[-1] == (total, total)
    assert all(done <= total for done, _ in seen)
    served = dict(hub.served)
    assert fetch() == path
    assert hub.served == served


def test_of_a_model_in_several_files_those_that_its_index_names_are_fetched(hub, fetch, folder):
    in_two_files(folder)
    path = fetch()
    assert {file.name for file in path.iterdir() if file.suffix == ".safetensors"} == {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }
    assert open_checkpoint(path).experts.keys() == open_checkpoint(folder).experts.keys()


def test_a_fetch_that_broke_goes_on_where_it_was(hub, fetch, folder):
    in_two_files(folder)
    first, second = sorted(file.name for file in folder.glob("model-*"))
    hub.broken = {second}
    with pytest.raises(Unreachable, match=r"what came is kept, so check the network and pull again"):
        fetch()
    assert hub.served[first] == (folder / first).stat().st_size
    hub.broken = set()
    fetch()
    assert hub.served[first] == (folder / first).stat().st_size
    assert hub.served[second] == (folder / second).stat().st_size


@pytest.mark.parametrize(
    ("refusal", "kind", "words"),
    [
        ((403, "GatedRepo"), UsageError, r"is gated: accept its terms at http.*/org/tiny, and set HF_TOKEN"),
        ((401, "RepoNotFound"), NotFoundError, r"there is no http.*/org/tiny.* if it is private set HF_TOKEN"),
        ((404, "RevisionNotFound"), NotFoundError, "has no revision"),
        ((500, ""), Unreachable, "pull again"),
    ],
)
def test_a_hub_that_refuses_is_told_with_what_to_do(hub, fetch, refusal, kind, words):
    hub.refusal = refusal
    with pytest.raises(KvasirError, match=words) as raised:
        fetch()
    assert type(raised.value) is kind


def test_without_a_network_it_says_so(fetch, hub, monkeypatch):
    hub.url = "http://127.0.0.1:9"
    with pytest.raises(Unreachable, match=r"fetching http://127\.0\.0\.1:9/org/tiny"):
        fetch()


def test_a_name_that_no_repository_can_have_is_refused(fetch):
    with pytest.raises(UsageError, match="not the name of a repository"):
        fetch(HubRef("org/ti ny", None))


def changed(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def test_what_cannot_be_served_is_refused_before_its_weights_are_fetched(hub, fetch, folder):
    changed(folder, model_type="llama")
    with pytest.raises(DataError, match=r"org/tiny cannot be served: .*llama"):
        fetch()
    (folder / SINGLE_FILE).rename(folder / "weights.pt")
    with pytest.raises(DataError, match=r"has no safetensors \(pytorch_model\.bin, weights\.pt\)"):
        fetch()
    (folder / "config.json").unlink()
    with pytest.raises(DataError, match=r"has no config\.json"):
        fetch()
    assert not any(name.endswith((".safetensors", ".pt", ".bin")) for name in hub.served)


@pytest.mark.parametrize("name", ["../evil.safetensors", "pytorch_model.bin", "gone.safetensors"])
def test_an_index_names_safetensors_of_the_repository_alone(hub, fetch, folder, name):
    in_two_files(folder)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(DataError, match="not a safetensors file of the repository"):
        fetch()


def test_a_disk_that_is_too_small_is_told_before(hub, fetch, monkeypatch):
    monkeypatch.setattr(hugging_face, "DISK_SPARED_BYTES", 1 << 60)
    with pytest.raises(CapacityError, match=r"needs [0-9]+ more bytes in .* set HF_HOME"):
        fetch()
    assert SINGLE_FILE not in hub.served


def test_pull_survives_a_break_and_prints_the_id_of_a_model_that_can_be_served(tmp_path):
    folder = tmp_path / "demo"
    shutil.copytree(demo_folder(), folder)
    with serve_hub(folder) as hub:
        hub.cut_after = {SINGLE_FILE: 12 << 20}  # the library writes ten MiB at a time
        env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "kvasir_node", "--data-dir", str(tmp_path / "data"), "pull", f"hf:{REPO}"]
        pulled = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert pulled.returncode == 0, pulled.stderr
    assert hub.ranges == [(SINGLE_FILE, f"bytes={10 << 20}-")]
    _, catalog = open_library(load_settings(flags={"node.data_dir": str(tmp_path / "data")}))
    entry = catalog.find("tiny")
    assert entry is not None
    assert entry.model == pulled.stdout.strip()
    assert entry.path == tmp_path / "hf" / "hub" / "models--org--tiny" / "snapshots" / COMMIT
    assert str(entry.path) in pulled.stderr
    assert catalog.map_if_fresh(entry)
