import pytest
import trio

from kvasir_node.base.errors import UsageError
from kvasir_node.net.listener import bind_all, expand_host

INTERFACES = ["127.0.0.1", "192.0.2.7", "::1", "2001:db8::7", "fe80::1"]


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("192.0.2.7", ["192.0.2.7"]),
        ("198.51.100.1", ["198.51.100.1"]),
        ("0.0.0.0", ["192.0.2.7", "127.0.0.1"]),
        ("::", ["2001:db8::7", "::1"]),
    ],
)
def test_a_wildcard_becomes_concrete_addresses_loopback_last(host, expected):
    assert expand_host(host, INTERFACES) == expected


async def test_port_zero_is_told_as_the_bound_port():
    (listener,) = await bind_all(["/ip4/0.0.0.0/tcp/0"])
    addresses = listener.addresses()
    await listener.close()
    assert any(text.startswith("/ip4/127.0.0.1/tcp/") for text in addresses)
    assert not any("0.0.0.0" in text or text.endswith("/tcp/0") for text in addresses)


async def test_a_port_in_use_is_named_with_the_remedy():
    (first,) = await bind_all(["/ip4/127.0.0.1/tcp/0"])
    taken = first.addresses()[0]
    with pytest.raises(UsageError, match=rf"{taken}.*in use.*--listen"):
        await bind_all(["/ip4/127.0.0.1/tcp/0", taken])
    await first.close()


@pytest.mark.parametrize("text", ["junk", "/ip4/127.0.0.1", "/ip4/127.0.0.1/udp/1", "/ip4/1.2.3.4/tcp/x", ""])
async def test_what_is_no_listen_address_is_refused(text):
    with pytest.raises(UsageError, match="listen"):
        await bind_all([text])


async def test_an_address_of_another_machine_is_refused():
    with pytest.raises(UsageError, match=r"cannot listen on /ip4/203\.0\.113\.9/tcp/0"):
        await bind_all(["/ip4/203.0.113.9/tcp/0"])


async def test_closing_ends_serving():
    (listener,) = await bind_all(["/ip4/127.0.0.1/tcp/0"])

    async def handle(stream):
        await stream.aclose()

    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(listener.serve, handle, nursery)
            await trio.lowlevel.checkpoint()
            await listener.close()
