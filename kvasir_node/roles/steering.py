"""What the governor decides, worked out beside the loop and carried out on it.

It does not know sockets, tensors or requests: it is told of the load, of steps, and that who is proven or held has
changed; it sets routes and lanes. All judgement is `decide/planner` and `decide/governor`; what things cost comes
from roles/costing.py.

Planning takes milliseconds, so it runs in a thread, one plan at a time, for the newest scene. What must not wait does
not: when a peer loses its proof, or nobody waits any more, routes are cut on the spot (`decide/routes`), and a plan
that was begun with a peer who has lost its proof since is dropped.

While fan-out is off although somebody waits, each plan comes with a look at one of the workers (`decide/looks`): or
nothing would be learned of them, and what was believed would go on saying no. No look outlives the plan that it came
with, nor the wish, nor anybody's proof.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import trio

from kvasir_node.base.ids import PeerId, SliceId
from kvasir_node.base.settings import FanoutSettings
from kvasir_node.decide.costs import Costs
from kvasir_node.decide.dealing import Dealings, dealings, fixed, pricing
from kvasir_node.decide.governor import FORCED, Decision, Governor, GovernorLimits, Situation
from kvasir_node.decide.looks import Look, next_look
from kvasir_node.decide.planner import Plan, PlanLimits, plan
from kvasir_node.decide.prediction import Prediction, Routes, Scene, predict
from kvasir_node.decide.routes import at_home, without_unproven
from kvasir_node.roles.costing import Costing
from kvasir_node.roles.measured import StepMeasured

logger = logging.getLogger(__name__)

TICK_S = 0.25  # how often it is asked whether what is in force should be, while anything is going on
PLANNING_RATIO = 0.02  # of the time is spent planning: it takes the interpreter from whoever computes ...
TICK_MAX_S = 2.0  # ... but plans are made this often however long they take, and while there is nobody to send to
REFRESH_S = 10.0  # after so long in several lanes one step is made in one: forwards beside each other take longer than
# alone, so nothing is learned of our own costs from them, and what is known is half faded after 30 s
RunBlocking = Callable[..., Awaitable[Any]]
"""Runs a blocking call: in a thread, or (under a virtual clock) inline."""


@dataclass(frozen=True, slots=True)
class Load:
    """What is going on. `wanted`: experts that are held here may leave; `calm`: the words for why not; `rows`: of a
    decode step; `is_active`: something is computed, or waits for it."""

    wanted: bool
    queued: int
    rows: int
    is_active: bool
    calm: str = "calm"


@dataclass(frozen=True, slots=True)
class Shape:
    """Of the model, and of what is computed of it at once. `row_bytes`: a row on the wire, one way."""

    layers: tuple[int, ...]
    experts: int
    chosen: int
    row_bytes: int
    decode_rows_max: int
    prompt_rows: int


class HasLanes(Protocol):
    """An engine; see `model.engine.Engine`."""

    @property
    def lanes(self) -> int: ...

    @lanes.setter
    def lanes(self, count: int) -> None: ...


@dataclass(frozen=True, slots=True)
class _Offer:
    """The best plans for a scene, and what those in force when it was begun would give in it."""

    decode: Plan
    prompt: Plan
    losses: int
    kept_of: Plan | None
    kept: Prediction | None
    prompt_kept_of: Plan | None
    prompt_kept: Prediction | None
    costs: tuple[Costs, Costs]  # of decoding and of prompts
    look: Look | None  # while off
    took_s: float  # to work it out, processor time


@dataclass(frozen=True, slots=True)
class _Question:
    scene: Scene
    rows: int
    losses: int
    in_force: Plan | None
    prompt_in_force: Plan | None
    peers_to_look_at: Sequence[PeerId]


class Steering:
    """See the module. `proven`, `heat`, `load` and `round_trips` tell how things are now; `heat` is called from a
    thread. `has_channel` tells whether a peer has an express channel that is open; nobody else is looked at.
    `set_routes` takes what decoding and prompts go by, all layers of each, and looks into use, on the loop; `changed`
    hears whether fan-out is on, why, and the gain predicted."""

    def __init__(
        self,
        settings: FanoutSettings,
        shape: Shape,
        held: Mapping[int, frozenset[int]],
        costing: Costing,
        engine: HasLanes,
        *,
        proven: Callable[[], Collection[tuple[PeerId, SliceId]]],
        heat: Callable[[], Mapping[int, Sequence[float]]],
        load: Callable[[], Load],
        round_trips: Callable[[], Mapping[PeerId, float]],
        has_channel: Callable[[PeerId], bool],
        set_routes: Callable[[Dealings, Dealings, Dealings], None],
        changed: Callable[[bool, str, float], None] = lambda on, reason, gain: None,
        run_blocking: RunBlocking = trio.to_thread.run_sync,
        clock: Callable[[], float] = time.monotonic,
        used: Callable[[], float] = time.thread_time,
    ) -> None:
        forced = settings.when == "forced"
        slowdown = math.inf if forced else settings.max_slowdown
        self._limits = PlanLimits(slowdown, float(settings.bytes_s), must_share=forced)
        self._prompt_limits = replace(self._limits, lanes_max=1)
        # Who has a choice may send more than was planned, and forced means what it says.
        self._leaves_choice = not forced and not settings.bytes_s
        self._governor = Governor(FORCED if forced else GovernorLimits())
        self._enabled = settings.enabled
        self._shape = shape
        self._held = held
        self._costing = costing
        self._engine = engine
        self._proven = proven
        self._heat = heat
        self._load = load
        self._round_trips = round_trips
        self._has_channel = has_channel
        self._set_routes = set_routes
        self._changed = changed
        self._run_blocking = run_blocking
        self._clock = clock
        self._used = used
        self._offer: _Offer | None = None
        self._decision: Decision | None = None
        self._prompt: Plan | None = None  # in force; None while off
        self._decode_routes: Routes = {}
        self._prompt_routes: Routes = {}
        self._looks: Dealings = {}  # in use
        self._looked_at: PeerId | None = None  # lastly
        self._dealt: tuple[Dealings, Dealings] = ({}, {})  # of these routes
        self._dealt_for: tuple[int, bool] = (1, False)  # lanes, and whether fan-out was on
        self._is_dealt_stale = False  # who is proven or what is held has changed since
        self._costs: tuple[Costs, Costs] | None = None  # as of the newest offer
        self._carried_out: _Offer | None = None
        self._known: frozenset[tuple[PeerId, SliceId]] = frozenset()  # who was proven when last asked
        self._losses = 0  # how often somebody was not any more
        self._is_cut = False  # the routes in force are not all of the plan in force any more
        self._was_wanted = False
        self._plan_at = -math.inf
        self._wake = trio.Event()
        self._in_one_lane_at = -math.inf
        self._is_refreshing = False

    def set_row_bytes(self, row_bytes: int) -> None:
        """Rows travel otherwise than in the compute dtype; before anything is planned."""
        self._shape = replace(self._shape, row_bytes=row_bytes)

    # What is told -----------------------------------------------------------------------------------------------

    def world_changed(self) -> None:
        """Who is proven, or what is held here, may have changed. What may not leave any more is taken off at once."""
        known = frozenset(self._proven())
        is_loss, self._is_dealt_stale = not self._known <= known, True
        self._losses += is_loss
        self._known = known
        if is_loss:
            self._stop_looking()
        if self._put(self._decode_routes, self._prompt_routes):
            self._is_cut = self.on
        elif is_loss and any(self._dealt):
            self._deal_anew()
        self._plan_at = -math.inf
        self._wake.set()

    def load_changed(self) -> None:
        """Requests came or went. When nobody waits any more, what is held here stays here from now on."""
        wanted = self._load().wanted
        if wanted != self._was_wanted:
            self._was_wanted = wanted
            self._plan_at = -math.inf
            if not wanted:
                self._consider()
        self._wake.set()

    def stepped(self, step: StepMeasured) -> None:
        """Between two steps of the engine: lanes change here, so that each step is made in lanes that are known."""
        now = self._clock()
        if self._is_refreshing:
            self._is_refreshing = step.has_prompt
        else:
            self._governor.observe(step.rows, step.rows, step.took_s, now)
        lanes = 1 if self._decision is None else self._decision.lanes
        if self._engine.lanes == 1:
            self._in_one_lane_at = now
        elif now - self._in_one_lane_at >= REFRESH_S:
            self._is_refreshing = True
        self._engine.lanes = 1 if self._is_refreshing else lanes
        self._costing.in_one_lane = self._engine.lanes == 1

    # What is shown ----------------------------------------------------------------------------------------------

    @property
    def on(self) -> bool:
        """Something that is held here may be computed elsewhere."""
        return self._decision is not None and self._decision.on

    @property
    def reason(self) -> str:
        load = self._load()
        if not load.wanted:
            return f"off: {load.calm}"
        return "off: the first plan is being made" if self._decision is None else self._decision.reason

    @property
    def predicted_gain(self) -> float:
        """Of what is in force, else of the best that could be."""
        return 1.0 if self._decision is None else self._decision.gain

    @property
    def measured_gain(self) -> float | None:
        """Of what is in force, as last judged."""
        return self._governor.measured_gain if self.on else None

    @property
    def routes(self) -> Routes:
        """Of decoding, in use."""
        return self._decode_routes

    @property
    def plan(self) -> Plan | None:
        """What is in force; None while off."""
        return self._decision.plan if self._decision is not None and self._decision.on else None

    @property
    def near_rtt_s(self) -> float | None:
        """How far a worker may be to take a share of every layer, each for a round trip, within what a token may take;
        None before the first plan."""
        return None if self._offer is None else self._offer.decode.budget_s / len(self._shape.layers)

    # Planning ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Plans and decides for ever, asleep while nothing is going on."""
        while True:
            if self._enabled and self._is_due():
                await self._plan()
            self._consider()
            with trio.move_on_after(TICK_S if self._load().is_active else math.inf):
                await self._wake.wait()
            self._wake = trio.Event()

    @property
    def _lacks_experts(self) -> bool:
        return any(len(self._held.get(layer, ())) < self._shape.experts for layer in self._shape.layers)

    def _is_due(self) -> bool:
        return self._clock() >= self._plan_at and (self._load().wanted or self._lacks_experts)

    async def _plan(self) -> None:
        """Leaves an offer. One with somebody who lost its proof meanwhile is not considered, and another one is due."""
        load, began_at = self._load(), self._clock()
        self._costing.round_trips_measured(self._round_trips())
        shape, known = self._shape, self._known
        scene = Scene(
            shape.layers, shape.experts, shape.chosen, shape.row_bytes, dict(self._held), tuple(sorted(known)), {}
        )
        rows = max(1, min(load.rows, shape.decode_rows_max))
        looks = load.wanted and self._governor.plan is None
        peers = [peer for peer in sorted({peer for peer, _ in known}) if self._has_channel(peer)] if looks else []
        question = _Question(scene, rows, self._losses, self._governor.plan, self._prompt, peers)
        self._plan_at = math.inf  # unless somebody wants another one meanwhile
        self._offer = offer = await self._run_blocking(self._work_out, question)
        is_urgent = bool(known) and load.wanted
        pause_s = min(TICK_MAX_S, max(TICK_S, offer.took_s / PLANNING_RATIO)) if is_urgent else TICK_MAX_S
        self._plan_at = min(self._plan_at, began_at + pause_s)

    def _work_out(self, question: _Question) -> _Offer:
        """Blocks. Only the costing's books change, which nobody else touches."""
        began_s = self._used()
        scene = replace(question.scene, heat=self._heat())
        decode, prompt = self._costing.costs({peer for peer, _ in scene.proven})
        in_force, prompt_in_force = question.in_force, question.prompt_in_force
        prompt_rows = self._shape.prompt_rows
        offered = plan(scene, decode, question.rows, self._limits)
        return _Offer(
            offered,
            plan(scene, prompt, prompt_rows, self._prompt_limits),
            question.losses,
            in_force,
            None if in_force is None else predict(scene, decode, question.rows, in_force.lanes, in_force.routes),
            prompt_in_force,
            None if prompt_in_force is None else predict(scene, prompt, prompt_rows, 1, prompt_in_force.routes),
            (decode, prompt),
            next_look(
                scene,
                decode,
                question.rows,
                question.peers_to_look_at,
                self._looked_at,
                step_s=offered.alone.token_s,
                bytes_s=self._limits.bytes_s,
            ),
            self._used() - began_s,
        )

    # Deciding ---------------------------------------------------------------------------------------------------

    def _consider(self) -> None:
        """Asks the governor with what is known, and carries out what it says."""
        offer, load = self._offer, self._load()
        if offer is None or (load.wanted and offer.losses != self._losses):
            return  # nothing was planned, or not for those who are left: they have been cut off already
        in_force = self._governor.plan
        kept = offer.kept if in_force is offer.kept_of else None
        if in_force is offer.decode:
            kept = offer.decode.predicted
        is_lost = self._is_cut and in_force is not None
        decision = self._governor.consider(
            Situation(load.wanted, load.queued, offer.decode, kept, is_lost, load.calm), self._clock()
        )
        self._take_look(decision, offer, load)
        self._carry_out(decision, offer)

    def _take_look(self, decision: Decision, offer: _Offer, load: Load) -> None:
        """Of a new offer, which is dealt out next."""
        if decision.on or not load.wanted:
            self._stop_looking()
        elif offer is not self._carried_out:
            self._looks = {} if offer.look is None else offer.look.layers
            self._looked_at = self._looked_at if offer.look is None else offer.look.peer

    def _stop_looking(self) -> None:
        """At once, whatever is dealt out later."""
        if self._looks:
            self._looks = {}
            self._set_routes(*self._dealt, {})

    def _carry_out(self, decision: Decision, offer: _Offer) -> None:
        was_on, self._decision = self.on, decision
        if was_on != decision.on or (decision.on and decision.changed):
            logger.info("fan-out %s", decision.reason)
            self._changed(decision.on, decision.reason, decision.gain)
        is_new, self._carried_out = offer is not self._carried_out, offer
        if is_new:
            self._costs = offer.costs
        is_put = False
        if not decision.on:
            if decision.changed or is_new:
                self._prompt, self._is_cut = None, False
                is_put = self._put(decision.plan.home, offer.prompt.home)
        elif self._prompt is None or decision.changed or self._is_cut or self._is_better_for_prompts(offer):
            self._prompt, self._is_cut = offer.prompt, False
            is_put = self._put(decision.plan.routes, offer.prompt.routes)
        if not is_put and (is_new or self._dealt_for != (decision.lanes, decision.on)):
            self._deal_anew()

    def _is_better_for_prompts(self, offer: _Offer) -> bool:
        if self._prompt is not offer.prompt_kept_of or offer.prompt_kept is None:
            return False
        change_gain = self._governor.limits.change_gain
        return offer.prompt.predicted.tokens_per_s >= change_gain * offer.prompt_kept.tokens_per_s

    def _put(self, decode: Routes, prompt: Routes) -> bool:
        """Takes routes into use but for what may not leave: to who is not proven, and while off what is held here.
        Returns whether others were in use."""
        decode, prompt = self._allowed(decode), self._allowed(prompt)
        if (decode, prompt) == (self._decode_routes, self._prompt_routes):
            return False
        self._decode_routes, self._prompt_routes = decode, prompt
        self._is_dealt_stale = True
        self._deal_anew()
        return True

    def _deal_anew(self) -> None:
        """Who may compute each expert, at what price, of the routes in use and as the world is now."""
        lanes = 1 if self._decision is None else self._decision.lanes
        if self._is_dealt_stale or self._dealt_for != (lanes, self.on):
            self._is_dealt_stale, self._dealt_for = False, (lanes, self.on)
            self._dealt = self._dealings(self._decode_routes, lanes), self._dealings(self._prompt_routes, 1)
        if self._costs is not None:
            decode, prompt = self._dealt
            self._dealt = self._priced(decode, self._costs[0]), self._priced(prompt, self._costs[1])
        self._set_routes(*self._dealt, self._looks)

    def _dealings(self, routes: Routes, lanes: int) -> Dealings:
        """Lanes in each other's way are not what is dealt out here."""
        if lanes > 1 or not self._leaves_choice:
            return fixed(routes)
        return dealings(routes, self._known, self._held if self.on else {})

    def _priced(self, dealt: Dealings, costs: Costs) -> Dealings:
        price = pricing(costs, self._shape.chosen, self._shape.row_bytes)
        return {layer: each.priced(price) for layer, each in dealt.items()}

    def _allowed(self, routes: Routes) -> Routes:
        left = without_unproven(routes, self._known)
        return left if self.on else at_home(left, self._held)
