"""`revoke` and its endpoint, on a node that does no work."""

from __future__ import annotations

import trio
from surfaces_helpers import serve
from test_http import fake

PEER = "12D3KooWLShEmUMRzomUQ2kA4V8Gxc42syLYf6L18Jqy6uoVkgCd"


async def test_a_peer_is_shut_out_and_let_in_again_and_peers_shows_it():
    async with serve(fake()) as served:
        post, get = served.client.post, served.client.get
        done = (await post("/kvasir/v1/revoke", json={"peer": PEER})).json()
        assert done == {"schema": "kvasir.revoked/1", "changed": True, "revoked": [PEER]}
        assert (await post("/kvasir/v1/revoke", json={"peer": PEER})).json()["changed"] is False
        assert (await get("/kvasir/v1/peers")).json()["revoked"] == [PEER]
        done = (await post("/kvasir/v1/revoke", json={"peer": PEER, "revoked": False})).json()
        assert (done["changed"], done["revoked"]) == (True, [])


async def test_what_is_no_request_is_refused_in_words():
    async with serve(fake()) as served:
        for body in ({}, {"peer": 1}, {"peer": PEER, "revoked": "yes"}, {"peer": PEER, "more": 1}, {"peer": "ann"}):
            refused = await served.client.post("/kvasir/v1/revoke", json=body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "peer"), body


async def test_the_verb_says_what_came_of_it(run):
    async with serve(fake()) as served:

        async def said(*words: str) -> tuple[int, str, str]:
            return await trio.to_thread.run_sync(lambda: run(*words, "--url", served.url))

        told = f"{PEER} is shut out; members hear of it when they are connected\n"
        assert await said("revoke", PEER) == (0, told, "")
        assert await said("revoke", PEER) == (0, f"{PEER}: nothing to change\n", "")
        assert f"shut out of the swarm: {PEER}" in (await said("peers"))[1]
        assert await said("revoke", PEER, "--undo") == (0, f"{PEER} may come in again\n", "")
        code, out, err = await said("revoke", "ann")
        assert (code, out) == (2, "")
        assert "a peer id is what" in err
