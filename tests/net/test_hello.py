import hmac
from contextlib import asynccontextmanager, suppress

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from kvasir_node.base.errors import Unreachable, UsageError
from kvasir_node.decide.rarely import INTERVAL_S
from kvasir_node.net import hello
from kvasir_node.net.hello import ABOUT_BYTES_MAX, HELLO_PROTOCOL, HELLO_TIMEOUT_S, MemberJoined, MemberLeft, Membership
from kvasir_node.net.memory_net import Link, open_memory_network

SECRET, WRONG = b"s" * 32, b"w" * 32
ECHO = "/test/echo/1"


async def echo(stream):
    while chunk := await stream.read():
        await stream.write(bytes(chunk))


@asynccontextmanager
async def two_members(left_secret=SECRET, right_secret=SECRET, *, left_about=b"left", right_about=b"right"):
    """Two peers with running memberships, not yet connected; yields (network, transports, memberships)."""
    async with open_memory_network(1) as network, trio.open_nursery() as nursery:
        network.set_link(None, None, Link(latency_s=0.01))
        left, right = network.transport("left"), network.transport("right")
        members = Membership(left, left_secret, left_about), Membership(right, right_secret, right_about)
        for transport, membership in zip((left, right), members, strict=True):
            transport.set_handler(ECHO, membership.guard(echo))
            nursery.start_soon(membership.run)
        yield network, (left, right), members
        nursery.cancel_scope.cancel()


async def test_both_become_members_and_know_what_the_other_says_about_itself(autojump_clock):
    async with two_members() as (_, (left, right), (of_left, of_right)):
        events = of_right.watch()
        await left.connect(right.addresses())
        await of_left.require(right.peer_id, 5)
        await of_right.require(left.peer_id, 5)
        assert of_left.is_member(right.peer_id)
        assert of_left.about(right.peer_id) == b"right"
        assert of_right.about(left.peer_id) == b"left"
        assert of_left.members() == (right.peer_id,)
        assert await events.receive() == MemberJoined(left.peer_id, b"left")
        for one, other in ((left, right), (right, left)):
            stream = await one.open_stream(other.peer_id, ECHO)
            await stream.write(b"in")
            assert bytes(await stream.read()) == b"in"


async def test_dialling_each_other_at_once_still_makes_members(autojump_clock):
    async with two_members() as (_, (left, right), (of_left, of_right)), trio.open_nursery() as nursery:
        nursery.start_soon(left.connect, right.addresses())
        nursery.start_soon(right.connect, left.addresses())
        await of_left.require(right.peer_id, 5)
        await of_right.require(left.peer_id, 5)


async def test_a_wrong_secret_is_refused_and_disconnected(autojump_clock):
    async with two_members(SECRET, WRONG) as (_, (left, right), (of_left, of_right)):
        await left.connect(right.addresses())
        with pytest.raises(Unreachable, match="does not hold this swarm's secret"):
            await of_left.require(right.peer_id, 5)
        await trio.sleep(1)
        assert left.connections() == right.connections() == ()
        assert not of_right.is_member(left.peer_id)


async def test_a_stranger_gets_no_stream_but_may_stay(autojump_clock):
    async with two_members() as (network, (_, right), (_, of_right)):
        stranger = network.transport("stranger")
        await stranger.connect(right.addresses())
        stream = await stranger.open_stream(right.peer_id, ECHO)
        with pytest.raises(Unreachable, match="reset"):
            await stream.read()
        await trio.sleep(60)
        assert stranger.connections()
        assert not of_right.is_member(stranger.peer_id)
        with pytest.raises(Unreachable, match="no proof within 1 s"):
            await of_right.require(stranger.peer_id, 1)
        with pytest.raises(Unreachable, match="not a member"):
            of_right.about(stranger.peer_id)


async def test_a_member_that_leaves_is_one_no_longer(autojump_clock):
    async with two_members() as (network, (left, right), (of_left, _)):
        events = of_left.watch()
        await left.connect(right.addresses())
        await of_left.require(right.peer_id, 5)
        network.kill(right.peer_id)
        assert isinstance(await events.receive(), MemberJoined)
        assert await events.receive() == MemberLeft(right.peer_id, "the peer closed the connection")
        assert not of_left.is_member(right.peer_id)
        assert of_left.members() == ()


async def test_a_peer_that_never_answers_is_given_up(autojump_clock):
    async def silent(stream):
        await trio.sleep_forever()

    async with two_members() as (network, (left, _), (of_left, _)):
        mute = network.transport("mute")
        mute.set_handler(HELLO_PROTOCOL, silent)
        await left.connect(mute.addresses())
        await trio.sleep(4 * HELLO_TIMEOUT_S)
        assert not of_left.is_member(mute.peer_id)
        assert of_left._challenging == set()


