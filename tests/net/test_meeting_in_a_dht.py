"""Whole nodes that share nothing but the secret, and know a node each of a DHT that others run, find each other."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from dht_nodes import open_dht

from kvasir_node.base.settings import Settings, load_settings
from kvasir_node.roles.node import open_node
from kvasir_node.roles.rendezvous import meeting_key, told_addresses
from kvasir_node.wire.swarm_keys import lesser_secret, new_secret, read_secret, replacing_secret
from kvasir_node.wire.ticket import Ticket, read_ticket, write_ticket

FIND_S = 30.0


def settings_of(folder: Path, name: str, role: str, **network: str) -> Settings:
    flags = {"node.roles": role, "node.name": name, "node.data_dir": str(folder / name), "network.mdns": "off"}
    own = {f"network.{key}": value for key, value in {"listen": "/ip4/127.0.0.1/tcp/0", **network}.items()}
    return load_settings(flags=flags | own)


@pytest.mark.soak
async def test_a_node_with_the_secret_and_one_node_of_the_dht_finds_its_hub(tmp_path):
    async with open_dht(3) as dht, open_node(settings_of(tmp_path, "hub", "hub", dht=dht[0])) as hub:
        secret = read_ticket(hub.ticket()).secret
        secret_alone = write_ticket(Ticket(lesser_secret(secret, ["worker"]), ()))
        settings = settings_of(tmp_path, "ann", "worker", dht=dht[-1], join=secret_alone)
        began_at = trio.current_time()
        async with open_node(settings) as ann:
            with trio.fail_after(FIND_S):
                while [member.name for member in ann.snapshot().members] != ["hub"]:  # noqa: ASYNC110
                    await trio.sleep(0.1)
        print(f"found in {trio.current_time() - began_at:.1f} s")


def test_only_members_know_where_the_swarm_meets_and_all_of_them_do():
    root = new_secret()
    keys = {meeting_key(read_secret(each)) for each in (root, lesser_secret(root, ["worker"]), lesser_secret(root, []))}
    assert len(keys) == 1
    assert meeting_key(read_secret(replacing_secret(root))) not in keys
    assert read_secret(root).entry not in keys.pop()


def test_addresses_of_a_home_are_told_to_strangers_only_where_there_are_no_others():
    home, loop = "/ip4/192.168.1.2/tcp/1/p2p/x", "/ip4/127.0.0.1/tcp/1/p2p/x"
    outside, relayed = "/ip4/198.51.100.1/tcp/1/p2p/x", "/ip4/198.51.100.9/tcp/1/p2p/r/p2p-circuit/p2p/x"
    assert told_addresses([home, outside, relayed, "/ip4/198.51.100.1/tcp/1/ws/p2p/x", loop]) == (outside, relayed)
    assert told_addresses([home, loop]) == (home, loop)
