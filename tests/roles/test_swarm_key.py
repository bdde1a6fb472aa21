"""Which swarm a node is in."""

from __future__ import annotations

import pytest

from kvasir_node.base.errors import DataError, UsageError
from kvasir_node.roles.swarm_key import FILE_NAME, read_swarm_key
from kvasir_node.wire.ticket import Ticket, write_ticket

PEER = "12D3KooWLShEmUMRzomUQ2kA4V8Gxc42syLYf6L18Jqy6uoVkgCd"
ADDRESS, OTHER = f"/ip4/192.0.2.1/tcp/1/p2p/{PEER}", f"/ip4/192.0.2.2/tcp/1/p2p/{PEER}"
A, B = b"a" * 32, b"b" * 32


def test_a_new_secret_is_made_once_and_kept_for_this_user_alone(tmp_path):
    first = read_swarm_key((), tmp_path)
    assert read_swarm_key((), tmp_path) == first
    assert (tmp_path / FILE_NAME).read_bytes() == first.secret
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]
    (tmp_path / "other").mkdir()
    assert read_swarm_key((), tmp_path / "other").secret != first.secret


def test_a_ticket_takes_a_node_into_its_swarm_for_good(tmp_path, caplog):
    read_swarm_key((), tmp_path)
    joined = read_swarm_key((write_ticket(Ticket(A, (ADDRESS, OTHER))), OTHER), tmp_path)
    assert joined.secret == A
    assert joined.join == (ADDRESS, OTHER)
    assert "leaves swarm" in caplog.text
    assert read_swarm_key((ADDRESS,), tmp_path).secret == A


def test_tickets_of_different_swarms_change_nothing(tmp_path):
    kept = read_swarm_key((), tmp_path)
    tickets = [write_ticket(Ticket(secret, ())) for secret in (A, B)]
    with pytest.raises(UsageError, match="different swarms"):
        read_swarm_key(tickets, tmp_path)
    with pytest.raises(UsageError, match="damaged"):
        read_swarm_key((tickets[0][:-3],), tmp_path)
    assert read_swarm_key((), tmp_path) == kept


@pytest.mark.parametrize("content", [b"", b"x", b"x" * 33])
def test_a_damaged_file_is_told_of_and_a_ticket_repairs_it(tmp_path, content):
    path = tmp_path / FILE_NAME
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"must hold 32 bytes, it has \d+; join with a ticket"):
        read_swarm_key((), tmp_path)
    assert path.read_bytes() == content
    assert read_swarm_key((write_ticket(Ticket(A, ())),), tmp_path).secret == A
    assert path.read_bytes() == A


def test_a_file_that_cannot_be_read_or_written_is_told_of(tmp_path):
    (tmp_path / FILE_NAME).mkdir()
    with pytest.raises(DataError, match="cannot be read"):
        read_swarm_key((), tmp_path)
    with pytest.raises(UsageError, match="cannot keep the swarm's key"):
        read_swarm_key((), tmp_path / "missing")
