"""A buffered Noise session: the stock handshake, our own data path.

It does not know streams, peers' addresses or which protocols run on top. On the wire it is exactly libp2p's
"/noise" (specs/noise/README.md, "Wire format"): messages of a two-byte big-endian length and that many bytes of
ChaCha20-Poly1305, at most 65,519 bytes of plaintext each.

The stock session reads a two-byte length and then a body, sends each message alone, and holds a lock across both;
it spends 5 % of its time in the cipher. This one takes up to 256 KiB with one receive, decrypts whatever is
complete in it, and sends all messages of one write at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

RECEIVE_BYTES = 256 * 1024
PLAINTEXT_BYTES_MAX = 65_535 - 16  # one message, without its authentication tag
_CIPHERTEXT_BYTES_MIN = 16

Buffer = bytes | bytearray | memoryview


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
        self._ciphertext = connection.take_buffered()
        self._plaintext: list[bytes] = []
        self.bytes_in = 0
        self.bytes_out = 0

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
            received = await self._connection.raw.read(RECEIVE_BYTES)
            if not received:
                raise ConnectionClosedError("the peer closed the connection")
            self.bytes_in += len(received)
            self._ciphertext = self._ciphertext + received if self._ciphertext else received

    def _open_complete_messages(self) -> list[bytes]:
        data, position, chunks = memoryview(self._ciphertext), 0, []
        while len(data) - position >= 2:
            end = position + 2 + ((data[position] << 8) | data[position + 1])
            if end > len(data):
                break
            chunks.append(self._open(data[position + 2 : end]))
            position = end
        if position:
            self._ciphertext = bytes(data[position:])
        return [chunk for chunk in chunks if chunk]

    def _open(self, message: memoryview) -> bytes:
        if len(message) < _CIPHERTEXT_BYTES_MIN:
            raise Misbehaved(RejectReason.BAD_FRAME, f"a noise message of {len(message)} bytes cannot hold its tag")
        try:
            chunk = self._decrypt.decrypt(_nonce(self._receive_nonce), message, None)
        except InvalidTag as error:
            text = f"noise message {self._receive_nonce} from {self.remote_peer} does not authenticate"
            raise Misbehaved(RejectReason.BAD_FRAME, text) from error
        self._receive_nonce += 1
        return chunk

    async def write_parts(self, parts: Sequence[Buffer]) -> None:
        """Sends all parts in order with one write to the connection. Raises what the raw connection raises."""
        sealed = b"".join(self._seal(parts[0] if len(parts) == 1 else b"".join(parts)))
        self.bytes_out += len(sealed)
        await self._connection.raw.write(sealed)

    def _seal(self, plaintext: Buffer) -> Iterator[bytes]:
        view = memoryview(plaintext)
        for start in range(0, len(view), PLAINTEXT_BYTES_MAX):
            message = self._encrypt.encrypt(_nonce(self._send_nonce), view[start : start + PLAINTEXT_BYTES_MAX], None)
            self._send_nonce += 1
            yield len(message).to_bytes(2, "big")
            yield message

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


def _nonce(counter: int) -> bytes:
    """Noise specification revision 34, section 12: 32 zero bits, then the counter, little-endian."""
    return b"\0\0\0\0" + counter.to_bytes(8, "little")
