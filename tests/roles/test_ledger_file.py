"""What a coordinator remembers of failed workers from one life to the next."""

from __future__ import annotations

import logging
import random

import pytest
import trio

from kvasir_node.base.ids import ModelId, PeerId, SliceId, cid_of
from kvasir_node.decide.ledger import Ledger, LedgerLimits, Standing
from kvasir_node.roles.content import run_inline
from kvasir_node.roles.ledger_file import DOUBTS_MAX, FILE_NAME, SAVE_INTERVAL_S, LedgerFile

MODEL, OTHER_MODEL = ModelId(cid_of(b"a model")), ModelId(cid_of(b"another model"))
ANN, BOB, CYD = PeerId("ann"), PeerId("bob"), PeerId("cyd")
PART, OTHER = SliceId(0, 0, 7), SliceId(1, 0, 7)
LIMITS = LedgerLimits(5.0, 600.0, 5, 600.0, trials_per_address_max=8, trial_window_s=60.0)
HOME = "/ip4/198.51.100.1"
WALL = 1.8e9


def new_ledger() -> Ledger:
    ledger = Ledger(LIMITS)
    for peer in (ANN, BOB, CYD):
        ledger.attach(peer, PART)
    return ledger


async def live(path, ledger, *, wall=WALL, model=MODEL, act=lambda ledger, now: None) -> Ledger:
    """One life of a coordinator with a new ledger: reads the file, lets things happen, ends a moment later."""
    file = LedgerFile(path, model, lambda: wall)
    file.restore(ledger, trio.current_time())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(file.keep, ledger)
        await trio.sleep(0.01)
        act(ledger, trio.current_time())
        nursery.cancel_scope.cancel()
    return ledger


def all_kinds(ledger: Ledger, now: float) -> None:
    ledger.begin_trial(ANN, PART, HOME, now)
    ledger.right(ANN, PART, now)
    ledger.failed(BOB, PART, now, "silent", wrong=False)
    ledger.caught(CYD, now, "differs")
    ledger.caught(CYD, now, "differs")


async def test_law_8_a_restart_demerits_nobody_and_forgets_no_ban_and_no_suspicion(tmp_path):
    path = tmp_path / FILE_NAME
    await live(path, new_ledger(), act=all_kinds)
    following = await live(path, Ledger(LIMITS), wall=WALL + 2.0)
    for peer in (ANN, BOB, CYD):
        for part in (PART, OTHER):
            following.attach(peer, part)
    assert {following.standing(CYD, part) for part in (PART, OTHER)} == {Standing.BANNED}
    now = trio.current_time()
    assert following.standing(BOB, PART) is Standing.SUSPECT
    assert not following.may_try(BOB, PART, HOME, now + 2.5)
    assert following.may_try(BOB, PART, HOME, now + 3.1)
    assert (following.standing(ANN, PART), following.proven()) == (Standing.NEW, ())
    assert following.may_try(ANN, PART, HOME, now)
    assert {view.peer: view.failures for view in following.pairs() if view.slice == PART} == {ANN: 0, BOB: 1, CYD: 2}


async def test_a_ban_outlives_many_restarts_and_other_models_keep_theirs(tmp_path):
    path = tmp_path / FILE_NAME
    await live(path, new_ledger(), act=lambda ledger, now: ledger.failed(BOB, PART, now, "silent", wrong=False))
    await live(path, new_ledger(), model=OTHER_MODEL, act=lambda ledger, now: ledger.caught(CYD, now, "differs"))
    for life in range(3):
        ledger = await live(path, Ledger(LIMITS), wall=WALL + life * 1e6)
        assert [(doubt.peer, doubt.slice) for doubt in ledger.doubts(trio.current_time())] == [(BOB, PART)]
        assert ledger.strikes() == {CYD: 1}  # a liar is one whatever it computed


async def test_it_is_written_while_the_node_runs_and_only_when_something_happened(tmp_path, autojump_clock):
    path, ledger = tmp_path / FILE_NAME, new_ledger()
    file = LedgerFile(path, MODEL, lambda: WALL, run_inline)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(file.keep, ledger)
        await trio.sleep(10)
        assert not path.exists()
        ledger.failed(ANN, PART, 0.0, "silent", wrong=False)
        await trio.sleep(2 * SAVE_INTERVAL_S)
        assert path.exists()
        written = path.stat().st_mtime_ns
        await trio.sleep(10)
        assert path.stat().st_mtime_ns == written
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("harm", ["empty", "cut", "garbage", "a folder", "huge", "newer", "flipped"])
def test_a_file_that_cannot_be_read_is_an_empty_one_with_a_warning(tmp_path, caplog, harm):
    path = tmp_path / FILE_NAME
    trio.run(lambda: live(path, new_ledger(), act=all_kinds))
    data = path.read_bytes()
    if harm == "a folder":
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes(
            {
                "empty": b"",
                "cut": data[:-5],
                "garbage": b"\xff" * 100,
                "huge": bytes(9 << 20),
                "newer": data.replace(b"\x61v\x01", b"\x61v\x02"),
                "flipped": data.replace(b"banned\xf5", b"banned\x05"),
            }[harm]
        )
    ledger = Ledger(LIMITS)
    with caplog.at_level(logging.WARNING):
        LedgerFile(path, MODEL).restore(ledger, 0.0)
    assert (ledger.pairs(), ledger.strikes()) == ((), {})
    assert "cannot be read" in caplog.text


def test_whatever_byte_is_flipped_it_is_read_or_refused_and_never_breaks_a_start(tmp_path):
    path = tmp_path / FILE_NAME
    trio.run(lambda: live(path, new_ledger(), act=all_kinds))
    data, rng = path.read_bytes(), random.Random(1)
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        LedgerFile(path, MODEL).restore(Ledger(LIMITS), 0.0)


def test_without_a_file_everybody_is_new(tmp_path, caplog):
    ledger = Ledger(LIMITS)
    LedgerFile(tmp_path / FILE_NAME, MODEL).restore(ledger, 0.0)
    assert (ledger.pairs(), caplog.text) == ((), "")


async def test_a_disk_that_is_full_is_a_warning(tmp_path, caplog):
    path = tmp_path / "no such folder" / FILE_NAME
    await live(path, new_ledger(), act=all_kinds)
    assert "cannot be kept" in caplog.text


async def test_law_7_what_is_kept_is_bounded_and_bans_are_what_stays(tmp_path):
    def fail(ledger: Ledger, now: float) -> None:
        for number in range(DOUBTS_MAX + 100):
            peer = PeerId(f"peer {number}")
            ledger.attach(peer, PART)
            ledger.failed(peer, PART, now, "silent", wrong=False)
        ledger.caught(CYD, now, "differs")
        ledger.caught(CYD, now, "differs")

    path = tmp_path / FILE_NAME
    await live(path, new_ledger(), act=fail)
    following = Ledger(LIMITS)
    LedgerFile(path, MODEL, lambda: WALL).restore(following, 0.0)
    assert len(following.pairs()) == DOUBTS_MAX
    assert following.standing(CYD, PART) is Standing.BANNED
