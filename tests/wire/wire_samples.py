"""One sample of each control message with its committed spelling, and strategies for what a hostile peer may write."""

import cbor2
from hypothesis import settings
from hypothesis import strategies as st

from kvasir_node.base.ids import DAG_CBOR_CODEC, ModelId, PeerId, SliceId, cid_of
from kvasir_node.decide.demand import Wanted
from kvasir_node.wire.lists import TableRow
from kvasir_node.wire.messages import (
    About,
    Attachment,
    DemandRecord,
    DemandTable,
    HubGreeting,
    HubNews,
    LeaseVerdict,
    NoOffer,
    Offer,
    Poll,
    Renewal,
    Renewals,
    Standing,
    Verdicts,
    read_poll_answer,
)

STEADY = settings(max_examples=200, deadline=None, derandomize=True)
MODEL = ModelId(cid_of(b"a model", DAG_CBOR_CODEC))
ADDRESS = "/ip4/192.0.2.1/tcp/9481"
PART = SliceId(3, 0, 7)
WANTS = (Wanted(PART, 2, (PeerId("bob"), PeerId("ann"))), Wanted(SliceId(3, 8, 15), 1, (PeerId("ann"),)))
DEMAND = DemandRecord(
    1_700_000_000_000,
    7,
    1_700_000_000.5,
    30.0,
    MODEL,
    "demo",
    "bfloat16",
    1 << 24,
    (ADDRESS,),
    4,
    4,
    9,
    WANTS,
    (PeerId("eve"),),
    kept=(PART,),
)
TABLE = DemandTable(
    1_700_000_000_000,
    9,
    1_700_000_000.25,
    30.0,
    (ADDRESS,),
    (TableRow(MODEL, PART, 2, 1, 1),),
    {MODEL: 1 << 24},
    300,
    ((PeerId("carl"), MODEL, PART, 1),),
)

