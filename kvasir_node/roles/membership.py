"""Who is let into this node, and what it may be itself: its ticket's roles, and its owner's lists of peers.

It does not know how membership is proved (net/hello), nor what any role does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import kvasir_node
from kvasir_node.base.errors import Misbehaved, UsageError
from kvasir_node.base.ids import PeerId
from kvasir_node.base.settings import NetworkSettings, Settings
from kvasir_node.net.hello import Membership
from kvasir_node.net.transport import Transport
from kvasir_node.roles.swarm_key import SwarmKey
from kvasir_node.wire.envelope import public_key_of
from kvasir_node.wire.messages import About
from kvasir_node.wire.swarm_keys import SwarmKeys, read_secret

logger = logging.getLogger(__name__)


def granted_roles(wanted: Sequence[str], keys: SwarmKeys, *, is_asked: bool) -> tuple[str, ...]:
    """The roles of a node that wants these: without those that its ticket does not grant, if nobody asked for them.

    Raises UsageError for one that was asked for, and where none is left.
    """
    missing = [role for role in wanted if role not in keys.roles]
    left = tuple(role for role in wanted if role in keys.roles)
    if missing and (is_asked or not left):
        may_be, lacks = " or ".join(keys.roles), " and ".join(missing)
        raise UsageError(
            f"the ticket of this node lets it be {may_be}, not {lacks}; ask for one with "
            f"`kvasir-node ticket --role {','.join(missing)}`, or start it with --role {keys.roles[0]}"
        )
    if missing:
        logger.info("this node is no %s, as its ticket does not let it", " and no ".join(missing))
    return left


def refusal(network: NetworkSettings, peer: PeerId) -> str | None:
    """Why the owner of this node lets a peer in under no secret; None = it may come in."""
    if peer in network.refuse:
        return f"{peer} is listed in network.refuse"
    if network.allow and peer not in network.allow:
        return f"{peer} is not listed in network.allow"
    return None


def check_peer_lists(network: NetworkSettings) -> None:
    """Raises UsageError for what is no peer id: a slip there would let in whom it should keep out."""
    for key, peers in (("network.allow", network.allow), ("network.refuse", network.refuse)):
        for peer in peers:
            try:
                public_key_of(PeerId(peer))
            except Misbehaved as error:
                raise UsageError(f"{key} lists peer ids, as `kvasir-node id` prints them; got {peer[:64]!r}") from error


def with_granted_roles(settings: Settings, swarm: SwarmKey) -> Settings:
    """The settings with the roles that this node has in this swarm; raises as `granted_roles`."""
    is_asked = settings.origins.get("node.roles", "default") != "default"
    roles = granted_roles(settings.node.roles, read_secret(swarm.secret), is_asked=is_asked)
    return replace(settings, node=replace(settings.node, roles=roles))


def open_membership(
    settings: Settings, transport: Transport, swarm: SwarmKey, name: str, revoked: Callable[[PeerId], str | None]
) -> Membership:
    """`revoked` tells why the swarm's owner shuts a peer out.

    The grants under a secret that is being replaced are told, too: who has only that one can read no others.
    """
    grants = [pair for keys in swarm.valid_keys() for pair in keys.grants(transport.peer_id).items()]
    about = About(name, kvasir_node.__version__, settings.node.roles, transport.addresses(), tuple(grants))
    return Membership(
        transport,
        read_secret(swarm.secret).entry,
        about.to_bytes(),
        older=lambda: [keys.entry for keys in swarm.valid_keys()[1:]],
        refusal_of=lambda peer: refusal(settings.network, peer) or revoked(peer),
    )
