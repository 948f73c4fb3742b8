"""Two hosts, emulated by two network namespaces that one virtual cable joins."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.rank_pool import worker_environment
from support.strangers import GUEST, NOBODY, RANK, place, started, store_prefix

SCRIPT = """
import numpy as np, tagi_ddp
from pytagi.nn import Linear, OutputUpdater, ReLU, Sequential

config = tagi_ddp.DDPConfig.from_env()
with tagi_ddp.DDPSequential(
    Sequential(Linear(4, 64), ReLU(), Linear(64, 2)), config, average=False
) as model:
    for step in range(5):
        x = np.random.default_rng((step, config.rank)).normal(size=(16, 4)).astype(np.float32)
        model(x)
        OutputUpdater("cpu").update(
            model.output_z_buffer,
            np.ones(32, np.float32),
            np.ones(32, np.float32),
            model.input_delta_z_buffer,
        )
        model.backward()
        model.step()
    print("result", config.rank, model.communicator.backend, model.check_replicas(), flush=True)
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=10)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Return the names of two namespaces, 10.99.0.1 and 10.99.0.2, which see only each other."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and Debian's package iproute2")
    names = [f"tagi-{secrets.token_hex(3)}" for _ in range(2)]
    made = []
    try:
        for name in names:
            ip("netns", "add", name)
            made.append(name)
        ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1])
        ip("link", "set", names[1], "netns", names[1])
        for number, name in enumerate(names, start=1):
            ip("-n", name, "address", "add", f"10.99.0.{number}/24", "dev", name)
            ip("-n", name, "link", "set", name, "up")
            ip("-n", name, "link", "set", "lo", "up")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this machine makes no network namespaces: {error.stderr.decode().strip()}")
    else:
        yield names
    finally:
        for name in made:
            ip("netns", "delete", name)


def test_gloo_over_two_hosts(hosts: list[str], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    processes = [
        subprocess.Popen(
            ["ip", "netns", "exec", host, sys.executable, str(tmp_path / "script.py")],
            env=worker_environment(
                {
                    "RANK": str(rank),
                    "WORLD_SIZE": "2",
                    "LOCAL_RANK": "0",
                    "LOCAL_WORLD_SIZE": "1",
                    "MASTER_ADDR": "10.99.0.1",
                    "MASTER_PORT": "29511",
                }
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, host in enumerate(hosts)
    ]
    try:
        outputs = [process.communicate(timeout=60)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    results = [line.split() for text in outputs for line in text.splitlines() if "result" in line]
    assert [result[:3] for result in results] == [["result", str(r), "gloo"] for r in (0, 1)], (
        outputs
    )
    assert results[0][3] == results[1][3]


def test_a_guest_of_another_host_does_not_become_a_rank(hosts: list[str]) -> None:
    """Another user of the second host, who knows all but the secret, where rank 1 is late."""
    address, port, secret = "10.99.0.1", 29512, {"TAGI_DDP_SECRET": "ours"}
    with started(RANK, 60, host=hosts[0], **place(0, port, address, **secret)) as first:
        name = store_prefix(b"ours")
        with started(GUEST, port, NOBODY, name, address, host=hosts[1]) as guest:
            assert guest.stdout is not None
            assert guest.stdout.readline() == "written\n", guest.communicate()[1]
            time.sleep(1)
            with started(RANK, 60, host=hosts[1], **place(1, port, address, **secret)) as second:
                outputs = [process.communicate(timeout=60)[0] for process in (first, second)]
            assert "joined" not in guest.communicate(timeout=60)[0]
    assert outputs == ["0 [3.0, 3.0, 3.0]\n", "1 [3.0, 3.0, 3.0]\n"]