class Recorder:
    """A stranger between: opens hello streams by hand and keeps what the honest side sends."""

    def __init__(self, transport) -> None:
        self.transport = transport

    async def attempt(self, peer, first, rest):
        """Sends a first message, reads the answer, sends `rest(answer)`; returns (answer, verdict)."""
        stream = await self.transport.open_stream(peer, HELLO_PROTOCOL)
        await stream.write(first)
        answer = bytes(await stream.read())
        while answer[0] == 1 and len(answer) < 1 + 32 + 2 + len(b"right") + 32:
            answer += await stream.read()
        await stream.write(rest(answer))
        try:
            return answer, bytes(await stream.read())
        except Unreachable:
            return answer, None


def hello_of(transport, peer, secret=SECRET) -> bytes:
    """The first message of a peer that holds the secret."""
    ids = (transport.peer_id.encode(), peer.encode())
    return bytes(32) + b"\x01" + hello._hint(secret, bytes(32), ids)


async def everything_said(stream) -> bytes:
    said = b""
    with suppress(Unreachable):
        while chunk := await stream.read():
            said += bytes(chunk)
    return said


async def test_a_stranger_is_told_nothing_at_all(autojump_clock):
    """Nor is one that repeats what a member said: a hint is of one pair of peers."""
    async with two_members() as (network, (left, right), (_, of_right)):
        guessing = network.transport("guessing")
        for stranger, first in (
            (guessing, hello_of(guessing, right.peer_id, WRONG)),
            (network.transport("replaying"), hello_of(left, right.peer_id)),
            (network.transport("with none"), bytes(33)),
            (network.transport("with many"), bytes(32) + b"\xff" + bytes(16 * 255)),
        ):
            await stranger.connect(right.addresses())
            stream = await stranger.open_stream(right.peer_id, HELLO_PROTOCOL)
            await stream.write(first)
            assert await everything_said(stream) in (b"", b"\0")
            await trio.sleep(2)
            assert not stranger.connections()
            assert not of_right.is_member(stranger.peer_id)


async def test_a_replaced_secret_counts_until_its_time_is_over_and_then_ends_what_it_opened(autojump_clock):
    new, until_s = b"n" * 32, 100.0
    async with open_memory_network(1) as network, trio.open_nursery() as nursery:
        until_at = trio.current_time() + until_s

        def older():
            return [SECRET] if trio.current_time() < until_at else []

        both, only_old, only_new = (network.transport(name) for name in ("both", "old", "new"))
        members = {
            both: Membership(both, new, b"both", older=older),
            only_old: Membership(only_old, SECRET, b"old"),
            only_new: Membership(only_new, new, b"new"),
        }
        for membership in members.values():
            nursery.start_soon(membership.run)
        for dialler, listener in ((both, only_old), (only_new, both)):
            await dialler.connect(listener.addresses())
            await members[dialler].require(listener.peer_id, 5)
            await members[listener].require(dialler.peer_id, 5)
        await trio.sleep(until_s / 2)
        assert members[both].is_member(only_old.peer_id)
        await trio.sleep(until_s / 2 + hello.EXPIRY_CHECK_S)
        assert members[both].members() == (only_new.peer_id,)
        for dialler, listener in ((only_old, both), (both, only_old), (only_old, only_new)):
            await dialler.connect(listener.addresses())
            with pytest.raises(Unreachable, match="does not hold this swarm's secret"):
                await members[dialler].require(listener.peer_id, 5)
        nursery.cancel_scope.cancel()


async def test_a_peer_that_the_settings_refuse_is_told_so_and_is_no_member_either_way(autojump_clock):
    async with two_members() as (_, (left, right), (of_left, of_right)):
        of_right._refusal_of = lambda peer: "it is listed" if peer == left.peer_id else None
        await left.connect(right.addresses())
        with pytest.raises(Unreachable, match="refuses this peer"):
            await of_left.require(right.peer_id, 5)
        await trio.sleep(2)
        await right.connect(left.addresses())
        with pytest.raises(Unreachable, match="it is listed"):
            await of_right.require(left.peer_id, 5)
        assert not of_left.is_member(right.peer_id)


async def test_a_flood_of_strangers_fills_neither_memory_nor_the_log(autojump_clock, caplog):
    async with two_members() as (network, (left, right), (of_left, of_right)):
        await left.connect(right.addresses())
        await of_left.require(right.peer_id, 5)
        for number in range(hello.REFUSALS_MAX + 50):
            stranger = network.transport(f"stranger {number}")
            await stranger.connect(right.addresses())
            stream = await stranger.open_stream(right.peer_id, HELLO_PROTOCOL)
            await stream.write(bytes(32), b"\1", bytes(16))
            assert await stream.read() == b"\0"
            await stream.reset()
        await trio.sleep(2)
        assert len(of_right._refusals) == hello.REFUSALS_MAX
        assert len(of_right._proven) == len(of_right._by) == 1
        assert not of_right._answering
        warnings = [each for each in caplog.records if each.levelname == "WARNING" and "is refused" in each.message]
        assert len(warnings) <= 1 + trio.current_time() / INTERVAL_S
        assert of_right.is_member(left.peer_id)


