"""A rank, and a stranger who would like to be one; for tests of who gets into a job."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import subprocess
import sys
import textwrap
from collections.abc import Iterator

from support.rank_pool import worker_environment

HERE = "127.0.0.1"
NOBODY = 65534

RANK = """
import sys
import numpy as np
from tagi_ddp import init
with init("gloo", timeout=float(sys.argv[1])) as comm:
    buffer = np.full(3, comm.rank + 1.0)
    comm.all_reduce(buffer)
    print(comm.rank, buffer.tolist(), flush=True)
"""

# Knows all but the secret, and does what it can to be rank 1: writes what rank 1 would write, and
# calls rank 0 with the key of a job without a secret.
GUEST = """
import hmac, json, os, socket, sys
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from torch.distributed import TCPStore
from tagi_ddp.communicators.control.mesh import host_id
socket.getaddrinfo("localhost", 1)  # imports what the other user may not read
os.setuid(int(sys.argv[2]))
store = TCPStore(sys.argv[4], int(sys.argv[1]), None, False)
record = {"host": host_id(), "addresses": [], "port": 9, "nonce": "0" * 64}
for order, text in ((1, host_id()), (2, json.dumps(record))):
    store.set(f"{sys.argv[3]}/tagi_ddp/{order}/1", "0" * 64 + " " + text)
print("written", flush=True)
first = json.loads(store.get(f"{sys.argv[3]}/tagi_ddp/2/0").decode().partition(" ")[2])
key = hmac.digest(b"", first["nonce"].encode(), "sha256")
try:
    called = Connection(socket.create_connection((sys.argv[4], first["port"])).detach())
    answer_challenge(called, key)
    deliver_challenge(called, key)
    called.send_bytes((1).to_bytes(4, "big"))
    print("joined", flush=True)
except (AuthenticationError, EOFError, OSError):
    pass
"""


@contextlib.contextmanager
def started(
    source: str, *arguments: object, host: str = "", **variables: str
) -> Iterator[subprocess.Popen[str]]:
    """Run a program, in the network namespace ``host`` if one is named; end it with the block."""
    there = ["ip", "netns", "exec", host] if host else []
    process = subprocess.Popen(
        [*there, sys.executable, "-c", textwrap.dedent(source), *map(str, arguments)],
        env=worker_environment(variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


def place(rank: int, port: int, address: str = HERE, **more: str) -> dict[str, str]:
    """Return the variables of one of two ranks that were started by hand."""
    place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    where = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "TAGI_DDP_JOB": "theft"}
    return {**place, **where, **more}


def store_prefix(secret: bytes) -> str:
    key = hashlib.sha256(secret).digest() if secret else b""
    return f"tagi_ddp/{hmac.digest(key, b'theft/0', 'sha256').hex()}"
