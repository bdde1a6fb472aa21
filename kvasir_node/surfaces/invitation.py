"""How an invitation for a phone is shown to people: rows of a code for its camera, and words.

It does not know where invitations come from (phone_door.py makes them).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvasir_node.surfaces.qr import qr_text


@dataclass(frozen=True, slots=True)
class Invitation:
    code: tuple[str, ...]
    words: tuple[str, ...]


def invite_lines(document: Mapping[str, Any], *, qr: bool) -> list[str]:
    """A code, the URL, and what it is good for."""
    url, minutes = str(document["url"]), float(document["expires_s"]) / 60
    code = qr_text(url, "link").split("\n") if qr else []
    return [*code, url, f"for one phone, within {minutes:.3g} minutes; it may compute here, and nothing else"]
