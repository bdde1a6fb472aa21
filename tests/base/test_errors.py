import pytest

from kvasir_node.base import errors
from kvasir_node.base.errors import Blame, KvasirError, Misbehaved, QueueFull, RejectReason, UsageError

# what a caller can rely on: who must change something, whether to try again, and the two codes
TABLE = {
    "KvasirError": (Blame.US, False, 500, 1),
    "UsageError": (Blame.CALLER, False, 400, 2),
    "NotFoundError": (Blame.CALLER, False, 404, 2),
    "PeerError": (Blame.PEER, True, 503, 3),
    "Unreachable": (Blame.PEER, True, 503, 3),
    "CallTimeout": (Blame.PEER, True, 503, 3),
    "Overloaded": (Blame.PEER, True, 503, 3),
    "Misbehaved": (Blame.PEER, False, 503, 3),
    "DataError": (Blame.DATA, False, 500, 5),
    "CapacityError": (Blame.CAPACITY, True, 503, 6),
    "QueueFull": (Blame.CAPACITY, True, 429, 6),
    "BugError": (Blame.US, False, 500, 1),
}
CLASSES = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, KvasirError)
}


def test_every_error_class_is_in_the_table():
    assert set(CLASSES) == set(TABLE)


@pytest.mark.parametrize("name", TABLE)
def test_whom_an_error_blames_and_what_it_answers(name):
    kind = CLASSES[name]
    assert (kind.blame, kind.retryable, kind.http_status, kind.exit_code) == TABLE[name]


def test_errors_carry_what_their_reader_needs():
    assert str(UsageError("wrong", param="n", code="too_many")) == "wrong"
    assert (UsageError("wrong", param="n").param, UsageError("wrong").code) == ("n", None)
    assert Misbehaved(RejectReason.STALE, "old").reason is RejectReason.STALE
    assert QueueFull("full", retry_after_s=2.5).retry_after_s == 2.5


def test_reasons_are_short_words_for_metrics():
    assert all(reason.value.replace("_", "").isalpha() and reason.value.islower() for reason in RejectReason)
