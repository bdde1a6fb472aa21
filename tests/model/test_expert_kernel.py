"""Experts by kernel: against the naive version, in every kind and form, and the same bits in any company."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_node.base.errors import BugError, UsageError
from kvasir_node.base.ids import ExpertId
from kvasir_node.model.expert_kernel import COLUMNS, ExpertForm, ExpertKernel
from kvasir_node.model.experts import ExpertShard, stored_dtype
from kvasir_node.model.kernels import library
from kvasir_node.model.kernels.abi import GLU, INT8
from kvasir_node.model.kernels.library import SOURCES, kernels, read_source_hash, source_hash
from kvasir_node.model.maths import ExpertMaths
from kvasir_node.model.threads import ONE_THREAD, Threads

D, WIDE, E = 96, 160, 5
CPU = torch.device("cpu")
MATHS = {
    "glu": ExpertMaths(),
    "clamped": ExpertMaths(gate="clamped", limit=0.5),
    "gptoss": ExpertMaths(gate="gptoss", limit=0.7, alpha=1.702, bias=True),
}


def parts_of(maths: ExpertMaths, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"gate": (WIDE, D), "up": (WIDE, D), "down": (D, WIDE)}
    if maths.bias:
        shapes |= {"gate_bias": (WIDE,), "up_bias": (WIDE,), "down_bias": (D,)}
    return {part: (torch.randn(shape, generator=generator) / 4).to(dtype) for part, shape in shapes.items()}


def shard_of(name: str, stored: torch.dtype, threads: Threads = ONE_THREAD) -> ExpertShard:
    shard = ExpertShard(MATHS[name], D, WIDE, torch.float32, stored=stored, threads=threads)
    for index in range(E):
        parts = parts_of(MATHS[name], torch.bfloat16 if stored is torch.int8 else stored, index)
        shard.add(ExpertId(0, index), parts)
    return shard


STORED = (torch.float32, torch.bfloat16, torch.int8)
SHARDS = {(name, stored): shard_of(name, stored) for name in MATHS for stored in STORED}
PAIRS = st.lists(st.tuples(st.integers(0, 10), st.integers(0, E - 1)), min_size=1, max_size=60)


def tensors_of(pairs: list[tuple[int, int]], seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    row, expert = torch.tensor(pairs, dtype=torch.int64).unbind(1)
    return torch.randn(11, D, generator=generator), row, expert, torch.rand(len(pairs), generator=generator)


def test_the_code_is_made_from_these_sources():
    assert read_source_hash() == source_hash(), (
        f"run python -m kvasir_node.model.kernels.build after changing {SOURCES}"
    )


@settings(max_examples=150, deadline=None, derandomize=True)
@given(PAIRS, st.sampled_from(list(SHARDS)), st.integers(0, 1000))
def test_the_kernel_equals_the_naive_version(pairs, which, seed):
    rows, *rest = tensors_of(pairs, seed)
    shard = SHARDS[which]
    fast, slow = shard.compute(0, rows, *rest), shard.compute_naive(0, rows, *rest)
    assert fast.dtype is torch.float32
    torch.testing.assert_close(fast, slow, rtol=1e-5, atol=2e-5)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(PAIRS, st.sampled_from(list(SHARDS)), st.integers(0, 1000))
def test_a_rows_bits_do_not_depend_on_its_company(pairs, which, seed):
    rows, row, expert, weight = tensors_of(pairs, seed)
    shard = SHARDS[which]
    together = shard.compute(0, rows, row, expert, weight)
    for index in set(row.tolist()):
        mine = row == index
        alone = shard.compute(0, rows[index : index + 1], row[mine] * 0, expert[mine], weight[mine])
        assert torch.equal(alone[0], together[index])


@pytest.mark.parametrize("count", [2, 3])
def test_threads_change_no_bit(count):
    pairs = [(row, expert) for row in range(11) for expert in range(E)]
    for (name, stored), shard in SHARDS.items():
        given_tensors = tensors_of(pairs, 3)
        several = shard_of(name, stored, Threads(count))
        assert torch.equal(several.compute(0, *given_tensors), shard.compute(0, *given_tensors))


def test_int8_weights_are_multiplied_by_the_factor_of_their_output():
    generator = torch.Generator().manual_seed(1)
    shapes = ((WIDE, D), (WIDE, D), (D, WIDE))
    matrices = [torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8) for shape in shapes]
    factors = [torch.rand(shape[0], generator=generator) / 100 for shape in shapes]
    table = torch.tensor([[each.data_ptr() for each in (*matrices, *factors)] + [0] * 3])
    gate, up, down = (matrix * factor[:, None] for matrix, factor in zip(matrices, factors, strict=True))
    kernel = ExpertKernel(ExpertForm(INT8, GLU, WIDE, 0.0, 0.0), ONE_THREAD)
    rows, row = torch.randn(7, D, generator=generator), torch.arange(7)
    sums = kernel.sums(table, rows, row, row * 0, torch.ones(7))
    expected = (torch.nn.functional.silu(rows @ gate.T) * (rows @ up.T)) @ down.T
    torch.testing.assert_close(sums, expected, rtol=1e-4, atol=1e-4)


def rounding_error(seed: int) -> float:
    """Of one layer's sums with random normal weights, relative, int8 against float32."""
    exact = ExpertShard(MATHS["glu"], D, WIDE)
    rounded = ExpertShard(MATHS["glu"], D, WIDE, stored=torch.int8)
    for index in range(E):
        for shard in (exact, rounded):
            shard.add(ExpertId(0, index), parts_of(MATHS["glu"], torch.float32, seed + index))
    given_tensors = tensors_of([(n % 11, n % E) for n in range(44)], seed)
    sums = exact.compute(0, *given_tensors)
    return float((rounded.compute(0, *given_tensors) - sums).norm() / sums.norm())


