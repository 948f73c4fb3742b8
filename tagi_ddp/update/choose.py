"""The choice of a step's exchange: the fastest that its setting allows."""

from __future__ import annotations

from tagi_ddp._backend import ShmCommunicator
from tagi_ddp.communicators.topology import topology_of
from tagi_ddp.replica.staging import host_bucket
from tagi_ddp.update import exchange
from tagi_ddp.update.exchange import (
    Alone,
    Bucket,
    Exchange,
    InSharedMemory,
    Overlapped,
    Queued,
    Setting,
)
from tagi_ddp.update.sharded import Scattered


def make_exchange(setting: Setting) -> Exchange:
    """Return the fastest exchange; a collective call.

    | the deltas                   | the communicator          | exchange       | if sharded     |
    |------------------------------|---------------------------|----------------|----------------|
    | on a device                  | there, or of one rank     | Queued         | Queued         |
    | on the host                  | of one rank               | Alone          | Alone          |
    | on the host                  | shm                       | InSharedMemory | InSharedMemory |
    | in a bucket of several parts | between hosts             | Overlapped     | Scattered      |
    | anywhere                     | any other                 | Bucket         | Scattered      |
    """
    communicator, replica, bucket = setting.communicator, setting.replica, setting.bucket
    queue = replica.queue(communicator, setting.average, setting.sharded)
    if queue is not None:
        return Queued(setting, queue)
    if communicator.size == 1:
        return Alone(setting)
    if isinstance(communicator, ShmCommunicator) and replica.device == "cpu":
        if bucket is None:
            bucket = host_bucket(communicator, replica.parameters.size)
        return InSharedMemory(setting, communicator, bucket)
    if setting.sharded:
        return Scattered(setting)
    several_parts = bucket is not None and bucket.nbytes >= 2 * exchange.PART_BYTES
    if bucket is not None and several_parts and not topology_of(communicator).one_host:
        return Overlapped(setting, bucket)
    return Bucket(setting)
