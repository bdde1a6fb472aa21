"""The books of the prefix cache: which slot is taken, and what is found in which."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_node.model.prefix_cache import REUSE_MIN_TOKENS, PrefixCache

LONG = list(range(100, 300))
OTHER = list(range(1000, 1100))


def fill(cache: PrefixCache, prompt: list[int], answer: int = 0) -> int:
    """A request comes, is computed and stays; returns its slot."""
    slot = cache.take(prompt)
    refill = cache.refill(slot, prompt)
    refill.tokens.extend((prompt + [7] * answer)[refill.length :])
    cache.wrote(slot, len(prompt) + answer)
    return slot


def serve(cache: PrefixCache, prompt: list[int], answer: int = 0, *, keeps: bool = True) -> int:
    slot = fill(cache, prompt, answer)
    cache.give_back(slot, keeps=keeps)
    return slot


def make(slots: int = 3, *, reuses: bool = True, whole: bool = False) -> PrefixCache:
    return PrefixCache(slots, reuses=reuses, whole=whole)


def test_empty_slots_come_first_and_then_the_longest_unused():
    cache = make()
    assert [serve(cache, [number] * 20) for number in range(5)] == [0, 1, 2, 0, 1]


def test_a_slot_that_holds_the_beginning_of_a_prompt_is_taken_and_nothing_is_copied():
    cache = make()
    serve(cache, OTHER)
    slot = serve(cache, LONG)
    assert cache.take([*LONG, 1, 2, 3]) == slot
    refill = cache.refill(slot, [*LONG, 1, 2, 3])
    assert (refill.source, refill.length, refill.tokens, refill.dirty) == (slot, 200, LONG, 200)


def test_a_slot_that_holds_much_more_is_copied_from_and_kept():
    cache = make()
    slot = serve(cache, [*LONG, *OTHER])
    prompt = [*LONG, 1, 2, 3]
    taken = cache.take(prompt)
    assert taken != slot
    refill = cache.refill(taken, prompt)
    assert (refill.source, refill.length, refill.dirty) == (slot, 200, 0)
    assert serve(cache, [*LONG, *OTHER, 5]) == slot


def test_what_was_copied_from_counts_as_used():
    cache = make()
    old = serve(cache, [*LONG, *OTHER])
    serve(cache, [1] * 50)
    busy = fill(cache, LONG[:150])
    cache.give_back(busy, keeps=True)
    assert [serve(cache, [number] * 50) for number in (2, 3)] == [1, old]


def test_a_running_request_is_a_source_too_and_grows():
    cache = make()
    slot = fill(cache, LONG[:50], answer=20)
    prompt = LONG[:50] + [7] * 30
    other = cache.take(prompt)
    refill = cache.refill(other, prompt)
    assert (refill.source, refill.length) == (slot, 70)


def test_the_last_token_of_a_prompt_is_always_computed():
    cache = make(1)
    serve(cache, LONG)
    assert cache.refill(cache.take(LONG), LONG).length == len(LONG) - 1


def test_few_tokens_are_not_worth_it():
    cache = make(2)
    serve(cache, LONG)
    for length in (REUSE_MIN_TOKENS - 1, REUSE_MIN_TOKENS):
        slot = cache.take(LONG[:length] + OTHER)
        found = cache.refill(slot, LONG[:length] + OTHER)
        assert found.length == (length if length == REUSE_MIN_TOKENS else 0)
        cache.give_back(slot, keeps=False)


def test_a_model_with_states_goes_on_only_where_a_sequence_ended():
    cache = make(whole=True)
    slot = serve(cache, LONG)
    for prompt, length in ((LONG, 0), (LONG[:150] + OTHER, 0), ([*LONG, 1], 200)):
        taken = cache.take(prompt)
        assert cache.refill(taken, prompt).length == length
        cache.give_back(taken, keeps=False)
    assert taken == slot


def test_a_slot_that_is_not_to_be_kept_is_no_source_but_stays_dirty():
    cache = make(1)
    serve(cache, LONG, keeps=False)
    assert cache.refill(cache.take(LONG), LONG).dirty == 200
    never = make(1, reuses=False)
    serve(never, LONG)
    found = never.refill(never.take(LONG), LONG)
    assert (found.length, found.dirty) == (0, 200)


def test_a_slot_given_back_before_it_was_filled_holds_what_it_held():
    cache = make(1)
    serve(cache, LONG)
    cache.give_back(cache.take(OTHER), keeps=True)
    assert cache.refill(cache.take(LONG), LONG).length == len(LONG) - 1


def test_what_was_forgotten_is_no_source_nor_are_those_who_go_on_or_copy_from_them():
    cache = make(4)
    serve(cache, LONG)
    slot = cache.take(OTHER)
    running = cache.refill(slot, OTHER)
    running.tokens.extend(OTHER[:50])
    cache.forget()
    running.tokens.extend(OTHER[50:])
    twin = cache.take(OTHER)
    cache.replace(twin, slot, list(OTHER))
    for prompt in (LONG, OTHER):
        taken = cache.take(prompt)
        assert cache.refill(taken, prompt).length == 0
        cache.give_back(taken, keeps=True)
    cache.give_back(slot, keeps=True)
    assert cache.refill(cache.take(OTHER), OTHER).length == 0


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 90), st.integers(0, 9), st.booleans()), max_size=30),
)
def test_what_is_found_is_what_the_slots_hold_and_no_slot_is_lost(slots, reuses, whole, steps):
    """Against slots that really remember: each has the tokens that were written there, leftovers included."""
    cache = make(slots, reuses=reuses, whole=whole)
    memory = [[0] * 200 for _ in range(slots)]
    busy: list[int] = []
    for kind, length, answer, keeps in steps:
        if not cache.free_count:
            cache.give_back(busy.pop(0), keeps=keeps)
        prompt = ([1] * 40 + [ord(kind)] * 60)[:length] if kind != "d" else [1, ord(kind)] * length
        slot = cache.take(prompt)
        assert slot not in busy
        refill = cache.refill(slot, prompt)
        assert refill.length < len(prompt)
        memory[slot][refill.length : refill.dirty] = [0] * max(0, refill.dirty - refill.length)
        memory[slot][: refill.length] = memory[refill.source][: refill.length]
        assert refill.tokens == prompt[: refill.length] == memory[slot][: refill.length]
        assert not any(memory[slot][refill.length :])
        tokens = prompt + [ord(kind)] * answer
        memory[slot][: len(tokens)] = tokens
        refill.tokens.extend(tokens[refill.length :])
        cache.wrote(slot, len(tokens))
        busy.append(slot)
        assert cache.free_count == slots - len(busy)
