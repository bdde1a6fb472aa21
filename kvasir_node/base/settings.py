"""All settings: names, defaults, units, meaning, and where each value came from.

The only module that reads the environment. Every other module receives the smallest frozen part it needs.
Order, strongest first: flag > `KVASIR_SECTION__KEY` > file > profile > default.
"""

from __future__ import annotations

import os
import re
import tomllib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from kvasir_node.base.errors import UsageError

FILE_VERSION = 1
SECONDS = 1.0
MINUTES = 60 * SECONDS
KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB


@dataclass(frozen=True, slots=True)
class NodeSettings:
    name: str = ""  # shown to other peers; empty = the host's name and the end of the peer id
    roles: tuple[str, ...] = ("coordinator", "hub", "worker")  # what this node does: any of these
    data_dir: str = ""  # empty = $XDG_DATA_HOME/kvasir-node
    profile: str = "local"  # local | lan | wan: a set of defaults for the distances of the swarm
    device: str = "auto"  # auto | cpu | cuda:N
    threads: int = 0  # that compute one thing together; 0 = half the logical processors
    drain_timeout_s: float = 20 * SECONDS  # SIGTERM: how long running answers may take to finish


@dataclass(frozen=True, slots=True)
class NetworkSettings:
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/9481",)  # multiaddrs where other peers reach us; port 0 = any
    join: tuple[str, ...] = ()  # tickets or multiaddrs
    allow: tuple[str, ...] = ()  # peer ids: no others are let in, whatever ticket they have; empty = all are
    refuse: tuple[str, ...] = ()  # peer ids that are not let in, whatever ticket they have
    mdns: bool = True  # hubs on the local network are found; a hub says there that it is one, and of which swarm
    dht: tuple[str, ...] = ()  # multiaddrs of nodes of a libp2p DHT where hubs are told and found; empty = none is used
    upnp: str = "auto"  # auto | off: a home router is asked to let connections in, while others cannot reach this node
    old_secret_s: float = 7 * 24 * 60 * MINUTES  # how long a secret still counts that another one has replaced
    connect_timeout_s: float = 4 * SECONDS  # one address of one peer
    keepalive_interval_s: float = 2 * SECONDS  # a ping on a connection that was silent this long
    keepalive_timeout_s: float = 3 * SECONDS  # a peer that does not answer it this long is gone
    peers_max: int = 512  # connections to other peers
    streams_max: int = 256  # of one connection
    stream_window_bytes: int = 8 * MIB  # received and not yet read, one stream
    connection_buffer_bytes: int = 64 * MIB  # received and not yet read, all streams of one connection
    frame_bytes_max: int = 32 * MIB  # one call's body
    relay: bool = True  # a hub carries bytes between members that cannot reach each other
    relay_reservations_max: int = 256  # members for whom a hub keeps a place, so that others reach them through it
    relay_circuits_max: int = 128  # connections carried by a hub at once ...
    relay_circuits_per_peer_max: int = 16  # ... and those of one member, at either end
    relay_circuit_buffer_bytes: int = 2 * MIB  # of one connection, received and not passed on yet, both ways ...
    relay_buffer_bytes: int = 256 * MIB  # ... and of all; one that would not fit any more is refused
    relay_circuit_bytes: int = 64 * GIB  # of one connection, both ways; then its ends have to make another
    relay_circuit_s: float = 1440 * MINUTES  # ... as after this time
    relay_hubs_max: int = 2  # hubs that keep a place for this node while nobody can dial it; one may die


@dataclass(frozen=True, slots=True)
class ApiSettings:
    listen: str = "127.0.0.1:9480"  # HOST:PORT; port 0 = any; empty = no API
    key: str = ""  # required as soon as `listen` is not loopback; only KVASIR_API__KEY or the file sets it
    body_bytes_max: int = 4 * MIB  # one request's body
    heartbeat_s: float = 10 * SECONDS  # an SSE comment when nothing else was sent


@dataclass(frozen=True, slots=True)
class CoordinatorSettings:
    model: str = "demo"  # a name or id from `kvasir-node ls`, or the folder of a checkpoint
    slots: int = 4  # requests computed at once
    queue: int = 64  # requests that wait; one more is refused with 429
    context: int = 0  # tokens of prompt + answer per request; 0 = the model's own limit, at most 4096
    prefill_chunk: int = 256  # prompt tokens computed in one step
    prefix_cache: bool = True  # a prompt that begins like another one is copied so far, not computed again
    saturated_after_s: float = 0.5 * SECONDS  # every slot busy and the queue not empty this long
    calm_after_s: float = 5 * SECONDS  # queue empty and few slots busy this long
    calm_busy_ratio: float = 0.75  # few = at most this share of the slots
    dtype: str = "auto"  # auto | float32 | bfloat16: what the trunk and the experts compute in
    experts: str = "stored"  # stored | int8: their weights in memory; int8 is smaller, quicker and not exact
    hold: str = "all"  # all | none | half: which routed experts are held here (half = the even ones of each layer)
    memory_bytes: int = 0  # experts in memory; what does not fit is computed from the disk; 0 = 60 % of the free memory


