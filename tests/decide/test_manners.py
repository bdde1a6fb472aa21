import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_node.base.errors import UsageError
from kvasir_node.decide.manners import (
    BUSY_S,
    IDLE_S,
    Manners,
    QuietHours,
    Senses,
    Wishes,
    parse_quiet_hours,
)

NIGHT, NOON = parse_quiet_hours(("22:00-07:00", "12:00-13:30"))
FREE = Senses(on_battery=False, others_load=0.0, minute_of_day=10 * 60)


def reason(wishes: Wishes, senses: Senses) -> str:
    manners = Manners(wishes)
    manners.observe(senses, 0.0)
    manners.observe(senses, BUSY_S)
    return manners.reason


@pytest.mark.parametrize(
    ("wishes", "senses", "words"),
    [
        (Wishes(), FREE, ""),
        (Wishes(), Senses(on_battery=True, others_load=1.0, minute_of_day=0), ""),
        (Wishes(only_on_ac=True), FREE, ""),
        (Wishes(only_on_ac=True), Senses(True, 0.0, 0), "on battery"),
        (Wishes(only_when_idle=True), FREE, ""),
        (
            Wishes(only_when_idle=True),
            Senses(False, 0.63, 0),
            "this machine is in use: others take 63% of its processors",
        ),
        (Wishes(quiet_hours=(NIGHT, NOON)), FREE, ""),
        (Wishes(quiet_hours=(NIGHT, NOON)), Senses(False, 0.0, 23 * 60), "quiet hours until 07:00"),
        (Wishes(quiet_hours=(NIGHT, NOON)), Senses(False, 0.0, 12 * 60), "quiet hours until 13:30"),
        (Wishes(), Senses(False, 0.0, 0, metered="wwan0"), "the metered network wwan0 is up"),
    ],
)
def test_each_wish_is_obeyed_and_told_in_words(wishes, senses, words):
    assert reason(wishes, senses) == words


@pytest.mark.parametrize(
    ("hours", "inside", "outside"),
    [
        (NIGHT, (22 * 60, 23 * 60 + 59, 0, 6 * 60 + 59), (7 * 60, 12 * 60, 21 * 60 + 59)),
        (NOON, (12 * 60, 13 * 60 + 29), (0, 11 * 60 + 59, 13 * 60 + 30, 23 * 60)),
    ],
)
def test_quiet_hours_end_before_their_last_minute_and_may_lie_beyond_midnight(hours, inside, outside):
    assert all(minute in hours for minute in inside)
    assert not any(minute in hours for minute in outside)


@given(st.integers(0, 1439), st.integers(0, 1439))
def test_quiet_hours_and_the_other_way_round_make_a_day(first, end):
    if first != end:
        both = [(minute in QuietHours(first, end), minute in QuietHours(end, first)) for minute in range(1440)]
        assert all(one is not other for one, other in both)


@pytest.mark.parametrize(
    "text", ["", "22-7", "22:00", "24:00-01:00", "7:00-9:00", "07:00-07:00", "07:60-08:00", "٢٢:00-07:00"]
)
def test_what_is_no_time_of_day_is_refused_by_name(text):
    with pytest.raises(UsageError, match=r"worker\.quiet_hours are written HH:MM-HH:MM"):
        parse_quiet_hours((text,))


def test_an_owners_word_stands_above_all_and_ends_only_what_it_began():
    manners = Manners(Wishes(only_on_ac=True))
    manners.pause()
    assert manners.reason == "paused by its owner"
    manners.observe(Senses(True, 0.0, 0), 0.0)
    assert manners.reason == "paused by its owner"
    manners.resume()
    assert manners.reason == "on battery"
    manners.observe(FREE, 1.0)
    assert manners.reason == ""


def test_a_machine_is_busy_after_a_while_of_load_and_idle_after_a_longer_one_without():
    manners, now = Manners(Wishes(only_when_idle=True)), 0.0

    def loaded(load: float, lasts_s: float) -> list[bool]:
        nonlocal now
        seen = []
        for _ in range(int(lasts_s)):
            manners.observe(Senses(False, load, 0), now)
            seen.append(manners.reason != "")
            now += 1.0
        return seen

    assert not any(loaded(0.9, BUSY_S))  # a page that loads
    assert not any(loaded(0.1, 5))
    assert not any(loaded(0.9, BUSY_S))
    assert all(loaded(0.9, 5))
    assert all(loaded(0.2, 200))  # neither busy nor idle: as it was
    assert all(loaded(0.1, IDLE_S))
    assert all(loaded(0.9, 5))  # the minute begins anew
    assert all(loaded(0.1, IDLE_S))
    assert not any(loaded(0.1, 5))
