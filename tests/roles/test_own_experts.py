from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fanout_fakes import EXPERTS, LAYERS, D, in_thread, make_checkpoint, make_own, make_shard, random_rows
from safetensors.torch import save_file

from kvasir_node.base.errors import DataError, KvasirError
from kvasir_node.base.ids import ExpertId
from kvasir_node.model.checkpoint import Checkpoint, ExpertMaths
from kvasir_node.model.experts import load_from_checkpoint
from kvasir_node.model.missing import ExpertsMissing
from kvasir_node.model.tensor_file import TensorRange, read_header
from kvasir_node.model.trunk import LocalDispatch
from kvasir_node.roles.comparing import pick_pairs
from kvasir_node.roles.own_experts import OwnExperts

EXPERT_BYTES = 3 * D * 8 * 4


def pairs_of(chosen: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.arange(chosen.shape[0]).repeat_interleave(chosen.shape[1]), chosen.reshape(-1), weights.reshape(-1)


@pytest.mark.parametrize("hold", ["all", "even", "none"])
@pytest.mark.parametrize("room", [1, 2, 100])
def test_any_expert_can_be_computed_whatever_is_held_and_however_little_room_there_is(tmp_path, hold, room):
    checkpoint = make_checkpoint(tmp_path)
    holds = {"all": lambda i: True, "even": lambda i: i % 2 == 0, "none": lambda i: False}[hold]
    own = make_own(checkpoint, holds, room * EXPERT_BYTES)
    truth = LocalDispatch(make_shard(checkpoint))
    for seed in range(4):
        rows, chosen, weights = random_rows(seed, 6, 3)
        for layer in LAYERS:
            expected = truth(layer, rows, chosen, weights)
            torch.testing.assert_close(own.compute(layer, rows, *pairs_of(chosen, weights)), expected)
    assert (own.loads == 0) == (hold == "all")


def test_law_7_borrowed_experts_stay_within_their_room_and_the_longest_unused_goes_first(tmp_path):
    checkpoint = make_checkpoint(tmp_path)
    own = make_own(checkpoint, lambda i: i < 4, 2 * EXPERT_BYTES)
    rows = torch.ones(1, D)

    def use(index: int) -> None:
        own.compute(0, rows, torch.zeros(1, dtype=torch.int64), torch.tensor([index]), torch.ones(1))

    for index in (4, 5, 4, 6):
        use(index)
    assert own.loads == 3
    assert own._shard.held(0) == {0, 1, 2, 3, 4, 6}
    use(4)
    assert own.loads == 3
    use(5)
    assert own.loads == 4
    assert own._shard.held(0) == {0, 1, 2, 3, 4, 5}
    assert own._shard.nbytes == (4 * len(LAYERS) + 2) * EXPERT_BYTES


def test_two_threads_that_borrow_from_one_room_never_take_away_what_the_other_computes_with(tmp_path):
    checkpoint = make_checkpoint(tmp_path)
    own = make_own(checkpoint, lambda i: False, EXPERT_BYTES)
    truth = LocalDispatch(make_shard(checkpoint))
    failures: list[object] = []

    def work(seed: int) -> None:
        for step in range(15):
            rows, chosen, weights = random_rows(100 * seed + step, 2, 2)
            layer = LAYERS[step % len(LAYERS)]
            sums = own.compute(layer, rows, *pairs_of(chosen, weights))
            if not torch.allclose(sums, truth(layer, rows, chosen, weights), atol=1e-5):
                failures.append((seed, step))

    threads = [in_thread(lambda seed=seed: work(seed)) for seed in range(2)]
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert not failures
    assert own.borrowed == 1


def test_a_checkpoint_that_is_gone_is_told_as_bad_data(tmp_path):
    checkpoint = make_checkpoint(tmp_path)
    own = make_own(checkpoint, lambda i: False)
    (tmp_path / "experts.safetensors").unlink()
    rows, chosen, weights = random_rows(0)
    with pytest.raises(DataError):
        own.compute(0, rows, *pairs_of(chosen, weights))
    assert own.borrowed == 0
    assert not own._shard.holds(ExpertId(0, 0))


def test_sums_are_those_of_the_request_alone(tmp_path):
    own = make_own(make_checkpoint(tmp_path), lambda i: i % 2 == 0)
    rows, chosen, weights = random_rows(3)
    request, used = pick_pairs(1, rows, chosen, weights, chosen >= EXPERTS // 2)
    there = weights * (chosen >= EXPERTS // 2)
    expected = own.compute(1, rows, *pairs_of(chosen, there))[used]
    torch.testing.assert_close(own.sums(request), expected)


def one_pair(own: OwnExperts, index: int, layer: int = 0) -> torch.Tensor:
    rows = torch.ones(1, D)
    return own.compute(layer, rows, torch.zeros(1, dtype=torch.int64), torch.tensor([index]), torch.ones(1))


class SlowReads(OwnExperts):
    """Reads of the experts in `held_back` wait for their event."""

    held_back: dict[int, threading.Event]
    began: threading.Event

    def _read(self, expert: ExpertId) -> Mapping[str, torch.Tensor]:
        if expert.index in self.held_back:
            self.began.set()
            assert self.held_back[expert.index].wait(20)
        return super()._read(expert)


def slow_own(checkpoint: Checkpoint, room: int, *held_back: int) -> SlowReads:
    shard = make_shard(checkpoint, lambda i: False)
    own = SlowReads(shard, checkpoint, dict.fromkeys(LAYERS, frozenset()), room * EXPERT_BYTES, moves=True)
    own.held_back = {index: threading.Event() for index in held_back}
    own.began = threading.Event()
    return own


@pytest.mark.parametrize("room", [1, 4])
def test_a_thread_that_computes_waits_for_no_read_but_its_own(tmp_path, room):
    own = slow_own(make_checkpoint(tmp_path), room, 5)
    reader = in_thread(lambda: one_pair(own, 5))
    assert own.began.wait(20)
    one_pair(own, 3)
    assert reader.is_alive()
    own.held_back[5].set()
    reader.join(20)
    assert own.loads == 2
    assert own.borrowed <= room


def test_two_threads_that_need_the_same_expert_read_it_once(tmp_path):
    own = slow_own(make_checkpoint(tmp_path), 2, 5)
    threads = [in_thread(lambda: one_pair(own, 5)) for _ in range(3)]
    assert own.began.wait(20)
    own.held_back[5].set()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert own.loads == 1


def test_an_expert_that_is_kept_needs_no_borrowing_and_one_that_is_given_up_is_gone(tmp_path):
    checkpoint = make_checkpoint(tmp_path)
    own = slow_own(checkpoint, 2)
    one_pair(own, 5)
    own.keep(ExpertId(0, 5))  # it was borrowed, so it is not read again
    own.keep(ExpertId(0, 6))
    assert (own.loads, own.borrowed, own._held[0]) == (2, 0, {5, 6})
    one_pair(own, 6)
    assert own.loads == 2
    own.give_up(ExpertId(0, 5))
    assert own._shard.held(0) == own._held[0] == {6}
    torch.testing.assert_close(one_pair(own, 5), one_pair(make_own(checkpoint), 5))


def test_what_is_given_up_stays_until_those_who_compute_with_it_have_ended(tmp_path):
    own = slow_own(make_checkpoint(tmp_path), 2, 5)
    own.keep(ExpertId(0, 3))
    failures: list[Exception] = []

    def compute_both() -> None:
        try:
            own.compute(0, torch.ones(1, D), torch.zeros(2, dtype=torch.int64), torch.tensor([3, 5]), torch.ones(2))
        except KvasirError as error:
            failures.append(error)

    computing = in_thread(compute_both)
    assert own.began.wait(20)
    giving_up = in_thread(lambda: own.give_up(ExpertId(0, 3)))
    giving_up.join(0.05)
    assert giving_up.is_alive()
    for index in (3, 4, 6):  # another thread borrows it meanwhile, and it makes room for others
        one_pair(own, index)
    assert ExpertId(0, 3) not in own._loans
    assert own._shard.holds(ExpertId(0, 3))
    own.held_back[5].set()
    for thread in (computing, giving_up):
        thread.join(20)
        assert not thread.is_alive()
    assert not failures
    assert not own._shard.holds(ExpertId(0, 3))


def test_law_1_threads_compute_the_same_while_experts_come_and_go(tmp_path):
    checkpoint = make_checkpoint(tmp_path)
    own = slow_own(checkpoint, 2)
    truth = LocalDispatch(make_shard(checkpoint))
    stop = threading.Event()
    failures: list[object] = []

    def work(seed: int) -> None:
        for step in range(60):
            rows, chosen, weights = random_rows(1000 * seed + step, 3, 2)
            layer = LAYERS[step % len(LAYERS)]
            try:
                sums = own.compute(layer, rows, *pairs_of(chosen, weights))
            except KvasirError as error:
                failures.append(error)
                return
            if not torch.allclose(sums, truth(layer, rows, chosen, weights), atol=1e-5):
                failures.append((seed, step))

    def move() -> None:
        chance = random.Random(1)
        while not stop.is_set():
            layer, index = chance.choice(LAYERS), chance.randrange(EXPERTS)
            (own.give_up if index in own._held[layer] else own.keep)(ExpertId(layer, index))

    threads = [in_thread(lambda seed=seed: work(seed)) for seed in range(2)]
    mover = in_thread(move)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    stop.set()
    mover.join(20)
    assert not failures
    held = {ExpertId(layer, index) for layer in LAYERS for index in own._held[layer]}
    assert {ExpertId(layer, index) for layer in LAYERS for index in own._shard.held(layer)} == held | set(own._loans)


def test_what_is_nowhere_on_this_machine_is_told_with_the_rows_that_need_it_before_anything_is_read(tmp_path):
    checkpoint = make_checkpoint(tmp_path)
    here = {expert: parts for expert, parts in checkpoint.experts.items() if expert.index < 6}
    own = make_own(replace(checkpoint, experts=here), lambda i: i < 2)
    chosen = torch.tensor([[0, 1], [7, 3], [3, 4], [1, 6]])
    with pytest.raises(ExpertsMissing, match=r"experts 6, 7 of layer 1 .*start a worker") as raised:
        own.compute(1, torch.ones(4, D), *pairs_of(chosen, torch.ones(4, 2)))
    assert raised.value.rows == (1, 3)
    assert raised.value.experts == {6, 7}
    assert own.loads == 0
    own.compute(1, torch.ones(2, D), *pairs_of(chosen[[0, 2]], torch.ones(2, 2)))


# Mapped experts ---------------------------------------------------------------------------------------------------


class Mappable:
    """Experts whose sizes a kernel computes, in a file of bfloat16."""

    def __init__(self, folder: Path, hold: Callable[[int], bool]) -> None:
        generator = torch.Generator().manual_seed(5)
        shapes = {"down": (64, 32), "gate": (32, 64), "up": (32, 64)}
        names = [(layer, index, part) for layer in (0, 1) for index in range(EXPERTS) for part in shapes]
        tensors = {
            f"{layer}.{index}.{part}": (torch.randn(shapes[part], generator=generator) / 8).to(torch.bfloat16)
            for layer, index, part in names
        }
        save_file(tensors, folder / "model.safetensors")
        ranges = read_header(folder / "model.safetensors")
        experts: dict[ExpertId, dict[str, TensorRange]] = {}
        for layer, index, part in names:
            experts.setdefault(ExpertId(layer, index), {})[part] = ranges[f"{layer}.{index}.{part}"]
        maths = ExpertMaths()
        self.checkpoint = Checkpoint(folder, {}, "qwen3_moe", maths, (0, 1), EXPERTS, 2, 64, 32, experts, {}, ())
        self.truth = load_from_checkpoint(self.checkpoint, experts, torch.float32)
        self.shard = load_from_checkpoint(self.checkpoint, [e for e in experts if hold(e.index)], torch.float32)
        held = {layer: self.shard.held(layer) for layer in (0, 1)}
        self.own = OwnExperts(self.shard, self.checkpoint, held, 0, moves=True)

    def check(self, seed: int, layer: int = 0, count: int = 6) -> None:
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randn(count, 64, generator=generator)
        chosen = torch.stack([torch.randperm(EXPERTS, generator=generator)[:3] for _ in range(count)])
        pairs = pairs_of(chosen, torch.rand(count, 3, generator=generator))
        assert torch.equal(self.own.compute(layer, rows, *pairs), self.truth.compute(layer, rows, *pairs))


def test_experts_that_lie_ready_are_computed_where_they_lie_and_take_no_room(tmp_path):
    model = Mappable(tmp_path, lambda index: index < 2)
    for seed in range(10):
        model.check(seed, layer=seed % 2)
    assert model.own.mapped == 2 * (EXPERTS - 2)
    assert (model.own.loads, model.own.borrowed) == (0, 0)
    assert model.shard.nbytes == 2 * 2 * model.shard.expert_bytes
    (tmp_path / "model.safetensors").unlink()  # what was mapped stays, and nothing is opened again
    model.check(11)


def test_a_mapped_expert_may_be_held_and_given_up(tmp_path):
    model = Mappable(tmp_path, lambda index: index < 2)
    for seed in range(4):
        model.check(seed)
    expert = ExpertId(0, 5)
    mapped_at = model.shard._layers[0].experts[5].down.data_ptr()
    model.own.keep(expert)
    assert model.own._held[0] == {0, 1, 5}
    assert model.own.mapped == EXPERTS - 3
    assert model.shard._layers[0].experts[5].down.data_ptr() != mapped_at
    model.check(5)
    model.own.give_up(expert)
    assert model.own.mapped == EXPERTS - 2
    assert model.shard._layers[0].experts[5].down.data_ptr() == mapped_at  # the copy's memory is free again
    model.own.give_up(ExpertId(0, 1))  # never mapped so far
    assert not model.shard.holds(ExpertId(0, 1))
    for seed in range(6, 12):
        model.check(seed)
    assert (model.own.loads, model.own.borrowed, model.own.mapped) == (1, 0, EXPERTS - 1)


def test_what_cannot_be_mapped_is_read_which_says_what_is_wrong(tmp_path):
    model = Mappable(tmp_path, lambda index: False)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(DataError, match=r"reading model\.safetensors"):
        model.check(0)
    assert (model.own.mapped, model.own.borrowed) == (0, 0)


def test_law_1_threads_compute_the_same_while_mapped_experts_are_held_and_given_up(tmp_path):
    model = Mappable(tmp_path, lambda index: index < 2)
    failures: list[object] = []

    def work(seed: int) -> None:
        for step in range(60):
            try:
                model.check(1000 * seed + step, layer=0)
            except (AssertionError, KvasirError) as error:
                failures.append((seed, step, error))

    threads = [in_thread(lambda seed=seed: work(seed)) for seed in range(2)]
    chance = random.Random(3)
    for _ in range(40):
        held = model.own._held[0]
        model.own.give_up(ExpertId(0, chance.choice(sorted(held))))
        model.own.keep(ExpertId(0, chance.choice(sorted(set(range(EXPERTS)) - model.own._held[0]))))
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert not failures
    assert model.own.borrowed == 0
