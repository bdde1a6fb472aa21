"""A buffered Noise session: the stock handshake, our own data path.

It does not know streams, peers' addresses or which protocols run on top. On the wire it is exactly libp2p's
"/noise" (specs/noise/README.md, "Wire format"): messages of a two-byte big-endian length and that many bytes of
ChaCha20-Poly1305, at most 65,519 bytes of plaintext each.

The stock session reads a two-byte length and then a body, sends each message alone, and holds a lock across both;
it spends 5 % of its time in the cipher. This one receives up to 256 KiB at once into a buffer that it keeps, decrypts
whatever is complete in it, and sends all messages of one write at once, without a copy of large payloads.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, cast

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from libp2p.abc import IRawConnection, ISecureConn
from libp2p.connection_types import ConnectionType
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.peer.id import ID
from libp2p.security.base_session import BaseSession
from libp2p.security.noise.transport import Transport as StockNoise
from libp2p.security.secure_session import SecureSession
from multiaddr import Multiaddr

from kvasir_node.base.errors import Misbehaved, RejectReason
from kvasir_node.net.raw_link import Buffer, RawLink, link_of, size_of

FIRST_RECEIVE_BYTES = 32 * 1024
RECEIVE_BYTES = 256 * 1024  # with one receive, once a connection has filled the first buffer
PLAINTEXT_BYTES_MAX = 65_535 - 16  # one message, without its authentication tag
_CIPHERTEXT_BYTES_MIN = 16
_NONCE = struct.Struct("<4xQ")  # Noise specification revision 34, section 12: 32 zero bits, then the counter
_MESSAGE_BYTES_MAX = 2 + 65_535
_DIRECT_BYTES = 32 * 1024  # a part this large is sealed where it lies; smaller ones are joined into one message


class BufferedConnection(IRawConnection):
    """A raw connection that receives much and hands out little; used during the handshake.

    Cancel-safety: a cancelled `read` loses nothing.
    """

    def __init__(self, raw: IRawConnection) -> None:
        self.raw = raw
        self.is_initiator = raw.is_initiator
        self._buffer = b""

    async def read(self, n: int | None = None) -> bytes:
        if not self._buffer:
            self._buffer = await self.raw.read(RECEIVE_BYTES)
        taken = self._buffer if n is None else self._buffer[:n]
        self._buffer = self._buffer[len(taken) :]
        return taken

    def take_buffered(self) -> bytes:
        """What was received and not read: after the handshake these are the first bytes of the session."""
        taken, self._buffer = self._buffer, b""
        return taken

    async def write(self, data: bytes) -> None:
        await self.raw.write(data)

    async def close(self) -> None:
        await self.raw.close()

    def get_remote_address(self) -> tuple[str, int] | None:
        return self.raw.get_remote_address()

    def get_transport_addresses(self) -> list[Multiaddr]:
        return self.raw.get_transport_addresses()

    def get_connection_type(self) -> ConnectionType:
        return self.raw.get_connection_type()


class NoiseSession(BaseSession):
    """Both directions of an established session.

    Cancel-safety: a cancelled read loses nothing. A cancelled write leaves the session unusable (a nonce is spent
    and its message cut), so one task alone writes, and it is cancelled only to end the connection.
    """

    def __init__(self, stock: SecureSession, connection: BufferedConnection) -> None:
        super().__init__(
            local_peer=stock.local_peer,
            local_private_key=stock.local_private_key,
            remote_peer=stock.remote_peer,
            remote_permanent_pubkey=stock.remote_permanent_pubkey,
            is_initiator=stock.is_initiator,
        )
        protocol = cast("Any", stock.conn).noise_state.noise_protocol
        sending, receiving = protocol.cipher_state_encrypt, protocol.cipher_state_decrypt
        self._connection = connection
        self._encrypt: ChaCha20Poly1305 = sending.cipher.cipher
        self._decrypt: ChaCha20Poly1305 = receiving.cipher.cipher
        self._send_nonce: int = sending.n
        self._receive_nonce: int = receiving.n
        self._link: RawLink = link_of(connection.raw)
        self._buffer = memoryview(bytearray(FIRST_RECEIVE_BYTES + _MESSAGE_BYTES_MAX))
        self._start = self._end = 0  # of what was received and not decrypted
        self._sends_now = self._link.sends_now
        self._keep(connection.take_buffered())
        self._plaintext: list[bytes] = []
        self._unsent: list[Buffer] = []  # sealed, and not taken by the connection
        self.bytes_in = 0
        self.bytes_out = 0

    def _keep(self, received: bytes) -> None:
        if len(received) > len(self._buffer):
            self._grow()
        self._buffer[self._end : self._end + len(received)] = received
        self._end += len(received)

    def _grow(self) -> None:
        """A connection that carries small messages keeps its small buffer: there may be hundreds of them."""
        larger = memoryview(bytearray(RECEIVE_BYTES + _MESSAGE_BYTES_MAX))
        larger[: self._end - self._start] = self._buffer[self._start : self._end]
        self._buffer, self._start, self._end = larger, 0, self._end - self._start

    async def read_chunks(self) -> list[bytes]:
        """Everything that one receive completes: one or more pieces of at most 65,519 bytes.

        Raises ConnectionClosedError at the end, Misbehaved when a message does not authenticate.
        """
        if self._plaintext:
            chunks, self._plaintext = self._plaintext, []
            return chunks
        while True:
            chunks = self._open_complete_messages()
            if chunks:
                return chunks
            count = await self._link.receive_into(self._buffer[self._end :])
            if not count:
                raise ConnectionClosedError("the peer closed the connection")
            self.bytes_in += count
            self._end += count
            if self._end == len(self._buffer) < RECEIVE_BYTES:
                self._grow()

    def _open_complete_messages(self) -> list[bytes]:
        data, position, received_end, chunks = self._buffer, self._start, self._end, []
        while received_end - position >= 2:
            end = position + 2 + ((data[position] << 8) | data[position + 1])
            if end > received_end:
                break
            chunk = self._open(data[position + 2 : end])
            if chunk:
                chunks.append(chunk)
            position = end
        self._advance_to(position)
        return chunks

    def _advance_to(self, position: int) -> None:
        """Forgets what lies before; the rest of a message moves to the front once the buffer's end is near."""
        rest = self._end - position
        if not rest:
            self._start = self._end = 0
        elif len(self._buffer) - self._end < _MESSAGE_BYTES_MAX:
            self._buffer[:rest] = self._buffer[position : self._end]
            self._start, self._end = 0, rest
        else:
            self._start = position

    def _open(self, message: memoryview) -> bytes:
        if len(message) < _CIPHERTEXT_BYTES_MIN:
            raise Misbehaved(RejectReason.BAD_FRAME, f"a noise message of {len(message)} bytes cannot hold its tag")
        try:
            chunk = self._decrypt.decrypt(_NONCE.pack(self._receive_nonce), message, None)
        except InvalidTag as error:
            text = f"noise message {self._receive_nonce} from {self.remote_peer} does not authenticate"
            raise Misbehaved(RejectReason.BAD_FRAME, text) from error
        self._receive_nonce += 1
        return chunk

    # --- writing ---

    @property
    def can_write_now(self) -> bool:
        """Whether `write_now` makes sense: the connection can take bytes without waiting, and none wait to be sent."""
        return self._sends_now and not self._unsent

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def write_now(self, parts: Sequence[Buffer]) -> None:
        """Seals all parts and sends what the connection takes at once; `flush` sends the rest. Never waits.

        Raises what the raw connection raises.
        """
        sealed = self._seal(parts)
        self.bytes_out += size_of(sealed)
        self._unsent = self._link.send_now(sealed)

    async def flush(self) -> None:
        """Sends what `write_now` left. Cancel-safety: none, like every write that waits."""
        await self._link.send_all(self._unsent)
        self._unsent = []

    async def write_parts(self, parts: Sequence[Buffer]) -> None:
        """Sends all parts in order. Raises what the raw connection raises."""
        sealed = self._seal(parts)
        self.bytes_out += size_of(sealed)
        await self._link.send_all(sealed)

    def _seal(self, parts: Sequence[Buffer]) -> list[Buffer]:
        """Noise messages, each as its length and its body. Small parts share messages, large ones are not copied."""
        sealed: list[Buffer] = []
        if sum([len(part) for part in parts]) <= _DIRECT_BYTES:
            self._seal_message(b"".join(parts), sealed)
            return sealed
        small: list[Buffer] = []
        small_bytes = 0
        for part in parts:
            size = len(part)
            if small and (size >= _DIRECT_BYTES or small_bytes + size > PLAINTEXT_BYTES_MAX):
                self._seal_message(small[0] if len(small) == 1 else b"".join(small), sealed)
                small, small_bytes = [], 0
            if size < _DIRECT_BYTES:
                small.append(part)
                small_bytes += size
            elif size <= PLAINTEXT_BYTES_MAX:
                self._seal_message(part, sealed)
            else:
                view = memoryview(part)
                for start in range(0, size, PLAINTEXT_BYTES_MAX):
                    self._seal_message(view[start : start + PLAINTEXT_BYTES_MAX], sealed)
        if small:
            self._seal_message(small[0] if len(small) == 1 else b"".join(small), sealed)
        return sealed

    def _seal_message(self, plaintext: Buffer, sealed: list[Buffer]) -> None:
        message = self._encrypt.encrypt(_NONCE.pack(self._send_nonce), plaintext, None)
        self._send_nonce += 1
        sealed.append(len(message).to_bytes(2, "big"))
        sealed.append(message)

    async def read(self, n: int | None = None) -> bytes:
        """1 to n bytes; the form that libp2p's protocol selection uses."""
        if not self._plaintext:
            self._plaintext = await self.read_chunks()
        first = self._plaintext[0]
        taken = first if n is None else first[:n]
        if len(taken) == len(first):
            del self._plaintext[0]
        else:
            self._plaintext[0] = first[len(taken) :]
        return taken

    async def write(self, data: bytes) -> None:
        if data:
            await self.write_parts((data,))

    async def close(self) -> None:
        await self._connection.close()

    def get_remote_address(self) -> tuple[str, int] | None:
        return self._connection.get_remote_address()

    def get_transport_addresses(self) -> list[Multiaddr]:
        return self._connection.get_transport_addresses()

    def get_connection_type(self) -> ConnectionType:
        return self._connection.get_connection_type()


class BufferedNoise(StockNoise):
    """libp2p's Noise transport with our session; give it to a host as `sec_opt={"/noise": ...}`."""

    async def secure_inbound(self, conn: IRawConnection) -> ISecureConn:
        buffered = BufferedConnection(conn)
        return _session(await super().secure_inbound(buffered), buffered)

    async def secure_outbound(self, conn: IRawConnection, peer_id: ID) -> ISecureConn:
        buffered = BufferedConnection(conn)
        return _session(await super().secure_outbound(buffered, peer_id), buffered)


def _session(stock: ISecureConn, buffered: BufferedConnection) -> NoiseSession:
    return NoiseSession(cast("SecureSession", stock), buffered)