@dataclass(frozen=True, slots=True)
class FanoutSettings:
    enabled: bool = True  # false = all experts are computed here
    when: str = "saturated"  # saturated | always: at any load, if it pays | forced: even at a loss, for tests
    private_layers: int = 0  # the first so many layers are offered to nobody: what enters them tells most of a prompt
    max_slowdown: float = 4.0  # a token takes at most this × its time when idle, or as long as it would alone
    bytes_s: int = 0  # of all rows that are planned to travel, both ways; 0 = no limit
    deadline_factor: float = 4.0  # deadline of a call = this × its expected time ...
    deadline_floor_s: float = 0.15 * SECONDS  # ... but never less than this: a busy machine is no silent worker
    hedge_floor_s: float = 0.01 * SECONDS  # a call that is later than its like is computed a second way, but not before
    deadline_ceiling_s: float = 2 * SECONDS  # ... nor more than this; also the deadline of a trial
    verify: str = "sample"  # sample | double: some remote rows are recomputed and compared, or all of them
    wire: str = "compute"  # compute | bfloat16 | int8: what rows travel in; less than computed only if found harmless
    spot_check_ratio: float = 0.01  # share of remote rows that are recomputed and compared
    trial_rows_max: int = 16  # rows of one trial
    trials_per_address_max: int = 8  # trials of one network address under way or failed within `trial_window_s`
    trial_window_s: float = 60 * SECONDS  # see `trials_per_address_max`
    cool_off_s: float = 5 * SECONDS  # first pause after a failure; doubles with each one
    cool_off_max_s: float = 10 * MINUTES  # ... up to this
    ban_after: int = 5  # wrong answers in trials without a right one between them; in served work two are enough
    proof_ttl_s: float = 10 * MINUTES  # proof ends this long after the last right answer
    in_flight_max: int = 8  # calls under way to one worker
    express: bool = True  # near workers are called over a connection of their own, past the loop (docs/protocols.md)


@dataclass(frozen=True, slots=True)
class MarketSettings:
    slice_bytes: int = 16 * MIB  # a slice of experts is at most this large (or one expert)
    slices_max: int = 4096  # of one model
    surge_copies_max: int = 2  # copies of a slice wanted at full pressure, beyond what is missing
    surge_decay_s: float = 5 * SECONDS  # ... and one fewer each time that this machine alone would have done so long
    report_interval_s: float = 1 * SECONDS  # coordinator to hub while demand changes
    demand_ttl_s: float = 30 * SECONDS  # a report of demand counts this long
    gossip_interval_min_s: float = 1 * SECONDS  # between two tables of one hub while demand changes
    gossip_refresh_s: float = 10 * SECONDS  # ... and while it does not
    gossip_bytes_s: int = 60  # of the tables of all hubs, by each node that hears them, over ten minutes
    poll_interval_s: float = 2 * SECONDS  # an idle worker, ± half
    lease_ttl_s: float = 15 * SECONDS  # a lease that is not renewed ends after this
    renew_interval_s: float = 3 * SECONDS  # a worker renews its lease this often
    progress_timeout_s: float = 60 * SECONDS  # a lease that is not proven by then ends
    tenure_min_s: float = 10 * SECONDS  # a worker that serves stays at least this long
    surplus_grace_s: float = 5 * SECONDS  # demand must be gone this long before a worker is let go
    guest_layers_max: int = 4  # that a hub gives to one guest (a page on a phone), if it is quick enough for so many
    leases_max: int = 65536  # of one hub
    issuers_max: int = 1024  # coordinators that report to one hub
    clock_skew_max_s: float = 10 * MINUTES  # a signed record is refused when clocks differ by more


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    memory_bytes: int = 2 * GIB  # experts held in memory
    slices_max: int = 64  # leases of one worker at once
    threads: int = 0  # that compute one thing together for others; 0 = node.threads
    niceness: int = 0  # 1 to 19: how far this whole process gives way to others of the machine
    only_on_ac: bool = False  # true = a machine that runs on its battery lends nothing
    only_when_idle: bool = False  # true = nor one whose processors others use to more than a quarter
    quiet_hours: tuple[str, ...] = ()  # such as 22:00-07:00, local time: nothing is lent then
    metered_interfaces: tuple[str, ...] = ()  # such as wwan0: while one of these networks is up nothing is lent