async def test_reflected_replayed_and_guessed_proofs_are_refused(autojump_clock):
    proofs = {
        "reflected": lambda answer: answer[33:],
        "zero": lambda answer: b"\0\0" + bytes(32),
        "of another direction": lambda answer: b"\0\0" + hmac.digest(SECRET, answer, "sha256"),
    }
    for proof in proofs.values():
        async with two_members() as (network, (_, right), (_, of_right)):
            recorder = Recorder(network.transport("stranger"))
            await recorder.transport.connect(right.addresses())
            first = hello_of(recorder.transport, right.peer_id)  # as if it had a hint of the secret
            _, verdict = await recorder.attempt(right.peer_id, first, proof)
            assert verdict is None
            await trio.sleep(1)
            assert not of_right.is_member(recorder.transport.peer_id)
            assert recorder.transport.connections() == ()  # the side that detected it hung up


async def test_a_recorded_proof_is_worthless_the_second_time(autojump_clock):
    """The same peer id, the same first nonce, the recorded last message: the listener's nonce is fresh."""
    async with two_members() as (network, (left, right), (of_left, of_right)):
        sent = []
        honest_write = type(await _stream_of(network)).write

        class Tapped:
            def __init__(self, stream) -> None:
                self.stream, self.peer, self.protocol = stream, stream.peer, stream.protocol
                self.read, self.reset, self.close = stream.read, stream.reset, stream.close

            async def write(self, *parts: bytes):
                sent.append(b"".join(parts))
                await honest_write(self.stream, *parts)

        open_stream = left.open_stream

        async def tapped_open(peer, protocol):
            return Tapped(await open_stream(peer, protocol))

        left.open_stream = tapped_open
        await left.connect(right.addresses())
        await of_left.require(right.peer_id, 5)
        left.open_stream = open_stream
        nonce, proof = sent
        await left.disconnect(right.peer_id)
        of_left._connected = lambda peer, nursery: None  # the honest program stays out of it
        await trio.sleep(1)
        assert not of_right.is_member(left.peer_id)
        await left.connect(right.addresses())
        _, verdict = await Recorder(left).attempt(right.peer_id, nonce, lambda answer: proof)
        assert verdict is None
        assert not of_right.is_member(left.peer_id)


async def _stream_of(network):
    one, two = network.transport("one"), network.transport("two")
    two.set_handler(ECHO, echo)
    await one.connect(two.addresses())
    return await one.open_stream(two.peer_id, ECHO)


@given(st.lists(st.binary(max_size=6), min_size=4, max_size=4), st.lists(st.binary(max_size=6), min_size=4, max_size=4))
def test_different_transcripts_never_share_a_mac(first, second):
    macs = [hello._mac(SECRET, b"dialler", tuple(each[:3]), each[3]) for each in (first, second)]
    assert (macs[0] == macs[1]) == (first == second)


async def test_what_is_too_long_is_refused_at_once():
    async with open_memory_network() as network:
        transport = network.transport("left")
        with pytest.raises(UsageError, match="32 bytes"):
            Membership(transport, b"short", b"")
        with pytest.raises(UsageError, match="at most 4096"):
            Membership(transport, SECRET, bytes(ABOUT_BYTES_MAX + 1))


async def test_a_stranger_that_says_too_much_about_itself_is_refused(autojump_clock):
    async with two_members() as (network, (_, right), (_, of_right)):
        recorder = Recorder(network.transport("stranger"))
        await recorder.transport.connect(right.addresses())
        first = hello_of(recorder.transport, right.peer_id)
        _, verdict = await recorder.attempt(right.peer_id, first, lambda answer: b"\xff\xff")
        assert verdict is None
        assert not of_right.is_member(recorder.transport.peer_id)


async def test_who_was_refused_and_connects_again_is_not_told_the_old_refusal(autojump_clock):
    async with two_members(WRONG) as (_, (left, right), (of_left, _)):
        await left.connect(right.addresses())
        with pytest.raises(Unreachable, match="does not hold this swarm's secret"):
            await of_left.require(right.peer_id, 5)
        await trio.sleep(1)
        of_left._secret = SECRET
        await left.connect(right.addresses())
        await of_left.require(right.peer_id, 5)
