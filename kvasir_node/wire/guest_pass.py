"""How a web page becomes a guest of the swarm: the link that it is opened with, what it asks, and the pass it gets.

It does not know which codes are good (decide/pairing), nor how membership is proved (net/hello). docs/phone_protocol.md
is the specification, with an example in hex for each message.

A guest's key is a MAC by the swarm's entry key over the guest's peer id. So every member knows it without a list of
guests; who steals a pass cannot use it without the private key of that peer id; and a guest, who has no entry key, can
make no pass, and prove itself to nobody but members.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass

from kvasir_node.base.errors import Misbehaved, RejectReason, UsageError
from kvasir_node.base.ids import PeerId
from kvasir_node.decide.pairing import PairRefusal
from kvasir_node.wire.armour import read_line, write_line
from kvasir_node.wire.codec import Fields, decode, encode
from kvasir_node.wire.readers import NAME_CHARS_MAX, read_address, read_peer
from kvasir_node.wire.swarm_keys import COORDINATOR, HUB, KEY_BYTES, NAME_BYTES, SwarmKeys

PAIR_PROTOCOL = "/kvasir/pair/1.0.0"
LINK_PREFIX = "kvasirp1"
CODE_BYTES = 16
LINK_BYTES_MAX = 1024
ASK_BYTES_MAX = 512
ANSWER_BYTES_MAX = 4096
LINK_ADDRESSES_MAX = 4  # more would make the code for a camera too fine
PASS_ADDRESSES_MAX = 8


def guest_key(entry: bytes, peer: PeerId) -> bytes:
    """What this peer, and no other, proves its membership with instead of the entry key."""
    return hmac.digest(entry, b"kvasir-node/guest/1\0" + peer.encode("ascii"), "sha256")


@dataclass(frozen=True, slots=True)
class PairLink:
    """What stands behind # in the page's URL. The peer id tells the page that it talks to the right node."""

    code: bytes
    peer: PeerId
    addresses: tuple[str, ...]  # without /p2p, those that are dialled by a page (…/ws)

    def to_text(self) -> str:
        fields = {"c": self.code, "p": str(self.peer), "a": list(self.addresses[:LINK_ADDRESSES_MAX])}
        return write_line(LINK_PREFIX, encode(fields))

    @classmethod
    def from_text(cls, text: str) -> PairLink:
        """Raises UsageError, which does not show the code."""
        if not text.startswith(LINK_PREFIX):
            raise UsageError(f"a link for pairing starts with {LINK_PREFIX}; got {text[:16]!r}")
        body = read_line(LINK_PREFIX, text, body_bytes_max=LINK_BYTES_MAX)
        if body is None:
            raise UsageError("the link is damaged (mistyped or cut off); ask for a new one")
        try:
            fields = Fields(decode(body, max_bytes=LINK_BYTES_MAX, what="link"), "link")
            link = cls(
                _exactly(fields, "c", CODE_BYTES),
                read_peer(fields.text("p", 64)),
                fields.items("a", LINK_ADDRESSES_MAX, read_address),
            )
            fields.end()
        except Misbehaved:
            raise UsageError("the link is damaged, or of another version of kvasir-node; ask for a new one") from None
        return link


@dataclass(frozen=True, slots=True)
class PairAsk:
    """A page that has a code asks for a pass; `name` is shown to the node's owner."""

    code: bytes
    name: str

    def to_bytes(self) -> bytes:
        return encode({"code": self.code, "name": self.name[:NAME_CHARS_MAX]})

    @classmethod
    def from_bytes(cls, data: bytes) -> PairAsk:
        fields = Fields(decode(data, max_bytes=ASK_BYTES_MAX, what="ask"), "ask")
        ask = cls(_exactly(fields, "code", CODE_BYTES), fields.text("name", NAME_CHARS_MAX))
        fields.end()
        return ask


@dataclass(frozen=True, slots=True)
class GuestPass:
    """What a guest needs: its key, the keys by which it tells hubs and coordinators from others, and where hubs are."""

    swarm: bytes
    key: bytes
    hub: bytes
    coordinator: bytes
    addresses: tuple[str, ...]  # with /p2p, of hubs, the one that answers first if it is one

    def to_bytes(self) -> bytes:
        return encode(
            {
                "swarm": self.swarm,
                "key": self.key,
                "hub": self.hub,
                "coordinator": self.coordinator,
                "addrs": list(self.addresses[:PASS_ADDRESSES_MAX]),
            }
        )


def make_pass(keys: SwarmKeys, guest: PeerId, addresses: tuple[str, ...]) -> GuestPass:
    return GuestPass(keys.name, guest_key(keys.entry, guest), keys.public[HUB], keys.public[COORDINATOR], addresses)


def refusal_bytes(refusal: PairRefusal) -> bytes:
    return encode({"refused": str(refusal)})


def read_pair_answer(data: bytes) -> GuestPass | PairRefusal:
    fields = Fields(decode(data, max_bytes=ANSWER_BYTES_MAX, what="answer"), "answer")
    if fields.has("refused"):
        answer: GuestPass | PairRefusal = _read_refusal(fields.text("refused", 16))
    else:
        answer = GuestPass(
            _exactly(fields, "swarm", NAME_BYTES),
            _exactly(fields, "key", KEY_BYTES),
            _exactly(fields, "hub", KEY_BYTES),
            _exactly(fields, "coordinator", KEY_BYTES),
            fields.items("addrs", PASS_ADDRESSES_MAX, read_address),
        )
    fields.end()
    return answer


def _read_refusal(text: str) -> PairRefusal:
    try:
        return PairRefusal(text)
    except ValueError as error:
        raise Misbehaved(RejectReason.BAD_MESSAGE, f"a refusal that is none of ours: {text!r}") from error


def _exactly(fields: Fields, name: str, count: int) -> bytes:
    value = fields.binary(name, count)
    if len(value) != count:
        raise Misbehaved(RejectReason.BAD_MESSAGE, f"{name} must have {count} bytes; got {len(value)}")
    return value
