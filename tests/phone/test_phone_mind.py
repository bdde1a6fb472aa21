"""The page's mind, held to the Python worker's: the same events, the same commands at the same times."""

from __future__ import annotations

import random

from kvasir_node.base.ids import DAG_CBOR_CODEC, ModelId, PeerId, SliceId, cid_of
from kvasir_node.decide import placement
from kvasir_node.decide.placement import Assignment, Placement, PlacementLimits

HUBS = (PeerId("hub0"), PeerId("hub1"))
MODEL = ModelId(cid_of(b"model", DAG_CBOR_CODEC))


class Middle:
    def uniform(self, a, b):
        return a + (b - a) * 0.5


def assignment(number, hub):
    part = SliceId(number % 5, 0, 7)
    return Assignment(f"lease{number}", MODEL, "float32", part, PeerId("coordinator"), ("/ip4/192.0.2.1/tcp/1",), hub)


def told(each):
    part = {"layer": each.slice.layer, "first": each.slice.first, "last": each.slice.last}
    return {
        "lease": each.lease, "model": each.model, "dtype": each.dtype, "slice": part,
        "coordinator": each.coordinator, "addresses": list(each.addresses), "hub": each.hub,
    }  # fmt: skip


def command_told(command):
    match command:
        case placement.PollHub(hub):
            return {"kind": "poll", "hub": hub}
        case placement.RenewLeases(hub, leases):
            return {"kind": "renew", "hub": hub, "leases": [[told(each), serves] for each, serves in leases]}
        case placement.Release(hub, assignments):
            return {"kind": "release", "hub": hub, "assignments": [told(each) for each in assignments]}
        case placement.Drain(each):
            return {"kind": "drain", "assignment": told(each)}
        case placement.Fetch(each):
            return {"kind": "fetch", "assignment": told(each)}
        case placement.LoadSlice(each):
            return {"kind": "load", "assignment": told(each)}
        case placement.Attach(each):
            return {"kind": "attach", "assignment": told(each)}
    raise AssertionError(command)


def random_event(rng, number, offered):
    """Mostly about leases that were offered lately; half of the time a step is done."""
    lease = rng.choice(offered[-4:]) if offered else "lease0"
    hub = rng.choice(HUBS)
    kind = rng.randrange(28)
    if kind < 4:
        offered.append(f"lease{number}")
        each, ttl_s = assignment(number, hub), rng.choice((0.5, 15.0))
        return placement.OfferReceived(each, ttl_s), {"kind": "offered", "assignment": told(each), "ttlS": ttl_s}
    simple = {
        4: (placement.NothingOffered(2.0), {"kind": "nothing offered", "retryAfterS": 2.0}),
        5: (placement.PollFailed(hub), {"kind": "poll failed", "hub": hub}),
        6: (placement.StepFailed(lease, retry=True), {"kind": "step failed", "lease": lease, "retry": True}),
        7: (placement.StepFailed(lease, retry=False), {"kind": "step failed", "lease": lease, "retry": False}),
        8: (placement.StandingTold(lease, proven=True), {"kind": "standing told", "lease": lease, "proven": True}),
        9: (placement.CoordinatorLost(lease), {"kind": "coordinator lost", "lease": lease}),
        10: (placement.Renewed(lease, 15.0), {"kind": "renewed", "lease": lease, "ttlS": 15.0}),
        11: (placement.RenewFailed(lease, hub), {"kind": "renew failed", "lease": lease, "hub": hub}),
        12: (placement.Drained(lease), {"kind": "drained", "lease": lease}),
    }
    if kind in simple:
        return simple[kind]
    if kind == 13:
        rare = rng.randrange(5)
        hubs = HUBS[: rng.randrange(3)]
        return (
            (placement.Paused(), {"kind": "paused"}),
            (placement.Resumed(), {"kind": "resumed"}),
            (placement.Resumed(), {"kind": "resumed"}),
            (placement.HubsKnown(hubs), {"kind": "hubs known", "hubs": list(hubs)}),
            (placement.Renewed(lease, 0.0), {"kind": "renewed", "lease": lease, "ttlS": 0.0}),
        )[rare]
    return placement.StepDone(lease), {"kind": "step done", "lease": lease}


def test_the_same_events_give_the_same_commands(parts):
    drawn = set()
    for seed in range(6):
        rng = random.Random(seed)
        mind = Placement(PlacementLimits(4, 2.0, 3.0), Middle())
        parts("placement", {"slicesMax": 4, "pollIntervalS": 2.0, "renewIntervalS": 3.0})
        now, offered = 0.0, []
        events = [(placement.HubsKnown(HUBS), {"kind": "hubs known", "hubs": list(HUBS)})]
        for number in range(120):
            if not events:
                events = [random_event(rng, number, offered)]
            event, spelt = events.pop()
            commands = [command_told(each) for each in mind.handle(event, now)]
            commands += [command_told(each) for each in mind.handle(placement.Tick(), now)]
            theirs = parts("handle", spelt, now)[0]
            ticked, next_at = parts("handle", {"kind": "tick"}, now)
            assert theirs + ticked == commands, (seed, number, event)
            expected = mind.next_at()
            assert (next_at is None) == (expected is None)
            assert next_at is None or abs(next_at - expected) < 1e-9, (seed, number, event)
            drawn.update(each["kind"] for each in commands)
            now += rng.choice((0.0, 0.1, 0.7, 3.0))
    assert drawn == {"poll", "renew", "release", "drain", "fetch", "load", "attach"}


def test_manners_say_why(parts):
    wishes = {"isPaused": False, "onBatteryToo": False, "bytesPerDayMax": 100}
    senses = {"isHidden": False, "isCharging": True, "bytesToday": 99}

    def why(**changed: object):
        both = {**wishes, **senses, **changed}
        return parts("objection", {k: both[k] for k in wishes}, {k: both[k] for k in senses})

    assert why() == ""
    assert why(isPaused=True) == "paused by you"
    assert why(isHidden=True) == "this page is hidden"
    assert "used up" in why(bytesToday=100)
    assert why(isCharging=False) == "not charging"
    assert why(isCharging=False, onBatteryToo=True) == ""
    assert "does not tell" in why(isCharging=None)


def test_the_screen_says_what_is_done(parts):
    guest = {"stages": [], "problem": ""}
    state = {"phase": "joined", "words": "", "objection": "", "guest": guest}

    def title(*stages: str, **changed: object):
        held = [{"slice": "0:0-7", "stage": stage, "model": "demo"} for stage in stages]
        return parts("verdict", {**state, "guest": {**guest, "stages": held}, **changed})["title"]

    assert title() == "Ready"
    assert title("fetching", "trial") == "Fetching experts"
    assert title("trial") == "On trial"
    assert title("trial", "serving") == "Computing"
    assert title("draining", objection="paused by you") == "Handing work back"
    assert title(objection="paused by you") == "Resting"
    assert title(phase="needs code") == "A code is needed"
    assert [parts("megabytes", n) for n in (0, 1_260_000, 2_000_000_000)] == ["0.0 MB", "1.3 MB", "2,000 MB"]
    assert parts("rate", [[0, 0], [1, 10], [2, 30]]) == 15
    assert parts("rate", [[0, 500], [1, 0], [2, 4]]) == 4
