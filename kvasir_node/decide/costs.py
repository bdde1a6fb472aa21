"""What computing costs, here and at each worker, from measured times: with age, spread and stated priors.

It does not know who deserves load, which expert goes where, nor how anything was timed: roles/ tell it what took how
long. `CostBook` takes observations; `CostBook.costs(now)` is a frozen picture for `decide/planner`.

All times are modelled as *affine*: y = θ·x with θ ≥ 0.

    the trunk of a step     x = (1, rows)
    a layer's experts here  x = (1, activated experts, pairs): a weight is read once, however many rows want it
    a worker's computing    the same, of one call
    a worker's link         x = (1, bytes sent, bytes received): θ = round trip, seconds per byte each way
    our own cost of a call  x = (1,): conversions, copies, wake-ups
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from kvasir_node.base.ids import PeerId

Numbers = tuple[float, ...]


@dataclass(slots=True)
class _Bin:
    """Observations of about one size: their smoothed features and time."""

    features: Numbers
    took_s: float
    count: float  # observations, fading with age
    seen_at: float
    number: int  # of its last observation


@dataclass(frozen=True, slots=True)
class Estimate:
    """`theta` as the module says; `doubt` is relative: 0.3 = a prediction may well be 30 % off; `age_s` of the newest
    observation, infinite when there is none."""

    theta: Numbers
    doubt: float
    age_s: float

    def at(self, *features: float) -> float:
        return sum(each * x for each, x in zip(self.theta, features, strict=True))


@dataclass(slots=True)
class AffineFit:
    """Robust least squares with forgetting, over sizes that were seen.

    Observations are smoothed by size (powers of two of the features), so that a thousand steps of one size do not
    wash out what is known of others. An estimate minimises, over the bins j and with g·prior as the starting point,

        Σ_j w_j · ((x_j·θ − y_j) / y_j)² + SHAPE · Σ_i (θ_i / (g·prior_i) − 1)²,   θ ≥ 0

    where w_j = min(count_j, COUNT_MAX) fades by half each HALF_LIFE_S, and ln g = Σ w_j ln(y_j / x_j·prior) /
    (Σ w_j + PRIOR_COUNT). So data give the level at once; the prior gives the proportions until sizes differ; and
    what is old decays towards the prior itself.

    Then θ is scaled to what was seen last, by exp(Σ v_j ln(y_j / x_j·θ) / (Σ v_j + PRIOR_COUNT)), where v_j is w_j,
    halved for each LEVEL_HALF_LIFE observations that were made since the bin's last one. A worker that was timed while
    it loaded its slices was slow at many sizes, and is not at the few that a plan gives it now; the many would outweigh
    them for minutes.

    An observation far from its bin counts as one at the edge of what is usual (Huber). SHIFT_AFTER of them in a row
    on the same side are no accident: the machine has changed, or some bins were wrong. They and all bins that are as
    old as what was found wrong are scaled by the least of them; but as it may have been one size alone, the others keep
    hardly any weight: they tell what sizes not seen since may take, and nothing against those that were.
    """

    HALF_LIFE_S: ClassVar[float] = 30.0
    LEVEL_HALF_LIFE: ClassVar[float] = 4.0  # in observations
    LEVEL_ASIDE_MAX: ClassVar[float] = 2.0  # of a logarithm: what is further off was no measurement of this machine
    COUNT_MAX: ClassVar[float] = 8.0  # observations that a bin averages over
    COUNT_MIN: ClassVar[float] = 0.25  # a bin that counts less is begun anew by the next of its size
    PRIOR_COUNT: ClassVar[float] = 0.5  # what a prior weighs, in observations
    SHAPE: ClassVar[float] = 0.02
    USUAL: ClassVar[float] = 3.0  # deviations
    DEVIATION_MIN: ClassVar[float] = 0.05  # relative: no clock and no scheduler is better
    SHIFT_AFTER: ClassVar[int] = 4
    RECENT_S: ClassVar[float] = 5.0  # what was seen so shortly before an outlier may still be of before the change
    TRUST_LEFT: ClassVar[float] = 1 / 256  # in sizes that were not seen since a change
    STALE_S: ClassVar[float] = 90.0  # a bin that was not seen for longer is begun anew
    BINS_MAX: ClassVar[int] = 48  # the one not seen for longest makes room

    deviation: float = 0.2  # relative, mean, of what is usual
    _bins: dict[tuple[int, ...], _Bin] = field(default_factory=dict[tuple[int, ...], _Bin])
    _streak: list[tuple[float, tuple[int, ...]]] = field(default_factory=list[tuple[float, tuple[int, ...]]])
    # of outliers on one side, in a row: logarithm, and which bin
    _observed: int = 0
    _theta: Numbers = ()  # as last estimated: how much longer one size takes than another of the same bin
    _stale_until: float = -math.inf  # bins not seen after this are of before the change, if the streak is one

    @property
    def sizes(self) -> int:
        """How many sizes are remembered now."""
        return len(self._bins)

    def observe(self, features: Numbers, took_s: float, now: float) -> None:
        """`features` begin with 1. Times that are not positive and finite are no observations."""
        if not (0.0 < took_s < math.inf) or not all(math.isfinite(x) for x in features):
            return
        self._observed += 1
        key = tuple(math.frexp(x)[1] if x > 0 else -1 for x in features)
        found = self._bins.get(key)
        if found is None or now - found.seen_at > self.STALE_S or found.count < self.COUNT_MIN:
            self._bins[key] = _Bin(features, took_s, 1.0, now, self._observed)
            if len(self._bins) > self.BINS_MAX:
                del self._bins[min(self._bins, key=lambda each: (self._bins[each].seen_at, each))]
            return
        aside = math.log(took_s / (found.took_s * self._longer(features, found.features)))
        edge = math.log1p(self.USUAL * max(self.deviation, self.DEVIATION_MIN))
        if self._has_shifted(key, aside, edge, now):
            return
        usual = max(-edge, min(edge, aside))
        self.deviation += (abs(usual) - self.deviation) / 16
        count = min(self.COUNT_MAX, self._faded(found, now) + 1.0)
        mean = tuple(old + (new - old) / count for old, new in zip(found.features, features, strict=True))
        found.took_s *= self._longer(mean, found.features) * math.exp(usual / count)
        found.features = mean
        found.count, found.seen_at, found.number = count, now, self._observed

    def _longer(self, features: Numbers, others: Numbers) -> float:
        """How many times longer these should take than others of their bin, which are at most about twice as many."""
        usual = _dot(others, self._theta) if self._theta else 0.0
        return max(0.5, min(2.0, _dot(features, self._theta) / usual)) if usual > 0.0 else 1.0

    def _has_shifted(self, key: tuple[int, ...], aside: float, edge: float, now: float) -> bool:
        if abs(aside) <= edge:
            self._streak.clear()
            return False
        if not self._streak or (aside > 0) != (self._streak[-1][0] > 0):
            self._streak.clear()
            seen_at = self._bins[key].seen_at
            self._stale_until = math.nextafter(now, -math.inf) if now - seen_at <= self.RECENT_S else seen_at
        self._streak.append((aside, key))
        if len(self._streak) < self.SHIFT_AFTER:
            return False
        scale = math.exp(min((each for each, _ in self._streak), key=abs))
        wrong = {each for _, each in self._streak}
        for each, found in self._bins.items():
            if each in wrong or found.seen_at <= self._stale_until:
                found.took_s *= scale
            if each not in wrong:
                found.count *= self.TRUST_LEFT
        self._streak.clear()
        return True

    def _faded(self, found: _Bin, now: float) -> float:
        return found.count * 0.5 ** (max(0.0, now - found.seen_at) / self.HALF_LIFE_S)

    def estimate(self, prior: Numbers, prior_doubt: float, now: float) -> Estimate:
        """The coefficients; all of `prior` must be positive."""
        weights = [(self._faded(each, now), each) for each in self._bins.values()]
        total = sum(weight for weight, _ in weights)
        if total <= 0.0:
            return Estimate(prior, prior_doubt, math.inf)
        level = math.exp(
            sum(weight * math.log(each.took_s / _dot(each.features, prior)) for weight, each in weights)
            / (total + self.PRIOR_COUNT)
        )
        start = tuple(level * each for each in prior)
        theta = _least_squares([(w, each.features, each.took_s) for w, each in weights], start, self.SHAPE)
        scale = self._level(weights, theta)
        theta = self._theta = tuple(each * scale for each in theta)
        believed = total / (total + self.PRIOR_COUNT)
        doubt = believed * max(self.deviation, self.DEVIATION_MIN) + (1.0 - believed) * prior_doubt
        return Estimate(theta, doubt, min(now - each.seen_at for _, each in weights))

    def _level(self, weights: Sequence[tuple[float, _Bin]], theta: Numbers) -> float:
        """What scales `theta` to what was seen last."""
        aside, total = 0.0, self.PRIOR_COUNT
        for weight, found in weights:
            recent = weight * 0.5 ** ((self._observed - found.number) / self.LEVEL_HALF_LIFE)
            predicted_s = _dot(found.features, theta)
            if predicted_s > 0.0:
                each = math.log(found.took_s / predicted_s)
                aside += recent * max(-self.LEVEL_ASIDE_MAX, min(self.LEVEL_ASIDE_MAX, each))
            total += recent
        return math.exp(aside / total)


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def _least_squares(observed: Sequence[tuple[float, Numbers, float]], start: Numbers, shape: float) -> Numbers:
    """Minimises the sum of `AffineFit`; in units of `start`, so the matrix is well scaled whatever the units are.

    What would be negative is zero, and the rest is solved again: with at most three coefficients that finds the
    least sum among them all but in rare corners, where the ridge keeps it near.
    """
    size = len(start)
    matrix = [[shape if i == j else 0.0 for j in range(size)] for i in range(size)]
    right = [shape] * size
    for weight, features, took_s in observed:
        scaled = [x * unit / took_s for x, unit in zip(features, start, strict=True)]
        for i in range(size):
            right[i] += weight * scaled[i]
            for j in range(size):
                matrix[i][j] += weight * scaled[i] * scaled[j]
    free = list(range(size))
    solved = [0.0] * size
    while free:
        part = _solve([[matrix[i][j] for j in free] for i in free], [right[i] for i in free])
        least = min(range(len(free)), key=lambda index: part[index])
        if part[least] >= 0.0:
            for index, value in zip(free, part, strict=True):
                solved[index] = value
            break
        del free[least]
    return tuple(value * unit for value, unit in zip(solved, start, strict=True))


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gauss without pivoting: the matrix is symmetric and, by the ridge, positive definite."""
    size = len(right)
    for i in range(size):
        for j in range(i + 1, size):
            factor = matrix[j][i] / matrix[i][i]
            right[j] -= factor * right[i]
            for k in range(i, size):
                matrix[j][k] -= factor * matrix[i][k]
    for i in reversed(range(size)):
        right[i] = (right[i] - sum(matrix[i][k] * right[k] for k in range(i + 1, size))) / matrix[i][i]
    return right


