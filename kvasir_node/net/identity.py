"""This peer's key, its signatures, and those of others.

It does not know connections. A peer id holds its ed25519 public key, so a signature is checked with nothing but
the id (libp2p/specs peer-ids/peer-ids.md, "Peer Ids", the identity multihash).
"""

from __future__ import annotations

import os
from pathlib import Path

from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.keys import KeyPair
from libp2p.identity_utils import load_identity
from libp2p.peer.id import ID

from kvasir_node.base.errors import UsageError
from kvasir_node.base.ids import PeerId

KEY_FILE_NAME = "node.key"  # in the data directory
_KEY_MODE = 0o600


def load_or_create_key(path: Path) -> KeyPair:
    """The key kept at `path` (libp2p's protobuf form, mode 0600), made on first use.

    Raises UsageError when the file is not a key, is open to others, or cannot be written.
    """
    try:
        _create_key(path)
    except FileExistsError:
        pass
    except OSError as error:
        raise UsageError(f"cannot keep this node's key at {path}: {error.strerror}; choose another data dir") from error
    return _load_key(path)


def _create_key(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        raise FileExistsError(path)
    # Written aside and linked into place: a crash or a second process never leaves half a key under the name.
    draft = path.with_name(f"{path.name}.{os.getpid()}.new")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _KEY_MODE)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(create_new_key_pair().private_key.serialize())
        os.link(draft, path)
    finally:
        draft.unlink()


def _load_key(path: Path) -> KeyPair:
    try:
        mode = path.stat().st_mode & 0o777
        key = load_identity(path)
    except (OSError, ValueError) as error:
        text = f"{path} is not a readable node key ({error}); restore it, or move it away to get a new identity"
        raise UsageError(text) from error
    if mode & 0o077:
        raise UsageError(f"{path} is open to other users (mode {mode:04o}); run: chmod 600 {path}")
    return key


def key_from_seed(seed: bytes) -> KeyPair:
    """A key that is always the same for the same 32 bytes."""
    return create_new_key_pair(seed)


def peer_id_of(key: KeyPair) -> PeerId:
    return PeerId(ID.from_pubkey(key.public_key).to_base58())


def sign_with(key: KeyPair, message: bytes) -> bytes:
    return key.private_key.sign(message)


def verify_signature(peer: PeerId, message: bytes, signature: bytes) -> bool:
    """Whether the peer signed the message; False for a peer id or a signature of any other shape, too."""
    try:
        public_key = ID.from_base58(str(peer)).extract_public_key()
        return public_key is not None and public_key.verify(message, signature)
    except Exception:  # libp2p raises whatever its parsers meet: base58, protobuf and nacl errors without a common base
        return False
