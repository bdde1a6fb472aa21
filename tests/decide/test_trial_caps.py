import pytest

from kvasir_node.decide.trial_caps import TrialCaps, address_range


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("/ip4/198.51.100.7", "/ip4/198.51.100.200/tcp/9481", True),
        ("/ip4/198.51.100.7", "/ip4/198.51.101.7", False),
        ("/ip4/192.168.1.7", "/ip4/192.168.1.8", False),
        ("/ip4/10.0.0.7", "/ip4/10.0.0.8", False),
        ("/ip4/172.31.0.7", "/ip4/172.31.0.8", False),
        ("/ip4/172.32.0.7", "/ip4/172.32.0.8", True),
        ("/ip4/127.0.0.1", "/ip4/127.0.0.1/tcp/1", True),
        ("/ip6/2001:db8:1:2::1", "/ip6/2001:db8:1:2:ffff::9/tcp/1", True),
        ("/ip6/2001:db8:1:2::1", "/ip6/2001:db8:1:3::1", False),
        ("/ip6/::ffff:198.51.100.7", "/ip4/198.51.100.9", True),
        ("/ip6/::1", "/ip6/::2", True),
        ("/ip6/::1", "/ip4/0.0.0.1", False),
        ("/dns4/a.example", "/dns4/b.example", False),
        ("", "", True),
    ],
)
def test_what_one_customer_usually_gets_whole_is_one_range(one, other, same):
    assert (address_range(one) == address_range(other)) is same


@pytest.mark.parametrize("text", ["/ip4/300.1.2.3", "/ip4/", "/ip6/zz", "no multiaddr", "/memory/7"])
def test_what_names_no_ip_address_is_a_range_of_its_own(text):
    assert address_range(text) == text


def test_a_hundred_addresses_of_one_range_buy_no_more_than_the_cap():
    caps = TrialCaps(trials_max=8, window_s=60.0, ranges_max=100)
    begun = 0
    for number in range(100):
        for address in (f"/ip4/198.51.100.{number}", f"/ip6/2001:db8::{number:x}"):
            if caps.allow(address, 1.0):
                caps.begin(address, 1.0)
                begun += 1
    assert begun == 16
    assert caps.allow("/ip4/203.0.113.1", 1.0)
    assert not caps.allow("/ip4/198.51.100.1", 60.9)
    assert caps.allow("/ip4/198.51.100.1", 61.0)


def test_a_trial_that_ended_well_does_not_count_and_is_taken_back_once():
    caps = TrialCaps(trials_max=1, window_s=60.0, ranges_max=100)
    caps.begin("/ip4/198.51.100.1", 0.0)
    caps.refund("/ip4/198.51.100.1", 0.0)
    caps.refund("/ip4/198.51.100.1", 0.0)
    caps.begin("/ip4/198.51.100.2", 1.0)
    assert not caps.allow("/ip4/198.51.100.3", 1.0)


def test_law_7_ranges_are_bounded_and_forgotten_with_the_window():
    caps = TrialCaps(trials_max=8, window_s=60.0, ranges_max=20)
    for number in range(200):
        address = f"/ip4/198.51.{number}.1"
        if caps.allow(address, 0.0):
            caps.begin(address, 0.0)
    assert len(caps._begun) == 20
    caps.trim(60.0)
    assert len(caps._begun) == 0