# The picture -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OwnCosts:
    """Seconds here. `borrow_s` = more for each activated expert that is not in memory."""

    trunk_s: float
    trunk_row_s: float
    layer_s: float
    expert_s: float
    pair_s: float
    call_s: float  # of our own time for each call that is made
    borrow_s: float
    doubt: float = 0.0

    def trunk(self, rows: float) -> float:
        return self.trunk_s + self.trunk_row_s * rows


@dataclass(frozen=True, slots=True)
class WorkerCosts:
    """Seconds of one call to a worker: rtt_s + call_s + expert_s × activated + pair_s × pairs + bytes each way."""

    rtt_s: float
    call_s: float
    expert_s: float
    pair_s: float
    sent_byte_s: float
    received_byte_s: float
    doubt: float = 0.0  # of its computing
    age_s: float = 0.0
    link_doubt: float = 0.0


@dataclass(frozen=True, slots=True)
class Costs:
    own: OwnCosts
    workers: Mapping[PeerId, WorkerCosts]


TRUNK_PRIOR: Numbers = (5e-3, 5e-4)
LAYER_PRIOR: Numbers = (5e-5, 2e-4, 2e-5)
CALL_PRIOR: Numbers = (2e-4,)
LINK_PRIOR: Numbers = (5e-3, 2e-8, 2e-8)  # 5 ms and 50 MB/s: between a LAN and a home
"""Before anything was measured: a small model on one core. Levels go with the first observation; proportions stay."""