def test_int8_experts_of_random_weights_are_about_a_hundredth_off():
    errors = [rounding_error(seed) for seed in range(0, 100, 10)]
    assert min(errors) > 0.005
    assert max(errors) < 0.015


def test_int8_is_refused_where_no_kernel_computes():
    for maths, width, device in (
        (ExpertMaths(activation="gelu"), D, "cpu"),
        (MATHS["glu"], D + 16, "cpu"),
        (MATHS["glu"], D, "meta"),
    ):
        with pytest.raises(UsageError, match=r"set coordinator\.experts to \"stored\""):
            ExpertShard(maths, width, WIDE, device=device, stored=torch.int8)


def test_an_int8_expert_takes_a_byte_for_each_weight_and_a_factor_for_each_output():
    shard = shard_of("glu", torch.int8)
    weights = shard._layers[0].experts[0]
    assert weights.up_factors is not None
    assert weights.down_factors is not None
    held = (weights.up, weights.down, weights.up_factors, weights.down_factors)
    assert shard.expert_bytes == sum(each.nbytes for each in held) == 3 * D * WIDE + 4 * (2 * WIDE + D)
    assert shard_of("gptoss", torch.int8).expert_bytes == shard.expert_bytes + 4 * (2 * WIDE + D)


@pytest.mark.parametrize("joined", [True, False])
def test_views_give_the_bits_of_a_copy_and_only_what_lies_ready_can_be_viewed(joined):
    parts = {name: tensor.clone() for name, tensor in parts_of(MATHS["glu"], torch.bfloat16, 1).items()}
    if joined:
        parts = {"gate_up": torch.cat((parts["gate"], parts["up"])), "down": parts["down"]}
    specs = {name: ("BF16", tuple(tensor.shape), tensor.nbytes) for name, tensor in parts.items()}
    shard = ExpertShard(MATHS["glu"], D, WIDE, stored=torch.bfloat16)
    shard.add(ExpertId(0, 0), parts)
    assert shard.can_view(specs)
    shard.add_views(ExpertId(0, 1), parts)
    assert shard.nbytes == shard.expert_bytes
    rows, row, _, weight = tensors_of([(n, 0) for n in range(11)], 2)
    copied, viewed = (shard.compute(0, rows, row, torch.full_like(row, index), weight) for index in (0, 1))
    assert torch.equal(copied, viewed)
    torch.testing.assert_close(viewed, shard.compute_naive(0, rows, row, row * 0 + 1, weight), rtol=1e-5, atol=2e-5)
    parts["down"].zero_()
    assert not shard.compute(0, rows, row, row * 0 + 1, weight).any()  # a view it is

    assert not ExpertShard(MATHS["glu"], D, WIDE).can_view(specs)  # float32 from BF16
    assert not ExpertShard(MATHS["glu"], D, WIDE, stored=torch.int8).can_view(specs)
    assert not ExpertShard(ExpertMaths(transposed=True), D, WIDE, stored=torch.bfloat16).can_view(specs)
    assert not ExpertShard(MATHS["gptoss"], D, WIDE, stored=torch.bfloat16).can_view(specs)
    assert not ExpertShard(ExpertMaths(activation="gelu"), D, WIDE, torch.bfloat16).can_view(specs)


