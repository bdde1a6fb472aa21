"""What `up` would refuse and can be told at once: `up` asks before it loads anything, `up --dry-run` asks nothing else.

It does not know whether a port is free, a peer answers or a checkpoint is sound: that takes a start.
"""

from __future__ import annotations

import os
from pathlib import Path

from kvasir_node.base.errors import UsageError
from kvasir_node.base.settings import Settings, data_dir_of
from kvasir_node.decide.manners import parse_quiet_hours
from kvasir_node.net.listen_address import parse_listen_address
from kvasir_node.roles.known_models import locate_model
from kvasir_node.roles.membership import check_peer_lists
from kvasir_node.roles.swarm_key import read_join
from kvasir_node.surfaces.address import check_key_policy, parse_address


def check_settings(settings: Settings) -> None:
    """Raises UsageError, or DataError for a damaged catalog. Writes nothing; reads the catalog alone."""
    data_dir = data_dir_of(settings)
    _check_data_dir(data_dir)
    if settings.api.listen:
        check_key_policy(settings.api.listen, settings.api.key)
    if settings.phone.listen:
        parse_address(settings.phone.listen, "phone.listen")
    for address in settings.network.listen:
        parse_listen_address(address)
    read_join(settings.network.join)
    check_peer_lists(settings.network)
    parse_quiet_hours(settings.worker.quiet_hours)
    if "coordinator" in settings.node.roles:
        locate_model(data_dir, settings.coordinator.model)


def _check_data_dir(data_dir: Path) -> None:
    """The directory, or the nearest one above it that is there, must be one that we may write to."""
    try:
        nearest = next(path for path in (data_dir, *data_dir.absolute().parents) if path.exists())
    except OSError as error:
        raise UsageError(f"the data directory {data_dir} cannot be used: {error.strerror}") from error
    if not nearest.is_dir():
        raise UsageError(f"the data directory {data_dir} cannot be used: {nearest} is not a directory")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UsageError(f"the data directory {data_dir} cannot be used: {nearest} cannot be written to by this user")