# name -> (message, its bytes, how it is read)
SAMPLES = {
    "demand": (
        DEMAND,
        "b4626174fb41d954fc4020000063736571076374746cf94f80646275737904646b6570744403000700646e616d656464"
        "656d6f646e656172fb3f747ae147ae147b65616464727381772f6970342f3139322e302e322e312f7463702f39343831"
        "6562797465731a010000006564747970656862666c6f617431366565706f63681b0000018bcfe56800656d6f64656c78"
        "3b626166797265696578373666646b76636e7a35616b336261656f62326568686f7776693561787a646a356a6c797567"
        "79346166367a6868776764716570656572738263626f6263616e6e65736c6f7473046577616e747342040266636f7069"
        "65734204026670726f76656e43000300667175657565640966736c696365734403000701677265667573656481636576"
        "65",
        DemandRecord.from_bytes,
    ),
    "poll": (
        Poll(1 << 31, ((MODEL, PART),), (), ((PeerId("carl"), 0.25),)),
        "a464627573798064686176658182783b626166797265696578373666646b76636e7a35616b336261656f62326568686f"
        "7776693561787a646a356a6c79756779346166367a686877676471440300070064727474738182646361726cf9340066"
        "6d656d6f72791a80000000",
        Poll.from_bytes,
    ),
    "offer": (
        Offer("18c.1", MODEL, "float32", PART, PeerId("carl"), (ADDRESS,), 15.0),
        "a76374746cf94b806470656572646361726c65616464727381772f6970342f3139322e302e322e312f7463702f393438"
        "3165647479706567666c6f61743332656c65617365653138632e31656d6f64656c783b62616679726569657837366664"
        "6b76636e7a35616b336261656f62326568686f7776693561787a646a356a6c79756779346166367a6868776764716573"
        "6c69636565333a302d37",
        read_poll_answer,
    ),
    "no offer": (NoOffer(2.5), "a1657265747279f94100", read_poll_answer),
    "renewals": (
        Renewals(
            (
                Renewal("18c.1", MODEL, PART, PeerId("carl"), serving=True, progress=42),
                Renewal("18c.2", MODEL, SliceId(4, 0, 7), PeerId("dora"), serving=False, progress=0),
                Renewal("18c.3", MODEL, SliceId(4, 0, 7), PeerId("carl"), serving=False, progress=0),
            )
        ),
        "a365706565727382646361726c64646f7261666c65617365738386653138632e31000065333a302d37f5182a86653138"
        "632e32000165343a302d37f40086653138632e33000065343a302d37f400666d6f64656c7381783b6261667972656965"
        "78373666646b76636e7a35616b336261656f62326568686f7776693561787a646a356a6c79756779346166367a686877"
        "676471",
        Renewals.from_bytes,
    ),
    "verdicts": (
        Verdicts((LeaseVerdict(15.0, ""), LeaseVerdict(0.0, "no longer needed"))),
        "a16876657264696374738282f94b806082f90000706e6f206c6f6e676572206e6565646564",
        Verdicts.from_bytes,
    ),
    "news": (
        HubNews(1_700_000_000_000, True, ((PeerId("carl"), MODEL, PART, 1), (PeerId("dora"), MODEL, PART, 0))),
        "a363616c6cf56565706f63681b0000018bcfe56800666c65617365738284646361726c783b6261667972656965783736"
        "66646b76636e7a35616b336261656f62326568686f7776693561787a646a356a6c79756779346166367a686877676471"
        "440300070041028464646f7261783b626166797265696578373666646b76636e7a35616b336261656f62326568686f77"
        "76693561787a646a356a6c79756779346166367a68687767647144030007004100",
        HubNews.from_bytes,
    ),
    "greeting": (
        HubGreeting(1_700_000_000_000),
        "a16565706f63681b0000018bcfe56800",
        HubGreeting.from_bytes,
    ),
    "attachment": (
        Attachment(MODEL, "bfloat16", (PART,)),
        "a36564747970656862666c6f61743136656d6f64656c783b626166797265696578373666646b76636e7a35616b336261"
        "656f62326568686f7776693561787a646a356a6c79756779346166367a68687767647166736c696365738165333a302d"
        "37",
        Attachment.from_bytes,
    ),
    "standing": (
        Standing(PART, "proven"),
        "a265736c69636565333a302d376573746174656670726f76656e",
        Standing.from_bytes,
    ),
    "table": (
        TABLE,
        "a8626174fb41d954fc4010000063736571096374746cf94f806469646c6519012c65616464727381772f6970342f3139"
        "322e302e322e312f7463702f393438316565706f63681b0000018bcfe56800666c65617365738184646361726c783b62"
        "6166797265696578373666646b76636e7a35616b336261656f62326568686f7776693561787a646a356a6c7975677934"
        "6166367a68687767647144030007004102666d6f64656c738186783b626166797265696578373666646b76636e7a3561"
        "6b336261656f62326568686f7776693561787a646a356a6c79756779346166367a6868776764711a0100000044030007"
        "00410441024102",
        DemandTable.from_bytes,
    ),
    "about": (
        About("host", "0.1.0", ("hub", "worker"), (ADDRESS,), (("hub", bytes(range(8))),)),
        "a5646e616d6564686f737465616464727381772f6970342f3139322e302e322e312f7463702f3934383165726f6c6573"
        "826368756266776f726b6572666772616e74738182636875624800010203040506076776657273696f6e65302e312e30",
        About.from_bytes,
    ),
}

plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 64), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
"""What the codec reads, apart from depth."""

any_values = st.recursive(
    plain_values | st.floats() | st.integers(-(1 << 20_000), 1 << 20_000) | st.just(cbor2.undefined),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=4)
        | st.builds(
            cbor2.CBORTag, st.sampled_from([2, 4, 5, 28, 29, 30, 35, 36, 55799]) | st.integers(0, 1 << 32), inner
        )
    ),
    max_leaves=12,
)
"""Whatever CBOR can say."""


def flips(data: bytes) -> list[bytes]:
    """`data` with each single bit flipped, and with each byte turned round."""
    masks = (*(1 << bit for bit in range(8)), 0xFF)
    return [data[:at] + bytes((data[at] ^ mask,)) + data[at + 1 :] for at in range(len(data)) for mask in masks]
