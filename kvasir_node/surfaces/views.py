"""Parts of a node's snapshot as documents of their own, and what counts as healthy. It does not know HTTP."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kvasir_node.base.snapshot import NodeSnapshot
from kvasir_node.surfaces.verdict import verdict_of

PEERS_SCHEMA = "kvasir.peers/1"
DEMAND_SCHEMA = "kvasir.demand/1"
HEALTH_SCHEMA = "kvasir.health/1"


def status_document(snapshot: NodeSnapshot) -> dict[str, Any]:
    """With the verdict as `headline`: what a person reads first."""
    return {**snapshot.to_json(), "headline": verdict_of(snapshot, None).to_json()}


def peers_document(snapshot: NodeSnapshot) -> dict[str, Any]:
    return {
        "schema": PEERS_SCHEMA,
        "peer_id": snapshot.peer_id,
        "net": asdict(snapshot.net),
        "workers": [asdict(worker) for worker in snapshot.workers],
        "members": [asdict(member) for member in snapshot.members],
    }


def demand_document(snapshot: NodeSnapshot) -> dict[str, Any]:
    """As this node's hub sees it; `hub` null means that the node is none."""
    hub = asdict(snapshot.hub) if snapshot.hub is not None else None
    demand = hub.pop("demand") if hub is not None else []
    return {"schema": DEMAND_SCHEMA, "peer_id": snapshot.peer_id, "hub": hub, "demand": demand}


def health_document(snapshot: NodeSnapshot) -> dict[str, Any]:
    """For load balancers: who should not be asked now. Warnings do not make it fail."""
    is_serving = "coordinator" not in snapshot.roles or snapshot.model is not None
    status = "draining" if snapshot.draining else "ok" if is_serving else "unavailable"
    return {"schema": HEALTH_SCHEMA, "status": status, "warnings": list(snapshot.warnings)}