@dataclass(frozen=True, slots=True)
class ComputeSettings:
    slowdown: float = 1.0  # this node stands for one so many times slower (roles/slowdown.py); 1 = off
    answer_delay_s: float = 0.0  # a worker holds each answer back this long, as if it was that far away


@dataclass(frozen=True, slots=True)
class StoreSettings:
    block_bytes: int = 1 * MIB  # checkpoints are indexed in blocks of this size; another size gives another model id
    fetch_in_flight_max: int = 8  # blocks asked of one provider at once
    fetch_timeout_s: float = 20 * SECONDS  # one block
    fetch_attempts_max: int = 8  # of one block, over all providers
    quota_bytes: int = 64 * GIB  # blocks fetched from others; the longest unused go first, those in use never; 0 = none
    upload_bytes_s: int = 0  # blocks sent to all peers together; 0 = no limit
    download_bytes_s: int = 0  # blocks fetched from all peers together; 0 = no limit


@dataclass(frozen=True, slots=True)
class PhoneSettings:
    listen: str = ""  # HOST:PORT that serves the page for phones, and nothing else; empty = only the API's port does
    code_s: float = 10 * MINUTES  # a code that lets one page join serves this long


@dataclass(frozen=True, slots=True)
class LogSettings:
    level: str = "info"  # debug | info | warning | error; of single parts too, such as info,net=debug,market=warning
    format: str = "auto"  # auto | console | json


@dataclass(frozen=True, slots=True)
class Settings:
    """One node's settings. `origins` maps "section.key" to default, profile, file, env or flag."""

    node: NodeSettings = NodeSettings()
    network: NetworkSettings = NetworkSettings()
    api: ApiSettings = ApiSettings()
    coordinator: CoordinatorSettings = CoordinatorSettings()
    fanout: FanoutSettings = FanoutSettings()
    market: MarketSettings = MarketSettings()
    worker: WorkerSettings = WorkerSettings()
    compute: ComputeSettings = ComputeSettings()
    store: StoreSettings = StoreSettings()
    phone: PhoneSettings = PhoneSettings()
    log: LogSettings = LogSettings()
    origins: Mapping[str, str] = field(default_factory=dict[str, str])


SECTIONS = tuple(f.name for f in fields(Settings) if f.name != "origins")
ROLES = ("coordinator", "hub", "worker")
PROFILES: Mapping[str, Mapping[str, Any]] = {
    "local": {},
    "lan": {"market.poll_interval_s": 4.0, "market.lease_ttl_s": 20.0},
    "wan": {
        "market.poll_interval_s": 10.0,
        "market.lease_ttl_s": 45.0,
        "market.renew_interval_s": 10.0,
        "market.tenure_min_s": 60.0,
        "market.surplus_grace_s": 30.0,
        "market.surge_decay_s": 30.0,
        "fanout.deadline_floor_s": 0.3,
        "fanout.deadline_ceiling_s": 5.0,
        "network.connect_timeout_s": 10.0,
    },
}
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "node.profile": tuple(PROFILES),
    "coordinator.dtype": ("auto", "float32", "bfloat16"),
    "coordinator.experts": ("stored", "int8"),
    "coordinator.hold": ("all", "none", "half"),
    "fanout.when": ("saturated", "always", "forced"),
    "fanout.verify": ("sample", "double"),
    "fanout.wire": ("compute", "bfloat16", "int8"),
    "network.upnp": ("auto", "off"),
    "log.format": ("auto", "console", "json"),
}
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_PARTS = ("api", "fanout", "market", "model", "net", "store")  # of the program; surfaces/log.py says what is in each
_MAY_BE_ZERO = {
    "compute.answer_delay_s",
    "coordinator.queue",
    "coordinator.context",
    "coordinator.memory_bytes",
    "node.threads",
    "worker.threads",
    "worker.niceness",
    "network.old_secret_s",
    "fanout.bytes_s",
    "fanout.private_layers",
    "fanout.spot_check_ratio",
    "market.surge_copies_max",
    "store.quota_bytes",
    "store.upload_bytes_s",
    "store.download_bytes_s",
}
_NUMBER_END = 1e15  # above it a float no longer tells whole numbers apart
_AT_LEAST = {"compute.slowdown": 1, "fanout.max_slowdown": 1}
_AT_MOST = {  # far above what any machine can use: a slip of the finger is told before it costs all memory
    "node.threads": 1024,
    "worker.threads": 1024,
    "worker.niceness": 19,
    "compute.slowdown": 1000,
    "compute.answer_delay_s": 10,
    "coordinator.slots": 4096,
    "coordinator.queue": 1_000_000,
}
_SECRETS = {"api.key"}
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*((?:[KMGT]i?)?B?)\Z", re.ASCII | re.IGNORECASE)
_DEVICE = re.compile(r"(auto|cpu|cuda(:[0-9]{1,3})?)\Z", re.ASCII)


