"""The CPU cores that this process may use, by its affinity and by the quotas of its cgroups."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MOUNT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Quota:
    """A limit of CPU time: so many seconds a second, for all processes of a cgroup together."""

    cores: float
    cgroup: str


def quota(mount: Path = _MOUNT, own: Path = Path("/proc/self/cgroup")) -> Quota | None:
    """Return the smallest CPU quota of this process's cgroups, of version 1 or 2; None: no quota.

    Kubernetes sets it by ``limits.cpu``, docker by ``--cpus``.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return None
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for folder in _folders(mount, controllers.split(","), path.lstrip("/")):
            cores = _of_version_2(folder) or _of_version_1(folder)
            if cores is not None:
                found.append(Quota(cores, str(folder)))
    return min(found, key=lambda each: each.cores, default=None)


def usable_cores() -> float:
    """Return the number of cores that this process may use; a quota may allow a part of one."""
    cores, limit = len(os.sched_getaffinity(0)), quota()
    return cores if limit is None else min(cores, limit.cores)


def _folders(mount: Path, controllers: list[str], path: str) -> Iterator[Path]:
    """Yield the folders of a cgroup and of those around it.

    A container may show its own cgroup as the root, under the name that it has on the host.
    """
    if controllers == [""]:
        roots = [mount, mount / "unified"]
    elif "cpu" in controllers:
        roots = [mount / "cpu", mount / ",".join(controllers)]
    else:
        return
    for root in roots:
        inner = root / path
        while inner != root:
            yield inner
            inner = inner.parent
        yield root


def _of_version_2(folder: Path) -> float | None:
    limit, _, period = _read(folder / "cpu.max").partition(" ")
    return None if limit in ("", "max") else float(limit) / float(period or 100_000)


def _of_version_1(folder: Path) -> float | None:
    limit, period = (_read(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    return float(limit) / float(period) if limit and period and float(limit) > 0 else None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
