"""Tickets: the one line that lets a node join a swarm.

"kvasir1" before the line (wire/armour) of canonical CBOR {s: secret, a: addresses}. A ticket is a secret. It does not
know who may have one, nor what its secret lets its holder do (wire/swarm_keys).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvasir_node.base.errors import Misbehaved, UsageError
from kvasir_node.wire.armour import read_line, write_line
from kvasir_node.wire.codec import Fields, decode, encode
from kvasir_node.wire.readers import ADDRESSES_MAX, read_address
from kvasir_node.wire.swarm_keys import SECRET_BYTES_MAX, read_secret

PREFIX = "kvasir1"
_BYTES_MAX = 4096


@dataclass(frozen=True, slots=True)
class Ticket:
    """A swarm's secret, whole or for some roles, and addresses (with /p2p/PEER) where it can be joined."""

    secret: bytes
    addresses: tuple[str, ...]


def write_ticket(ticket: Ticket) -> str:
    return write_line(PREFIX, encode({"s": ticket.secret, "a": list(ticket.addresses[:ADDRESSES_MAX])}))


def read_ticket(text: str) -> Ticket:
    """Raises UsageError that says whether it is no ticket at all, or a damaged one."""
    text = _plain(text)
    if not text.startswith(PREFIX):
        raise UsageError(f"a ticket starts with {PREFIX}; got {text[:16]!r}")
    body = read_line(PREFIX, text, body_bytes_max=_BYTES_MAX)
    if body is None:
        raise UsageError("the ticket is damaged (mistyped or cut off); copy it whole from `kvasir-node ticket`")
    try:
        fields = Fields(decode(body, max_bytes=_BYTES_MAX, what="ticket"), "ticket")
        ticket = Ticket(fields.binary("s", SECRET_BYTES_MAX), fields.items("a", ADDRESSES_MAX, read_address))
        fields.end()
        read_secret(ticket.secret)
    except (Misbehaved, UsageError):
        text = "the ticket is of another version of kvasir-node; update this node, or the one it is from"
        raise UsageError(text) from None  # a message may show the secret
    return ticket


def is_ticket(text: str) -> bool:
    """Whether it means to be one."""
    return _plain(text).startswith(PREFIX)


def _plain(text: str) -> str:
    """All capitals are what a QR code holds."""
    text = text.strip()
    return text.lower() if text.isupper() else text
