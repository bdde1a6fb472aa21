"""Who is let in, and what a node may be itself."""

from __future__ import annotations

import pytest

from kvasir_node.base.errors import UsageError
from kvasir_node.base.ids import PeerId
from kvasir_node.base.settings import NetworkSettings
from kvasir_node.roles.membership import check_peer_lists, granted_roles, refusal
from kvasir_node.wire.swarm_keys import lesser_secret, read_secret

PEER = "12D3KooWLShEmUMRzomUQ2kA4V8Gxc42syLYf6L18Jqy6uoVkgCd"
A = b"a" * 32


def test_a_node_takes_the_roles_that_its_ticket_grants():
    worker, hub, root = (read_secret(each) for each in (lesser_secret(A, []), lesser_secret(A, ["hub"]), A))
    every = ("coordinator", "hub", "worker")
    assert granted_roles(every, root, is_asked=False) == granted_roles(every, root, is_asked=True) == every
    assert granted_roles(every, hub, is_asked=False) == ("hub", "worker")
    assert granted_roles(("worker",), worker, is_asked=True) == ("worker",)
    with pytest.raises(UsageError, match=r"lets it be hub or worker, not coordinator; ask .* --role coordinator"):
        granted_roles(every, hub, is_asked=True)
    with pytest.raises(UsageError, match="lets it be worker, not hub"):
        granted_roles(("hub",), worker, is_asked=False)


def test_peers_are_let_in_by_the_lists_of_the_settings():
    peer = PeerId(PEER)
    assert refusal(NetworkSettings(), peer) is None
    assert refusal(NetworkSettings(allow=(PEER,)), peer) is None
    assert "network.refuse" in str(refusal(NetworkSettings(allow=(PEER,), refuse=(PEER,)), peer))
    assert "not listed in network.allow" in str(refusal(NetworkSettings(allow=("y",)), peer))


def test_a_list_of_what_is_no_peer_id_is_refused():
    check_peer_lists(NetworkSettings(allow=(PEER,), refuse=(PEER,)))
    with pytest.raises(UsageError, match=r"network\.allow lists peer ids"):
        check_peer_lists(NetworkSettings(allow=(PEER[:-1],)))
    with pytest.raises(UsageError, match=r"network\.refuse lists peer ids"):
        check_peer_lists(NetworkSettings(refuse=("ann",)))