OWN_DOUBT = 0.3
WORKER_DOUBT = 0.6  # a worker that was never timed: taken for our equal, with this much doubt
SHORTER = 2.0  # times: a round trip so much shorter than thought is no accident
WORKERS_MAX = 1024  # workers remembered; the one that was not heard of for longest makes room


@dataclass(slots=True)
class _Worker:
    computing: AffineFit = field(default_factory=AffineFit)
    link: AffineFit = field(default_factory=AffineFit)
    heard_at: float = 0.0


@dataclass(slots=True)
class CostBook:
    """One for decoding and one for prompts: few rows and thousands of them cost differently, here and there."""

    borrow_s: float
    _trunk: AffineFit = field(default_factory=AffineFit)
    _layer: AffineFit = field(default_factory=AffineFit)
    _call: AffineFit = field(default_factory=AffineFit)
    _workers: dict[PeerId, _Worker] = field(default_factory=dict[PeerId, _Worker])

    def observe_trunk(self, rows: int, took_s: float, now: float) -> None:
        """A step's time without its experts, calls and waiting."""
        self._trunk.observe((1.0, float(rows)), took_s, now)

    def observe_layer(self, activated: int, pairs: int, took_s: float, now: float) -> None:
        """What was computed here of one layer."""
        self._layer.observe((1.0, float(activated), float(pairs)), took_s, now)

    def observe_own_call(self, took_s: float, now: float) -> None:
        """Our own time for one call: making, sending, taking and adding up; not the waiting."""
        self._call.observe((1.0,), took_s, now)

    def observe_round_trip(self, peer: PeerId, took_s: float, now: float) -> None:
        """A message that carries nothing, and its answer.

        No way is longer than its shortest round trip: when one is far shorter than was thought, what was measured
        before went another way, or waited, and is forgotten.
        """
        worker = self._worker(peer, now)
        if took_s < worker.link.estimate(LINK_PRIOR, WORKER_DOUBT, now).theta[0] / SHORTER:
            worker.link = AffineFit()
        worker.link.observe((1.0, 0.0, 0.0), took_s, now)

    def observe_travel(self, peer: PeerId, sent_bytes: int, received_bytes: int, took_s: float, now: float) -> None:
        """A call's time on the way, whatever was computed: a link is the same for few rows and for thousands."""
        self._worker(peer, now).link.observe((1.0, float(sent_bytes), float(received_bytes)), took_s, now)

    def forget_link(self, peer: PeerId) -> None:
        """Calls to a peer go another way from now on."""
        worker = self._workers.get(peer)
        if worker is not None:
            worker.link = AffineFit()

    def observe_call(
        self,
        peer: PeerId,
        *,
        activated: int,
        pairs: int,
        sent_bytes: int,
        received_bytes: int,
        took_s: float,
        computed_s: float | None,
        now: float,
    ) -> None:
        """One call, from its sending to its answer. `computed_s` = what the worker says that it took of it.

        A worker that says too little only seems far instead of slow: the sum is our own measurement. Without it, all
        beyond the link's estimate is computing.
        """
        worker = self._worker(peer, now)
        link = (1.0, float(sent_bytes), float(received_bytes))
        if computed_s is None:
            travelled_s = worker.link.estimate(LINK_PRIOR, WORKER_DOUBT, now).at(*link)
            computed_s = max(0.1 * took_s, took_s - travelled_s)
        else:
            computed_s = min(computed_s, took_s)
            worker.link.observe(link, took_s - computed_s, now)
        worker.computing.observe((1.0, float(activated), float(pairs)), computed_s, now)

    def forget(self, peer: PeerId) -> None:
        self._workers.pop(peer, None)

    def costs(self, now: float, peers: Collection[PeerId] | None = None) -> Costs:
        """The picture as of now, of all workers that were heard of, or of these, as `worker` says."""
        own = self._own(now)
        names = self._workers if peers is None else peers
        return Costs(own, {peer: self._costs_of(self._workers.get(peer, _Worker()), own, now) for peer in names})

    def worker(self, peer: PeerId, now: float) -> WorkerCosts:
        """One worker's costs, also of one never heard of: then it is our equal, at the stated distance, in doubt."""
        return self._costs_of(self._workers.get(peer, _Worker()), self._own(now), now)

    def _own(self, now: float) -> OwnCosts:
        trunk = self._trunk.estimate(TRUNK_PRIOR, OWN_DOUBT, now)
        layer = self._layer.estimate(LAYER_PRIOR, OWN_DOUBT, now)
        call = self._call.estimate(CALL_PRIOR, OWN_DOUBT, now)
        trunk_s, trunk_row_s = trunk.theta
        layer_s, expert_s, pair_s = layer.theta
        return OwnCosts(
            trunk_s=trunk_s,
            trunk_row_s=trunk_row_s,
            layer_s=layer_s,
            expert_s=expert_s,
            pair_s=pair_s,
            call_s=call.theta[0],
            borrow_s=self.borrow_s,
            doubt=max(trunk.doubt, layer.doubt),
        )

    def _costs_of(self, worker: _Worker, own: OwnCosts, now: float) -> WorkerCosts:
        ours = (own.layer_s, own.expert_s, own.pair_s)
        least = max(1e-9, sum(ours) / 100)  # a prior must be positive: proportions are taken of it
        equal = tuple(max(least, each) for each in ours)
        computing = worker.computing.estimate(equal, WORKER_DOUBT, now)
        link = worker.link.estimate(LINK_PRIOR, WORKER_DOUBT, now)
        call_s, expert_s, pair_s = computing.theta
        rtt_s, sent_byte_s, received_byte_s = link.theta
        return WorkerCosts(
            rtt_s,
            call_s,
            expert_s,
            pair_s,
            sent_byte_s,
            received_byte_s,
            computing.doubt,
            computing.age_s,
            link.doubt,
        )

    def _worker(self, peer: PeerId, now: float) -> _Worker:
        worker = self._workers.setdefault(peer, _Worker())
        worker.heard_at = now
        if len(self._workers) > WORKERS_MAX:
            others = (each for each in self._workers if each != peer)
            del self._workers[min(others, key=lambda each: (self._workers[each].heard_at, each))]
        return worker
