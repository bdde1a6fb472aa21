from __future__ import annotations

import pytest
import torch
from fanout_fakes import EXPERTS, LAYERS, D, in_thread, make_checkpoint, make_own, make_shard, random_rows

from kvasir_node.base.errors import DataError
from kvasir_node.base.ids import ExpertId
from kvasir_node.model.trunk import LocalDispatch
from kvasir_node.roles.dispatch import pick_pairs

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
    assert len(own._borrowed) == 1


def test_a_checkpoint_that_is_gone_is_told_as_bad_data(tmp_path):
    checkpoint = make_checkpoint(tmp_path)
    own = make_own(checkpoint, lambda i: False)
    (tmp_path / "experts.safetensors").unlink()
    rows, chosen, weights = random_rows(0)
    with pytest.raises(DataError):
        own.compute(0, rows, *pairs_of(chosen, weights))
    assert len(own._borrowed) == 0
    assert not own._shard.holds(ExpertId(0, 0))


def test_sums_are_those_of_the_request_alone(tmp_path):
    own = make_own(make_checkpoint(tmp_path), lambda i: i % 2 == 0)
    rows, chosen, weights = random_rows(3)
    request, used = pick_pairs(1, rows, chosen, weights, chosen >= EXPERTS // 2)
    there = weights * (chosen >= EXPERTS // 2)
    expected = own.compute(1, rows, *pairs_of(chosen, there))[used]
    torch.testing.assert_close(own.sums(request), expected)
