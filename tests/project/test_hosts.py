"""Two hosts, emulated by two network namespaces that one virtual cable joins."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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
    """Return the names of two namespaces, which see only each other.

    Their addresses are 10.99.0.1 and fd99::1, 10.99.0.2 and fd99::2.
    """
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
            ip("-n", name, "address", "add", f"fd99::{number}/64", "dev", name, "nodad")
            ip("-n", name, "link", "set", name, "up")
            ip("-n", name, "link", "set", "lo", "up")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this machine makes no network namespaces: {error.stderr.decode().strip()}")
    else:
        yield names
    finally:
        for name in made:
            ip("netns", "delete", name)


Processes = list["subprocess.Popen[str]"]


@contextmanager
def running(commands: list[tuple[str, list[str], dict[str, str]]]) -> Iterator[Processes]:
    """Run commands, each on a host, with variables; whatever of them still runs is killed."""
    with ExitStack() as stack:
        processes = []
        for host, command, variables in commands:
            process = subprocess.Popen(
                ["ip", "netns", "exec", host, *command],
                env=worker_environment({"TAGI_DDP_SECRET": "ours", **variables}),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append(process)
        yield processes


@contextmanager
def ranks(script: Path, hosts: list[str], on_each: int, port: int) -> Iterator[Processes]:
    """Run a script on ranks of both hosts, alternately."""
    commands = []
    for rank in range(2 * on_each):
        local, host = divmod(rank, 2)
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": str(2 * on_each),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(on_each),
            "MASTER_ADDR": "10.99.0.1",
            "MASTER_PORT": str(port),
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # it warns of hosts without names
        }
        commands.append((hosts[host], [sys.executable, str(script)], variables))
    with running(commands) as processes:
        yield processes


@pytest.mark.parametrize("on_each", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_gloo_over_two_hosts(hosts: list[str], tmp_path: Path, on_each: int) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    with ranks(tmp_path / "script.py", hosts, on_each, 29511) as processes:
        outputs = [process.communicate(timeout=60)[0] for process in processes]
    results = [line.split() for text in outputs for line in text.splitlines() if "result" in line]
    size = 2 * on_each
    assert [result[:3] for result in results] == [
        ["result", str(r), "gloo"] for r in range(size)
    ], outputs
    assert len({digest for *_, digest in results}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own_name", "name_of_0"),
    [("10.99.0.1", "10.99.0.1"), ("localhost", "10.99.0.1"), ("[fd99::1]", "[fd99::1]")],
)
def test_our_launcher_over_two_hosts(
    hosts: list[str], tmp_path: Path, own_name: str, name_of_0: str
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [str(Path(sys.executable).with_name("tagi-ddp")), "run", "-n", "2", "--nnodes", "2"]
    commands = []
    for node, name in enumerate([own_name, name_of_0]):
        where = ["--node-rank", str(node), "--rendezvous", f"{name}:29514"]
        commands.append((hosts[node], [*command, *where, str(tmp_path / "script.py")], {}))
    with running(commands) as launchers:
        outputs = [process.communicate(timeout=60)[0] for process in launchers]
    assert [process.returncode for process in launchers] == [0, 0], outputs
    results = [
        sorted(line.split() for line in text.splitlines() if "result" in line) for text in outputs
    ]
    assert [[line[:4] for line in node] for node in results] == [
        [[f"[{rank}]", "result", str(rank), "gloo"] for rank in ranks] for ranks in ((0, 1), (2, 3))
    ], outputs
    assert len({line[4] for node in results for line in node}) == 1


@pytest.mark.parametrize("backend", ["auto", pytest.param("gloo", marks=pytest.mark.slow)])
def test_a_loopback_of_ipv6_alone(hosts: list[str], tmp_path: Path, backend: str) -> None:
    ip("-n", hosts[0], "address", "delete", "127.0.0.1/8", "dev", "lo")
    script = SCRIPT.replace("from_env()", f"from_env({backend!r})")
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, "-m", "tagi_ddp", "run", "-n", "2", str(tmp_path / "script.py")]
    with running([(hosts[0], command, {"TORCH_CPP_LOG_LEVEL": "ERROR"})]) as processes:
        output = processes[0].communicate(timeout=60)[0]
    assert processes[0].returncode == 0, output
    assert output.count("result") == 2


AGENT = """#!/bin/sh
case $1 in 10.99.0.1) host={};; *) host={};; esac
shift
exec ip netns exec $host unshare --uts sh -c "hostname $host; $*"
"""


@pytest.mark.slow
def test_mpirun_over_two_hosts(hosts: list[str], tmp_path: Path) -> None:
    mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if mpirun is None:
        pytest.skip("there is no mpirun")
    (tmp_path / "script.py").write_text(SCRIPT)
    agent = tmp_path / "agent"
    agent.write_text(AGENT.format(*hosts))
    agent.chmod(0o700)
    options = ["--allow-run-as-root", "--host", "10.99.0.1:2,10.99.0.2:2", "-n", "4"]
    options += ["--map-by", "ppr:2:node:OVERSUBSCRIBE", "--prtemca", "plm_ssh_agent", str(agent)]
    done = subprocess.run(
        [agent, "10.99.0.1", mpirun, *options, sys.executable, str(tmp_path / "script.py")],
        env=worker_environment({}),
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = sorted(line.split() for line in done.stdout.splitlines() if "result" in line)
    assert [result[:3] for result in results] == [["result", str(r), "mpi"] for r in range(4)]
    assert len({digest for *_, digest in results}) == 1


SILENCE = """
import time
import numpy as np
from tagi_ddp.communicators import PeerLost, init
from tagi_ddp.communicators.control import mesh

mesh.SILENCE = 3
comm = init(timeout=60)
comm.barrier()
print("here", flush=True)
start = time.monotonic()
try:
    while True:
        comm.all_reduce(np.ones(10))
except PeerLost as error:
    print("lost", *error.ranks, time.monotonic() - start < 30, flush=True)
"""


def test_a_host_that_falls_silent_is_lost(hosts: list[str], tmp_path: Path) -> None:
    """No goodbye and no reset comes from it, as when its power fails."""
    (tmp_path / "script.py").write_text(SILENCE)
    with ranks(tmp_path / "script.py", hosts, 1, 29513) as (first, second):
        for process in (first, second):
            assert process.stdout is not None
            assert process.stdout.readline() == "here\n"
        ip("-n", hosts[1], "link", "set", hosts[1], "down")
        assert first.communicate(timeout=60)[0] == "lost 1 True\n"
        assert second.communicate(timeout=60)[0] == "lost 0 True\n"


@pytest.mark.slow
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
