from __future__ import annotations

import threading

from fanout_fakes import in_thread

from kvasir_node.roles.quiescence import Quiescence


def test_it_settles_at_once_when_nobody_uses_anything():
    Quiescence().settle()


def test_it_waits_for_those_who_began_before_and_not_for_those_who_come_later():
    quiescence = Quiescence()
    waiting = threading.Event()

    def settle() -> None:
        waiting.set()
        quiescence.settle()

    with quiescence.use():
        with quiescence.use():
            thread = in_thread(settle)
            assert waiting.wait(5)
        thread.join(0.05)
        assert thread.is_alive()
        later = quiescence.use()
        later.__enter__()
    thread.join(5)
    assert not thread.is_alive()
    later.__exit__(None, None, None)
