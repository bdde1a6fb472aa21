"""What strangers may send ends in a KvasirError or in a value that is spelled the same again, for every decoder."""

from __future__ import annotations

import tracemalloc

import pytest
from fuzz_targets import TARGETS, hold, seeds
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SEEDS = seeds()
STEADY = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
HUGE = (b"\xff" * 4, b"\xff" * 8, b"\x5b" + b"\xff" * 8, b"\x9b\x7f" + b"\xff" * 7)
UNPROVEN = ("signed record", "ticket")  # whose only accepted inputs carry a signature or a checksum


def test_every_target_has_a_seed_that_it_accepts():
    assert set(SEEDS) == set(TARGETS)
    for name, examples in SEEDS.items():
        for example in examples:
            assert hold(name, example) or name in UNPROVEN, name


@pytest.mark.parametrize("name", TARGETS)
@STEADY
@given(data=st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(name, data):
    hold(name, data)


@st.composite
def mutated(draw, examples: list[bytes]) -> bytes:
    """An accepted input with a few bytes flipped, cut, doubled or put in."""
    data = bytearray(draw(st.sampled_from(examples)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(("flip", "cut", "insert", "repeat", "huge"))):
            case "flip" if at < len(data):
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del data[at : at + draw(st.integers(1, 16))]
            case "insert":
                data[at:at] = draw(st.binary(min_size=1, max_size=8))
            case "repeat":
                data[at:at] = data[at : at + draw(st.integers(1, 32))]
            case _:  # the lengths of liars
                huge = draw(
                    st.sampled_from((b"\xff" * 4, b"\xff" * 8, b"\x5b" + b"\xff" * 8, b"\x9b\x7f" + b"\xff" * 7))
                )
                data[at : at + len(huge)] = huge
    return bytes(data)


@pytest.mark.parametrize("name", TARGETS)
@STEADY
@given(st.data())
def test_mutated_inputs_are_read_or_refused(name, data):
    hold(name, data.draw(mutated(SEEDS[name])))


@pytest.mark.parametrize("name", TARGETS)
def test_each_cut_and_each_flipped_bit_is_read_or_refused(name):
    for example in SEEDS[name]:
        for at in range(len(example)):
            hold(name, example[:at])
            hold(name, example[:at] + bytes((example[at] ^ 0x80,)) + example[at + 1 :])


LIARS = {
    "safetensors": [
        (2**64 - 1).to_bytes(8, "little") + b"{}",
        (99_999_999).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"{}" + bytes(9),
    ],
    "rpc frames": [b"\xff\xff\xff\xff" + bytes(10)],
    "block answer": [b"\x00\x00\x10\x00", b"\xfd\xff\xff\xff"],
    "manifest": [b"\xbb" + b"\xff" * 8, b"\x9b\x00\x00\x00\x01\x00\x00\x00\x00", b"\x81" * 4000],
    "blob node": [b"\x5b\x7f" + b"\xff" * 7, b"\xd8\x1c\x81\xd8\x1d\x00"],
    "want-list": [b"\x9a\xff\xff\xff\xff"],
    "expert request": [b"\x51\x4b\x01\x00" + b"\xff" * 16],
}


@pytest.mark.parametrize("name", LIARS)
def test_a_length_that_lies_allocates_nothing(name):
    for liar in LIARS[name]:
        hold(name, liar)
        tracemalloc.start()
        assert not hold(name, liar)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 256 * 1024, (name, liar[:20], peak)