def test_not_a_number_stays_one():
    for shard in SHARDS.values():
        for bad in (float("nan"), float("inf")):
            rows = torch.ones(2, D)
            rows[1, 5] = bad
            both = torch.arange(2)
            sums = shard.compute(0, rows, both, both, torch.ones(2))
            assert torch.isfinite(sums[0]).all()
            assert not torch.isfinite(sums[1]).any()


def test_large_values_stay_finite_where_they_are_so_in_torch():
    shard = SHARDS["glu", torch.float32]
    rows, zero = torch.full((1, D), 300.0), torch.zeros(1, dtype=torch.int64)
    fast, slow = (compute(0, rows, zero, zero, torch.ones(1)) for compute in (shard.compute, shard.compute_naive))
    torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-6 * float(slow.abs().max()))


def test_an_expert_that_is_absent_or_beyond_the_table_is_named():
    shard = shard_of("glu", torch.bfloat16)
    shard.remove(ExpertId(0, 2))
    for threads in (ONE_THREAD, Threads(2)):
        kernel = ExpertKernel(ExpertForm(1, GLU, WIDE, 0.0, 0.0), threads)
        for expert in (E, 1000, -1):
            zero = torch.zeros(1, dtype=torch.int64)
            table = torch.zeros(E, COLUMNS, dtype=torch.int64)
            assert kernel.sums(table, torch.ones(1, D), zero, zero + expert, torch.ones(1)) == expert
    with pytest.raises(BugError, match="expert 2 of layer 0"):
        shard.compute(0, torch.ones(3, D), torch.arange(3), torch.arange(3), torch.ones(3))


def test_bfloat16_weights_are_kept_as_they_are_where_a_kernel_computes():
    bf16, f32 = ("BF16", (WIDE, D), 0), ("F32", (WIDE, D), 0)

    def stored(
        maths: ExpertMaths = MATHS["glu"], width: int = D, parts=(bf16,), device: torch.device = CPU
    ) -> torch.dtype:
        return stored_dtype(maths, width, WIDE, parts, torch.float32, device)

    assert stored() is torch.bfloat16
    assert stored(parts=(bf16, f32)) is torch.float32
    assert stored(width=D + 16) is torch.float32
    assert stored(maths=ExpertMaths(activation="gelu")) is torch.float32
    assert stored(device=torch.device("meta")) is torch.float32
    assert 2 * shard_of("glu", torch.bfloat16).expert_bytes == shard_of("glu", torch.float32).expert_bytes


def test_all_kernels_are_there():
    assert all(callable(kernel) for kernel in kernels().values())


def test_a_machine_where_they_cannot_be_compiled_goes_on_without_them(tmp_path):
    # A copy of the module, so that what this process has loaded stays; its code is cut short.
    broken = tmp_path / "kernels.ll.xz"
    broken.write_bytes(library.CODE_FILE.read_bytes()[:1000])
    program = (
        "import sys, pathlib\n"
        "from kvasir_node.model.kernels import library\n"
        f"library.CODE_FILE = pathlib.Path({str(broken)!r})\n"
        "assert not library.is_able() and not library.kernels()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "torch computes instead" in done.stderr
