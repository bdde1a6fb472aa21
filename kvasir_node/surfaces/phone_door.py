"""Where phones find their page, and the invitation that their owner shows them: a URL.

It does not know what a code lets its holder do (roles/pairing), how the page is served (phone_page.py), nor how an
invitation is shown (invitation.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvasir_node.base.errors import UsageError
from kvasir_node.surfaces.address import Address, is_wildcard_host
from kvasir_node.surfaces.phone_page import NOT_BUILT, PAGE_PATH, PhonePage
from kvasir_node.surfaces.ports import NodePort

PHONE_SCHEMA = "kvasir.phone/1"
_ONLY_HERE = (
    "this page is served to this machine alone; for phones start the node with --phone 0.0.0.0:9482 (phone.listen)"
)
_NODE_ONLY_HERE = (
    "the node itself listens on loopback alone, so a phone gets the page and nothing more; start it with --listen "
    "/ip4/0.0.0.0/tcp/9481 (network.listen)"
)


@dataclass(frozen=True, slots=True)
class PhoneDoor:
    """`served_at` has the real port; None = the page is served nowhere."""

    page: PhonePage
    served_at: Address | None

    def invite(self, node: NodePort, expires_s: float | None = None) -> dict[str, Any]:
        """A document with the URL for one phone. Raises UsageError where there is none to give, or for a wrong time."""
        if self.served_at is None:
            raise UsageError("this node serves no page for phones; start it with --phone 0.0.0.0:9482 (phone.listen)")
        invite = node.invite_phone(expires_s)
        host = invite.host if is_wildcard_host(self.served_at.host) else self.served_at.host
        place = Address(host, self.served_at.port)
        warnings = [_ONLY_HERE] * place.is_loopback + [_NODE_ONLY_HERE] * (invite.is_local and not place.is_loopback)
        warnings += [NOT_BUILT] * (not self.page.is_built)
        url = f"{place.url}{PAGE_PATH}#{invite.link}"
        return {"schema": PHONE_SCHEMA, "url": url, "expires_s": invite.expires_s, "warnings": warnings}
