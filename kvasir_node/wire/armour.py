"""Bytes as one line that a person may copy: a prefix that says what it is, base32, and a check against slips.

It does not know what the bytes mean. The letters are lower case and unpadded; after them come four bytes of the
bytes' sha2-256, so that a mistyped line is told from a wrong one.
"""

from __future__ import annotations

import base64
import hashlib

_CHECK_BYTES = 4


def write_line(prefix: str, body: bytes) -> str:
    return prefix + base64.b32encode(body + _check(body)).decode("ascii").lower().rstrip("=")


def read_line(prefix: str, text: str, *, body_bytes_max: int) -> bytes | None:
    """The bytes of a line that begins with `prefix`, which the caller has seen; None when it is mistyped or cut off."""
    letters = text.removeprefix(prefix).upper()
    if len(letters) > 2 * body_bytes_max:
        return None
    try:
        raw = base64.b32decode(letters + "=" * (-len(letters) % 8))
    except ValueError:
        return None
    body, check = raw[:-_CHECK_BYTES], raw[-_CHECK_BYTES:]
    return body if _check(body) == check else None


def _check(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()[:_CHECK_BYTES]