def default_config_path() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "kvasir-node" / "config.toml"


def default_data_dir() -> Path:
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "kvasir-node"


def data_dir_of(settings: Settings) -> Path:
    """Where this node keeps its key, its models and its blocks."""
    return Path(settings.node.data_dir) if settings.node.data_dir else default_data_dir()


def keep_torch_cache(data_dir: Path) -> None:
    """Gives torch's compiler cache a place of our own; importing it otherwise leaves a folder in the temporary one.

    Works only before `torch._dynamo` is first imported, which transformers' model code does. A user's choice stays.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(data_dir / "cache" / "torch"))


def environment() -> dict[str, str]:
    """The process environment, for callers that pass it to `load_settings`."""
    return dict(os.environ)


def parse_size(text: str) -> int:
    """Bytes of "512M", "2GiB", "100000"; K, M, G, T are powers of 1024."""
    match = _SIZE.match(text.strip())
    if match is None:
        raise UsageError(f"a size is a number with an optional K, M, G or T, such as 512M; got {text[:40]!r}")
    power = " KMGT".find(match[2][0].upper()) if match[2] else 0
    return int(float(match[1]) * 1024 ** max(power, 0))


def load_settings(
    *,
    flags: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    file: Path | None = None,
    file_required: bool = False,
) -> Settings:
    """Merges all sources into one Settings.

    `flags` maps "section.key" to a value or its text. Raises UsageError that names the key, what came, and
    what was expected.
    """
    layers = [("file", _read_file(file, required=file_required)), ("env", _read_env(env or {})), ("flag", flags or {})]
    for key in layers[2][1]:
        if key in _SECRETS:
            raise UsageError(f"{key} is a secret and never comes from a flag; set {_env_name(key)} instead")
    profile = "local"
    for origin, values in layers:
        if "node.profile" in values:
            profile = _checked("node.profile", str, values["node.profile"], origin)
    layers.insert(0, ("profile", PROFILES[profile]))
    settings, origins = Settings(), dict.fromkeys(setting_keys(), "default")
    for origin, values in layers:
        for key, value in values.items():
            settings = _with(settings, key, value, origin)
            origins[key] = origin
    return replace(settings, origins=origins)


def setting_choices(key: str) -> tuple[str, ...]:
    """The values that a setting can have, where they are words or true and false; else none."""
    section, _, name = key.partition(".")
    if isinstance(getattr(getattr(Settings(), section, None), name, None), bool):
        return ("true", "false")
    return {**_CHOICES, "node.roles": ROLES, "log.level": LOG_LEVELS}.get(key, ())


def log_levels(text: str) -> tuple[str, dict[str, str]]:
    """ "info,net=debug" -> ("info", {"net": "debug"}); without a level of its own all else is at info.

    Raises UsageError.
    """
    base, parts = "info", dict[str, str]()
    for item in (item.strip() for item in text.split(",")):
        part, equals, level = item.rpartition("=")
        if level not in LOG_LEVELS or (equals and part not in LOG_PARTS):
            raise UsageError(
                f"setting log.level is one of {', '.join(LOG_LEVELS)}, or such a level for a part as well, such as "
                f"info,net=debug (parts: {', '.join(LOG_PARTS)}); got {text[:80]!r}"
            )
        if equals:
            parts[part] = level
        else:
            base = level
    return base, parts


def setting_keys() -> tuple[str, ...]:
    defaults = Settings()
    return tuple(f"{section}.{f.name}" for section in SECTIONS for f in fields(getattr(defaults, section)))


def _env_name(key: str) -> str:
    section, _, name = key.partition(".")
    return f"KVASIR_{section.upper()}__{name.upper()}"


def _read_env(env: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in env.items():
        if not name.startswith("KVASIR_") or "__" not in name:
            continue
        section, _, key = name.removeprefix("KVASIR_").partition("__")
        found[f"{section.lower()}.{key.lower()}"] = value
    return found


def _read_file(path: Path | None, *, required: bool) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if required:
            raise UsageError(f"no settings file at {path}; `kvasir-node config init` writes one") from error
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"the settings file {path} cannot be read: {error}") from error
    version = document.pop("version", None)
    if version != FILE_VERSION:
        raise UsageError(f"{path} must begin with `version = {FILE_VERSION}`; got {version!r}")
    found: dict[str, Any] = {}
    for section, values in document.items():
        if not isinstance(values, dict):
            raise UsageError(f"{path}: {section!r} is not a section; known sections: {', '.join(SECTIONS)}")
        found |= {f"{section}.{key}": value for key, value in typing.cast("dict[str, Any]", values).items()}
    return found


def _with(settings: Settings, key: str, value: Any, origin: str) -> Settings:
    section, _, name = key.partition(".")
    if section not in SECTIONS:
        raise UsageError(
            f"unknown section in setting {key!r} ({origin}){_meant(key)}; known sections: {', '.join(SECTIONS)}"
        )
    part: Any = getattr(settings, section)
    hints = typing.get_type_hints(part.__class__)
    if name not in hints:
        raise UsageError(f"unknown setting {key!r} ({origin}){_meant(key)}; section {section} has: {', '.join(hints)}")
    return replace(settings, **{section: replace(part, **{name: _checked(key, hints[name], value, origin)})})


def _meant(key: str) -> str:
    """The nearest keys: as they are written, and those of the same name in other sections."""
    keys = setting_keys()
    found = [each for each in keys if each.partition(".")[2] == key.partition(".")[2]] or get_close_matches(
        key, keys, 2
    )
    return f", did you mean {' or '.join(found)}?" if found else ""


def _checked(key: str, kind: Any, value: Any, origin: str) -> Any:
    """Converts text (env, `--set`) and checks type, choice and range."""
    shown = "a value that is not shown" if key in _SECRETS else repr(value)
    wrong = UsageError(f"setting {key} ({origin}) must be {_kind_name(kind)}; got {shown}")
    if kind is bool:
        text = str(value).lower()
        if text not in ("true", "false", "1", "0", "yes", "no", "on", "off"):
            raise wrong
        return text in ("true", "1", "yes", "on")
    if kind in (int, float):
        return _checked_number(key, kind, value, wrong)
    if kind is str:
        if not isinstance(value, str):
            raise wrong
        if key in _CHOICES and value not in _CHOICES[key]:
            raise UsageError(f"setting {key} ({origin}) must be one of {', '.join(_CHOICES[key])}; got {value!r}")
        if key == "log.level":
            log_levels(value)
        if key == "node.device" and not _DEVICE.match(value):
            raise UsageError(f"setting {key} ({origin}) must be auto, cpu or cuda:N; got {value!r}")
        return value
    return _checked_list(key, value, origin, wrong)


def _checked_list(key: str, value: Any, origin: str, wrong: UsageError) -> tuple[str, ...]:
    if not isinstance(value, str | list | tuple):
        raise wrong
    parts = value.split(",") if isinstance(value, str) else typing.cast("Sequence[Any]", value)
    if not all(isinstance(part, str) for part in parts):
        raise wrong
    items = tuple(dict.fromkeys(part.strip() for part in parts if part.strip()))
    if key == "node.roles" and (not items or set(items) - set(ROLES)):
        raise UsageError(f"setting {key} ({origin}) must name some of {', '.join(ROLES)}; got {value!r}")
    return items


def _checked_number(key: str, kind: type, value: Any, wrong: UsageError) -> int | float:
    if isinstance(value, bool):
        raise wrong
    try:
        if isinstance(value, str) and key.endswith(("_bytes", "_bytes_max", "_bytes_s")):
            number: int | float = parse_size(value)
        else:
            number = kind(value)
    except UsageError as error:
        raise UsageError(f"setting {key}: {error}") from error
    except (TypeError, ValueError, OverflowError) as error:
        raise wrong from error
    if kind is int and isinstance(value, float) and number != value:
        raise wrong
    if key.endswith("_ratio") and number > 1:
        raise UsageError(f"setting {key} is a share of the whole and at most 1; got {value!r}")
    low = 0 if key in _MAY_BE_ZERO else 1e-9
    if not low <= number < _NUMBER_END:
        least = "zero or more" if key in _MAY_BE_ZERO else "above zero"
        raise UsageError(f"setting {key} must be {least} and below {_NUMBER_END:g}; got {value!r}")
    if number < _AT_LEAST.get(key, number):
        raise UsageError(f"setting {key} is at least {_AT_LEAST[key]}; got {value!r}")
    if number > _AT_MOST.get(key, number):
        raise UsageError(f"setting {key} is at most {_AT_MOST[key]}; got {value!r}")
    return number


def _kind_name(kind: Any) -> str:
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    return names.get(kind, "a list of texts")
