"""Settings: which source wins, what every kind of value may be, and that no wrong one passes unnamed."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from kvasir_node.base.errors import UsageError
from kvasir_node.base.settings import (
    GIB,
    MIB,
    PROFILES,
    SECTIONS,
    Settings,
    default_config_path,
    default_data_dir,
    load_settings,
    parse_size,
    setting_keys,
)


def file_with(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "config.toml"
    path.write_text("\n".join(("version = 1", *lines)), encoding="utf-8")
    return path


def value_of(settings: Settings, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(settings, section), name)


def test_without_sources_all_is_default():
    settings = load_settings()
    assert settings == Settings(origins=settings.origins)
    assert set(settings.origins) == set(setting_keys())
    assert set(settings.origins.values()) == {"default"}


SOURCES = [
    (("default",), 2.0),
    (("profile",), 10.0),
    (("profile", "file"), 3.0),
    (("profile", "file", "env"), 4.0),
    (("profile", "file", "env", "flag"), 5.0),
    (("file",), 3.0),
    (("env",), 4.0),
    (("file", "flag"), 5.0),
]


@pytest.mark.parametrize(("sources", "expected"), SOURCES)
def test_the_strongest_source_wins(tmp_path, sources, expected):
    key = "market.poll_interval_s"
    profile = ['profile = "wan"'] if "profile" in sources else []
    own = ["[market]", "poll_interval_s = 3"] if "file" in sources else []
    settings = load_settings(
        file=file_with(tmp_path, "[node]", *profile, *own),
        env={"KVASIR_MARKET__POLL_INTERVAL_S": "4"} if "env" in sources else {},
        flags={key: "5"} if "flag" in sources else {},
    )
    assert (value_of(settings, key), settings.origins[key]) == (expected, sources[-1])


def test_the_profile_itself_follows_the_order(tmp_path):
    file = file_with(tmp_path, "[node]", 'profile = "wan"')
    assert load_settings(file=file, flags={"node.profile": "lan"}).market.poll_interval_s == 4.0
    assert load_settings(file=file, env={"KVASIR_NODE__PROFILE": "local"}).market.poll_interval_s == 2.0


@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_is_valid(profile):
    settings = load_settings(flags={"node.profile": profile})
    for key, value in PROFILES[profile].items():
        assert (value_of(settings, key), settings.origins[key]) == (value, "profile")


GOOD = [
    ("coordinator.slots", "8", 8),
    ("coordinator.slots", 8.0, 8),
    ("coordinator.queue", 0, 0),
    ("market.poll_interval_s", 1, 1.0),
    ("market.poll_interval_s", "0.25", 0.25),
    ("worker.memory_bytes", "512M", 512 * MIB),
    ("worker.memory_bytes", "1.5GiB", 3 * GIB // 2),
    ("worker.memory_bytes", 100, 100),
    ("api.body_bytes_max", "1K", 1024),
    ("api.body_bytes_max", 2048, 2048),
    ("fanout.enabled", "off", False),
    ("fanout.enabled", True, True),
    ("node.roles", "hub, worker", ("hub", "worker")),
    ("node.roles", ["hub", "hub"], ("hub",)),
    ("network.join", "", ()),
    ("network.listen", ["/ip4/127.0.0.1/tcp/0"], ("/ip4/127.0.0.1/tcp/0",)),
    ("network.upnp", "off", "off"),
    (
        "network.dht",
        "/ip4/192.0.2.1/tcp/1/p2p/x, /ip4/192.0.2.2/tcp/1/p2p/y",
        ("/ip4/192.0.2.1/tcp/1/p2p/x", "/ip4/192.0.2.2/tcp/1/p2p/y"),
    ),
    ("node.device", "cuda:1", "cuda:1"),
    ("api.listen", "", ""),
]


@pytest.mark.parametrize(("key", "given_value", "expected"), GOOD)
def test_good_values(key, given_value, expected):
    found = value_of(load_settings(flags={key: given_value}), key)
    assert (found, type(found)) == (expected, type(expected))


BAD = [
    ("coordinator.slots", "many"),
    ("network.upnp", "yes"),
    ("coordinator.slots", 2.5),
    ("coordinator.slots", "2.5"),
    ("coordinator.slots", 0),
    ("coordinator.slots", -1),
    ("coordinator.slots", True),
    ("coordinator.slots", float("inf")),
    ("coordinator.slots", float("nan")),
    ("coordinator.slots", [4]),
    ("coordinator.slots", {"a": 4}),
    ("coordinator.slots", 10**20),
    ("market.poll_interval_s", "nan"),
    ("market.poll_interval_s", "inf"),
    ("market.poll_interval_s", 0),
    ("market.poll_interval_s", None),
    ("coordinator.calm_busy_ratio", 1.1),
    ("worker.memory_bytes", "5 apples"),
    ("worker.memory_bytes", "9" * 400 + "T"),
    ("worker.memory_bytes", "5i"),
    ("fanout.enabled", "maybe"),
    ("fanout.enabled", 2),
    ("fanout.when", "sometimes"),
    ("fanout.wire", "int4"),
    ("node.roles", "boss"),
    ("node.roles", []),
    ("node.roles", 5),
    ("node.roles", {"hub": 1}),
    ("network.join", [1]),
    ("node.name", 5),
    ("node.device", "gpu"),
    ("compute.slowdown", 0.5),
    ("compute.slowdown", 2000),
    ("compute.answer_delay_s", -0.1),
    ("node.profile", "moon"),
    ("node.profile", 5),
]


@pytest.mark.parametrize(("key", "given_value"), BAD)
def test_bad_values_are_named(key, given_value):
    with pytest.raises(UsageError, match=key):
        load_settings(flags={key: given_value})


@pytest.mark.parametrize(
    ("key", "given_value", "words"),
    [
        ("worker.memory_bytes", "2X", "a size is a number with an optional K, M, G or T, such as 512M; got '2X'"),
        ("market.poll_interval_s", "inf", r"above zero and below 1e\+15; got 'inf'"),
        ("coordinator.queue", 10**20, r"zero or more and below 1e\+15"),
    ],
)
def test_a_bad_number_is_told_what_would_be_good(key, given_value, words):
    with pytest.raises(UsageError, match=f"setting {key} ?.*{words}"):
        load_settings(flags={key: given_value})


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ({"flags": {"coordinator.slot": 1}}, "coordinator.slot"),
        ({"flags": {"slots": 1}}, "slots"),
        ({"env": {"KVASIR_COORDINATOR__SLOT": "1"}}, "coordinator.slot"),
        ({"env": {"KVASIR_BOSS__SLOTS": "1"}}, "boss.slots"),
    ],
)
def test_an_unknown_key_is_named_with_its_neighbours(source, named):
    with pytest.raises(UsageError, match=named) as caught:
        load_settings(**source)
    assert "slots" in str(caught.value) or "coordinator" in str(caught.value)


FILES = [
    ("", "version = 1"),
    ("version = 2", "version = 1"),
    ("version = 1\nslots = 4", "'slots' is not a section"),
    ("version = 1\n[boss]\nx = 1", "unknown section"),
    ("version = 1\n[coordinator]\nslot = 4", "unknown setting 'coordinator.slot'"),
    ("version = 1\n[coordinator.slots]\nx = 4", "coordinator.slots"),
    ("version = 1\n[coordinator]\nslots = 1979-05-27", "coordinator.slots"),
    ("version =", "cannot be read"),
    ("version = 1\nx = " + "[" * 5000, "cannot be read"),
]


@pytest.mark.parametrize(("text", "message"), FILES)
def test_a_wrong_file_is_told(tmp_path, text, message):
    path = tmp_path / "config.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        load_settings(file=path)


def test_an_unreadable_file_is_told(tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for path in (tmp_path, tmp_path / "bytes"):
        with pytest.raises(UsageError, match="cannot be read"):
            load_settings(file=path)


def test_a_missing_file_matters_only_when_it_was_asked_for(tmp_path):
    assert load_settings(file=tmp_path / "none").coordinator == Settings().coordinator
    with pytest.raises(UsageError, match="config init"):
        load_settings(file=tmp_path / "none", file_required=True)


def test_secrets_come_from_env_or_file_and_are_never_echoed(tmp_path):
    assert load_settings(env={"KVASIR_API__KEY": "s3cret"}).api.key == "s3cret"
    assert load_settings(file=file_with(tmp_path, "[api]", 'key = "s3cret"')).api.key == "s3cret"
    with pytest.raises(UsageError, match="KVASIR_API__KEY") as flagged:
        load_settings(flags={"api.key": "s3cret"})
    with pytest.raises(UsageError) as mistyped:
        load_settings(file=file_with(tmp_path, "[api]", "key = 31337"))
    assert "s3cret" not in str(flagged.value)
    assert "31337" not in str(mistyped.value)


def test_the_rest_of_the_environment_is_none_of_our_business():
    settings = load_settings(env={"PATH": "/bin", "KVASIR": "1", "KVASIR_HOME": "x", "OTHER__KEY": "1"})
    assert set(settings.origins.values()) == {"default"}


def test_default_places_follow_xdg(monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", "/c")
    monkeypatch.setenv("XDG_DATA_HOME", "/d")
    assert (default_config_path(), default_data_dir()) == (Path("/c/kvasir-node/config.toml"), Path("/d/kvasir-node"))


def test_every_number_and_size_has_its_unit_in_its_name():
    """STYLE D: so that a person who sets it need not look it up."""
    units = ("_s", "_bytes", "_max", "_ratio", "_factor", "_after")
    # Counts whose noun is the unit.
    counts = {"threads", "slots", "queue", "context", "prefill_chunk", "private_layers"}
    counts |= {"slowdown", "max_slowdown"}  # times
    counts |= {"niceness"}  # a word of its own on every system
    for section in SECTIONS:
        for item in fields(getattr(Settings(), section)):
            if item.type in ("int", "float"):
                assert item.name.endswith(units) or item.name in counts, f"{section}.{item.name}"


@pytest.mark.parametrize(
    ("text", "size"), [("0", 0), ("12", 12), ("1 k", 1024), ("1.5M", 1572864), ("2TiB", 2 * 1024**4)]
)
def test_sizes(text, size):
    assert parse_size(text) == size


@examples(max_examples=100, deadline=None, derandomize=True)
@given(st.text(max_size=12))
def test_a_size_is_a_number_or_an_error(text):
    try:
        assert parse_size(text) >= 0
    except UsageError as error:
        message = str(error)
        assert repr(text) in message


anything = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.text() | st.integers())


@examples(max_examples=100, deadline=None, derandomize=True)
@given(st.sampled_from([key for key in setting_keys() if key != "api.key"]), anything)
def test_any_value_is_taken_as_its_kind_or_refused_by_name(key, value):
    kind = type(value_of(Settings(), key))
    try:
        found = value_of(load_settings(flags={key: value}), key)
        refusal = ""
    except UsageError as error:
        found, refusal = None, str(error)
    assert isinstance(found, kind) or key in refusal
