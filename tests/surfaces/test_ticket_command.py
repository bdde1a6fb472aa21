"""`ticket`: cut to roles, and as a QR code."""

from __future__ import annotations

import os

import pytest

from kvasir_node.base.errors import UsageError
from kvasir_node.surfaces.nodefile import NodeFile, write_node_file
from kvasir_node.surfaces.qr import qr_text
from kvasir_node.surfaces.ticket_command import cut_ticket, parse_seconds
from kvasir_node.wire.swarm_keys import lesser_secret, read_secret
from kvasir_node.wire.ticket import Ticket, read_ticket, write_ticket

SECRET = bytes(range(32))
ADDRESS = "/ip4/192.0.2.1/tcp/9481/p2p/12D3KooWLShEmUMRzomUQ2kA4V8Gxc42syLYf6L18Jqy6uoVkgCd"
TICKET = write_ticket(Ticket(SECRET, (ADDRESS,)))


@pytest.fixture
def folder(tmp_path) -> str:
    """The data directory of a node that runs, as far as commands can tell."""
    write_node_file(tmp_path, NodeFile(os.getpid(), None, "12D3KooW", TICKET))
    return str(tmp_path)


def test_a_ticket_for_some_roles_is_printed(run, folder):
    assert run("ticket", "--data-dir", folder) == (0, TICKET + "\n", "")
    code, out, err = run("ticket", "--role", "worker", "--data-dir", folder)
    assert (code, err) == (0, "")
    found = read_ticket(out)
    assert read_secret(found.secret).roles == ("worker",)
    assert found.addresses == (ADDRESS,)
    for flags in (("--role", "hub,coordinator"), ("--role", "hub", "--role", "coordinator")):
        code, out, _ = run("ticket", *flags, "--data-dir", folder)
        assert read_secret(read_ticket(out).secret).roles == ("hub", "coordinator", "worker")
        assert not read_secret(read_ticket(out).secret).is_root


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--role", "emperor"), "there is no role 'emperor'"),
        (("--qr", "--json"), "exclude each other"),
        (("--phone", "--role", "worker"), "exclude each other"),
        (("--expires", "10m"), "goes with --phone"),
        (("--phone", "--expires", "soon"), "10m or 2h"),
    ],
)
def test_what_cannot_be_is_exit_2(run, folder, flags, named):
    code, out, err = run("ticket", *flags, "--data-dir", folder)
    assert (code, out) == (2, "")
    assert named in err


def test_a_cut_ticket_is_not_made_whole_again():
    worker = cut_ticket(TICKET, ["worker"])
    with pytest.raises(UsageError, match="does not let it be hub"):
        cut_ticket(worker, ["hub"])


def test_a_qr_code_is_drawn_and_fits_into_a_terminal(run, folder):
    code, out, err = run("ticket", "--qr", "--data-dir", folder)
    assert (code, err) == (0, "")
    lines = out.rstrip("\n").split("\n")
    assert "kvasir1" not in out
    assert 20 < len(lines) < 50
    worker = write_ticket(Ticket(lesser_secret(SECRET, []), (ADDRESS,) * 4))
    assert len(qr_text(worker.upper(), "ticket").split("\n")) < 60


def test_a_ticket_too_long_for_a_qr_code_says_so():
    with pytest.raises(UsageError, match="too many addresses"):
        qr_text("kvasir1" + "a" * 5000, "ticket")


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("1.5m", 90), ("2h", 7200)])
def test_times_are_read_with_their_unit(text, seconds):
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "10 m", "-5m", "1d", "1e3", "٣m", "9" * 20])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(UsageError, match="--expires is a time"):
        parse_seconds(text)


def test_a_phone_is_invited_by_the_running_node_or_told_why_not(run, folder):
    code, out, err = run("ticket", "--phone", "--data-dir", folder)
    assert (code, out) == (3, "")
    assert "serves no API" in err


@pytest.mark.parametrize("flags", [("--new-swarm", "--new-secret")])
def test_a_new_swarm_and_a_new_secret_exclude_each_other(run, flags):
    code, _, err = run("up", *flags, "--dry-run")
    assert code == 2
    assert "exclude each other" in err
