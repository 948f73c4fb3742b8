"""The cores that a process may use, with quotas of cgroups of both versions."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tagi_ddp.communicators.cores import quota
from tagi_ddp.communicators.topology import Location, Topology

MOUNT = Path("/sys/fs/cgroup")


def written(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def cgroups(folder: Path, *lines: str) -> Path:
    path = folder / "cgroup"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_version_2_takes_the_smallest_on_the_way_to_the_root(tmp_path: Path) -> None:
    mount, own = tmp_path / "mount", cgroups(tmp_path, "0::/kube/pod/box")
    assert quota(mount, own) is None
    written(mount / "kube" / "pod" / "box", cpu__max="max 100000")
    assert quota(mount, own) is None
    written(mount / "kube" / "pod", cpu__max="150000 100000")
    written(mount / "kube", cpu__max="400000 100000")
    found = quota(mount, own)
    assert found is not None
    assert (found.cores, found.cgroup) == (1.5, str(mount / "kube" / "pod"))


def test_a_container_sees_its_own_cgroup_as_the_root(tmp_path: Path) -> None:
    mount, own = tmp_path / "mount", cgroups(tmp_path, "0::/", "3:cpu,cpuacct:/docker/0123")
    written(mount / "cpu,cpuacct", cpu__cfs_quota_us="50000", cpu__cfs_period_us="100000")
    found = quota(mount, own)
    assert found is not None
    assert found.cores == 0.5


def test_version_1_without_a_limit(tmp_path: Path) -> None:
    mount, own = tmp_path / "mount", cgroups(tmp_path, "1:cpu:/", "4:memory:/box")
    written(mount / "cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert quota(mount, own) is None
    assert quota(mount, tmp_path / "none") is None


def limited(cores: tuple[int, ...], quota: float | None, cgroup: str = "box") -> Location:
    return Location("host", cores, False, quota=quota, cgroup=cgroup if quota else "")


@pytest.mark.parametrize(
    ("locations", "shares"),
    [
        ([limited((0, 1, 2, 3), 0.5)], [1]),
        ([limited((0, 1, 2, 3), 2.0)], [2]),
        ([limited((0, 1, 2, 3), 3.0)] * 2, [1, 1]),
        ([limited(tuple(range(8)), 3.0, name) for name in "ab"], [3, 3]),
        ([limited(tuple(range(8)), None)] * 2, [4, 4]),
    ],
)
def test_ranks_share_a_quota(locations: list[Location], shares: list[int]) -> None:
    topology = Topology(tuple(locations))
    assert [topology.share_of_cores(rank) for rank in range(len(locations))] == shares


@pytest.fixture
def half_a_core() -> Iterator[Path]:
    """A cgroup of version 1 with a quota of half a core."""
    folder = MOUNT / "cpu" / f"tagi-ddp-tests-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "cpu.cfs_period_us").write_text("100000")
        (folder / "cpu.cfs_quota_us").write_text("50000")
    except OSError as error:
        pytest.skip(f"no cgroup can be made: {error}")
    yield folder
    folder.rmdir()


JOB = """
import os
from tagi_ddp import DDPConfig
print(os.environ["OMP_NUM_THREADS"], DDPConfig.from_env().world_size)
"""


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["run", "-n", "2", "job.py"], "[0] 1 2"),
        (["run", "-n", "auto", "job.py"], "[0] 1 1"),
        pytest.param(["doctor"], "allows the time of 0.5 cores", marks=pytest.mark.slow),
    ],
)
def test_a_real_quota(half_a_core: Path, tmp_path: Path, command: list[str], expected: str) -> None:
    (tmp_path / "job.py").write_text(JOB)
    enter = f'echo $$ > {half_a_core}/tasks; exec "$@"'
    done = subprocess.run(
        ["sh", "-c", enter, "sh", sys.executable, "-m", "tagi_ddp", *command],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert expected in done.stdout, done.stdout + done.stderr
