"""Which swarm a node is in."""

from __future__ import annotations

import pytest

from kvasir_node.base.errors import DataError, UsageError
from kvasir_node.roles.swarm_key import (
    FILE_NAME,
    OLD_FILE_NAME,
    Renewal,
    SwarmKey,
)
from kvasir_node.roles.swarm_key import read_swarm_key as read_key
from kvasir_node.wire.swarm_keys import lesser_secret, read_secret, replacing_secret, swarm_id
from kvasir_node.wire.ticket import Ticket, write_ticket

PEER = "12D3KooWLShEmUMRzomUQ2kA4V8Gxc42syLYf6L18Jqy6uoVkgCd"
ADDRESS, OTHER = f"/ip4/192.0.2.1/tcp/1/p2p/{PEER}", f"/ip4/192.0.2.2/tcp/1/p2p/{PEER}"
A, B = b"a" * 32, b"b" * 32
HOUR_S = 3600.0


def read_swarm_key(join, data_dir, **options: object) -> SwarmKey:
    return read_key(join, data_dir, **{"old_secret_s": HOUR_S, "wall": lambda: 1000.0, **options})


def ticket(secret: bytes, *addresses: str) -> str:
    return write_ticket(Ticket(secret, addresses))


def entries(key: SwarmKey, at: float) -> list[bytes]:
    return [keys.entry for keys in key.valid_keys(lambda: at)]


def entry(secret: bytes) -> bytes:
    return read_secret(secret).entry


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
    joined = read_swarm_key((ticket(A, ADDRESS, OTHER), OTHER), tmp_path)
    assert joined.secret == A
    assert joined.join == (ADDRESS, OTHER)
    assert "leaves swarm" in caplog.text
    assert entries(joined, 1001.0) == [entry(A)]
    assert read_swarm_key((ADDRESS,), tmp_path).secret == A


def test_tickets_of_different_swarms_change_nothing(tmp_path):
    kept = read_swarm_key((), tmp_path)
    tickets = [ticket(secret) for secret in (A, B, replacing_secret(A))]
    for other in tickets[1:]:
        with pytest.raises(UsageError, match="different swarms"):
            read_swarm_key((tickets[0], other), tmp_path)
    with pytest.raises(UsageError, match="damaged"):
        read_swarm_key((tickets[0][:-3],), tmp_path)
    assert read_swarm_key((), tmp_path) == kept


@pytest.mark.parametrize("content", [b"", b"x", b"x" * 33])
def test_a_damaged_file_is_told_of_and_a_ticket_repairs_it(tmp_path, content):
    path = tmp_path / FILE_NAME
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"is damaged: .* got \d+; join with a ticket"):
        read_swarm_key((), tmp_path)
    assert path.read_bytes() == content
    assert read_swarm_key((ticket(A),), tmp_path).secret == A
    assert path.read_bytes() == A


def test_a_file_that_cannot_be_read_or_written_is_told_of(tmp_path):
    (tmp_path / FILE_NAME).mkdir()
    with pytest.raises(DataError, match="cannot be read"):
        read_swarm_key((), tmp_path)
    with pytest.raises(UsageError, match="cannot keep the swarm's key"):
        read_swarm_key((), tmp_path / "missing")


# Roles ------------------------------------------------------------------------------------------------------------


def test_of_tickets_that_differ_in_their_roles_the_one_that_grants_most_counts_whichever_comes_first(tmp_path):
    worker, hub = lesser_secret(A, ["worker"]), lesser_secret(A, ["hub"])
    for number, (join, best) in enumerate([((worker, hub), hub), ((hub, worker), hub), ((worker, A, hub), A)]):
        (tmp_path / str(number)).mkdir()
        assert read_swarm_key([ticket(each) for each in join], tmp_path / str(number)).secret == best
    assert read_swarm_key((ticket(worker),), tmp_path / "0").secret == hub  # nor does a node forget what it may do


# Replacing the secret ---------------------------------------------------------------------------------------------


def test_the_old_secret_counts_for_its_time_and_no_longer_also_after_a_restart(tmp_path):
    read_swarm_key((ticket(A),), tmp_path)
    key = read_swarm_key((), tmp_path, renewal=Renewal.SECRET)
    assert swarm_id(key.secret) == swarm_id(A)
    for again in (key, read_swarm_key((), tmp_path)):
        assert entries(again, 1000.0 + HOUR_S - 1) == [entry(key.secret), entry(A)]
        assert entries(again, 1000.0 + HOUR_S) == [entry(key.secret)]
    assert (tmp_path / OLD_FILE_NAME).stat().st_mode & 0o777 == 0o600


def test_a_node_that_gets_the_new_ticket_keeps_the_old_secret_as_long(tmp_path):
    read_swarm_key((ticket(lesser_secret(A, ["hub"])),), tmp_path)
    new = replacing_secret(A)
    key = read_swarm_key((ticket(lesser_secret(new, [])),), tmp_path)
    assert entries(key, 1001.0) == [entry(new), entry(A)]
    assert [keys.roles for keys in key.valid_keys(lambda: 1001.0)] == [("worker",), ("hub", "worker")]
    once_more = read_swarm_key((ticket(lesser_secret(new, [])),), tmp_path, wall=lambda: 3000.0)
    assert entries(once_more, 1000.0 + HOUR_S) == [entry(new)]  # the time does not begin anew


def test_with_no_time_the_old_secret_is_worth_nothing_at_once(tmp_path):
    read_swarm_key((ticket(A),), tmp_path)
    key = read_swarm_key((), tmp_path, renewal=Renewal.SECRET, old_secret_s=0.0)
    assert entries(key, 1000.0) == [entry(key.secret)]


def test_a_new_swarm_has_nothing_of_the_old_one(tmp_path, caplog):
    read_swarm_key((ticket(A),), tmp_path)
    replaced = read_swarm_key((), tmp_path, renewal=Renewal.SECRET)
    fresh = read_swarm_key((), tmp_path, renewal=Renewal.SWARM)
    assert swarm_id(fresh.secret) != swarm_id(replaced.secret)
    assert entries(fresh, 1001.0) == [entry(fresh.secret)]
    assert not (tmp_path / OLD_FILE_NAME).exists()
    (tmp_path / FILE_NAME).write_bytes(b"damaged")
    assert read_swarm_key((), tmp_path, renewal=Renewal.SWARM).secret != fresh.secret


def test_what_cannot_be_renewed_is_refused_and_nothing_changes(tmp_path):
    with pytest.raises(UsageError, match="in no swarm yet"):
        read_swarm_key((), tmp_path, renewal=Renewal.SECRET)
    hub = lesser_secret(A, ["hub"])
    kept = read_swarm_key((ticket(hub),), tmp_path)
    with pytest.raises(UsageError, match="whole secret"):
        read_swarm_key((), tmp_path, renewal=Renewal.SECRET)
    for renewal in (Renewal.SECRET, Renewal.SWARM):
        with pytest.raises(UsageError, match="without --join TICKET"):
            read_swarm_key((ticket(A),), tmp_path, renewal=renewal)
    assert read_swarm_key((), tmp_path) == kept


def test_a_damaged_old_secret_is_none(tmp_path, caplog):
    read_swarm_key((ticket(A),), tmp_path)
    (tmp_path / OLD_FILE_NAME).write_bytes(b"x" * 20)
    assert entries(read_swarm_key((), tmp_path), 0.0) == [entry(A)]
    assert "strangers now" in caplog.text
