"""The state of one network, on the host or on a device: parameters, deltas, running statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from tagi_ddp.replica.host import HostReplica

if TYPE_CHECKING:
    from tagi_ddp.replica.device import DeviceReplica

# They have the same methods, which HostReplica describes.
Replica: TypeAlias = "HostReplica | DeviceReplica"
