"""What a newcomer does wrong, or the machine does to them: one line that helps, and never "this is a bug"."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_cli import SCRIPT

from kvasir_node.base.settings import load_settings
from kvasir_node.roles.known_models import locate_model
from kvasir_node.surfaces import cli
from kvasir_node.surfaces.client import node_url
from kvasir_node.surfaces.nodefile import claimed

DEMO_FOLDER = Path(cli.__file__).parents[1] / "demo"
PEER = "12D3KooWLShEmUMRzomUQ2kA4V8Gxc42syLYf6L18Jqy6uoVkgCd"


def program(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvasir_node", *arguments]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "timeout": 60, **options}
    return subprocess.run(command, text=True, check=False, **options)


@pytest.fixture
def elsewhere(tmp_path):
    """The address of a node that runs on another data directory."""
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), str(tmp_path / "elsewhere")], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["api"].removeprefix("http://")
        process.terminate()


# Another node never answers for the one that was asked ------------------------------------------------------------


@pytest.mark.parametrize("verb", [("status",), ("peers",), ("demand",), ("pull", "x")])
def test_a_named_data_directory_means_its_node_and_no_other(run, tmp_path, monkeypatch, elsewhere, verb):
    monkeypatch.setenv("KVASIR_API__LISTEN", elsewhere)
    code, out, err = run(*verb, "--data-dir", str(tmp_path / "mine"))
    assert (code, out) == (3, "")
    assert str(tmp_path / "mine") in err
    assert "--url" in err
    monkeypatch.setenv("KVASIR_NODE__DATA_DIR", str(tmp_path / "mine"))
    assert run(*verb)[0] == 3
    monkeypatch.delenv("KVASIR_NODE__DATA_DIR")
    assert run(*verb)[0] == 0  # the default directory's node is where a node listens


def test_a_node_without_an_api_is_not_taken_for_the_one_at_the_default_address(run, tmp_path):
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), str(tmp_path / "d"), "api.listen="], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        code, _, err = run("status", "--data-dir", str(tmp_path / "d"))
        process.terminate()
    assert code == 3
    assert "no API" in err


# Models that were added are known without a node --------------------------------------------------------------------


@pytest.fixture
def added(run, tmp_path) -> Path:
    """A data directory that knows a checkpoint by a name which is not its folder's."""
    (tmp_path / "folder").mkdir()
    for file in DEMO_FOLDER.iterdir():
        (tmp_path / "folder" / file.name).write_bytes(file.read_bytes())
    assert run("add", str(tmp_path / "folder"), "--name", "mine", "--data-dir", str(tmp_path / "lib"))[0] == 0
    return tmp_path / "lib"


def test_run_uses_a_model_that_was_added_while_no_node_runs(added):
    done = program("run", "mine", "It is", "--max-tokens", "3", "--data-dir", str(added))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert not (added / "node.key").exists()  # the private node keeps nothing


def test_a_model_is_located_by_name_id_and_path_without_hashing(added, tmp_path):
    folder = tmp_path / "folder"
    assert locate_model(added, "mine") == folder
    assert locate_model(added, str(folder)) == folder
    assert locate_model(tmp_path / "nothing", str(folder)) == folder
    assert locate_model(tmp_path / "nothing", "demo") is None
    assert not (tmp_path / "nothing").exists()


def test_an_unknown_model_is_told_with_those_that_are_known(run, added):
    for arguments in (("up", "nope", "--dry-run"), ("up", "nope"), ("run", "nope", "hi")):
        code, out, err = run(*arguments, "--data-dir", str(added))
        assert (code, out) == (2, "")
        assert "known: demo, mine;" in err


# The machine's faults ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "verb",
    [("ls",), ("add", str(DEMO_FOLDER)), ("rm", "x"), ("verify",), ("up",), ("up", "--dry-run"), ("run", "x", "y")],
)
@pytest.mark.parametrize("below", ["", "below"])
def test_a_data_directory_that_is_a_file_is_the_users_fault(run, tmp_path, verb, below):
    (tmp_path / "file").write_text("")
    code, out, err = run(*verb, "--data-dir", str(tmp_path / "file" / below))
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("verb", [("config", "show"), ("--version",), ("--help",), ("up", "--dry-run")])
def test_a_full_disk_under_stdout_is_one_line_and_no_bug(verb):
    with open("/dev/full", "w") as full:
        done = program(*verb, stdout=full)
    assert (done.returncode, done.stderr) == (1, "error: No space left on device\n")


def test_letters_that_the_terminal_lacks_are_shown_as_escapes(tmp_path):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "KVASIR_NODE__NAME": "Kvåsir"}
    done = program("config", "show", "--config", _empty_config(tmp_path), env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert r"Kv\xe5sir" in done.stdout


def _empty_config(tmp_path: Path) -> str:
    (tmp_path / "config.toml").write_text("version = 1\n")
    return str(tmp_path / "config.toml")


@pytest.mark.parametrize("verb", ["slots", "queue", "threads"])
def test_counts_beyond_any_machine_are_refused(run, verb):
    code, _, err = run("up", f"--{verb}", "999999999", "--dry-run")
    assert code == 2
    assert f".{verb} is at most" in err


# A dry run refuses what a start would ---------------------------------------------------------------------------------

REFUSED = [
    (("--api", "here"), "HOST:PORT"),
    (("--api", "127.0.0.1:99999"), "HOST:PORT"),
    (("--api", "0.0.0.0:9480"), "KVASIR_API__KEY"),
    (("--listen", "nonsense"), "multiaddr"),
    (("--listen", "/ip4/127.0.0.1/udp/1/quic-v1"), "/ip4/IP/tcp/PORT"),
    (("--listen", "/ip4/127.0.0.1/tcp/99999"), "multiaddr"),
    (("--join", "kvasir1abc"), "ticket is damaged"),
    (("--join", "here"), "--join takes a ticket"),
    (("--join", "/ip4/192.0.2.1/tcp/1"), "names no peer"),
    (("--device", "tpu"), "node.device"),
    (("nope",), "known: demo;"),
    (("./nope",), "no checkpoint folder"),
]


@pytest.mark.parametrize(("flags", "named"), REFUSED)
def test_up_and_its_dry_run_refuse_the_same_in_the_same_words(run, flags, named, tmp_path):
    dry = run("up", "--dry-run", *flags)
    assert run("up", *flags) == dry
    assert (dry[0], dry[1]) == (2, "")
    assert named in dry[2]
    assert not (tmp_path / "data").exists()


def test_a_dry_run_accepts_what_a_start_accepts(run):
    flags = ["--join", f"/ip4/192.0.2.1/tcp/1/p2p/{PEER}", "--listen", "/ip6/::1/tcp/0", "--api", "[::1]:0"]
    assert run("up", "--dry-run", *flags)[::2] == (0, "")
    assert run("up", "nope", "--role", "worker", "--dry-run")[0] == 0  # a worker needs no model


def test_node_url_prefers_the_url_that_was_given(tmp_path):
    settings = load_settings(flags={"node.data_dir": str(tmp_path)})
    assert node_url(settings, "127.0.0.1:1/") == "http://127.0.0.1:1"


@pytest.mark.parametrize("command", [["status"], ["ticket"], ["id"], ["stop"]])
@pytest.mark.parametrize("by_default", [True, False])
def test_a_node_that_is_just_starting_is_not_told_to_start(run, command, by_default, tmp_path):
    data_dir = tmp_path / "data" / "kvasir-node" if by_default else tmp_path / "d"
    where = () if by_default else ("--data-dir", str(data_dir))
    with claimed(data_dir):
        code, out, err = run(*command, *where)
    assert (code, out) == (3, "")
    assert f"a node is just starting on the data directory {data_dir}; " in err


# An interrupt before there is anything to end ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "number", "code"),
    [
        ("typer", signal.SIGINT, 130),
        ("trio", signal.SIGINT, 130),
        ("hypercorn", signal.SIGINT, 130),
        ("trio", signal.SIGTERM, 0),
        ("hypercorn", signal.SIGTERM, 0),
    ],
)
def test_a_signal_in_the_middle_of_the_imports_ends_it_without_a_traceback(tmp_path, module, number, code):
    """The signal comes while `module` is being imported, whatever the machine's speed."""
    script = (
        "import os, sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}: os.kill(os.getpid(), {int(number)})\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        f"sys.argv = ['kvasir-node', 'up', '--headless', '--data-dir', {str(tmp_path)!r}, '--api', '127.0.0.1:0']\n"
        "from kvasir_node.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_private_node_ends_with_its_command_and_a_terminals_interrupt_does_not_reach_it(number):
    command = [sys.executable, "-m", "kvasir_node", "run", "--max-tokens", "0", "demo", "It is a truth"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(5)  # it answers
        (node,) = psutil.Process(process.pid).children()
        assert os.getpgid(node.pid) != os.getpgid(process.pid)
        process.send_signal(number)
        process.communicate(timeout=40)
    assert process.returncode == 128 + number
    assert not psutil.pid_exists(node.pid)


def test_files_of_the_current_folder_are_not_run_by_a_private_node(tmp_path):
    (tmp_path / "json.py").write_text("raise SystemExit('the module of the current folder was imported')")
    script = Path(sys.executable).with_name("kvasir-node")  # as users start it, which leaves the folder out
    command = [script, "run", "--max-tokens", "1", "--data-dir", str(tmp_path / "data")]
    done = subprocess.run(
        command, cwd=tmp_path, input="It is", capture_output=True, text=True, timeout=100, check=False
    )
    assert "current folder" not in done.stderr
    assert (done.returncode, done.stdout != "") == (0, True), done.stderr
