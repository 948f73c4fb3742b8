"""The communicator and the device of a replica; on stand-ins for NCCL and CUDA."""

from __future__ import annotations

import os
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
from support.networks import fresh
from support.rank_pool import RankPool

from tagi_ddp import BackendUnavailable, DDPConfig
from tagi_ddp.sequential import placement
from tagi_ddp.sequential.placement import bring_together

Place = tuple[str, str, list[str]]


def place_replica(
    comm: Any, backend: str, device_ids: list[int], device: str | None, job: str
) -> Place:
    os.environ["TAGI_DDP_JOB"] = f"{job} at {os.environ['MASTER_PORT']}"
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    for name, value in zip(names, 2 * [comm.rank] + 2 * [comm.size], strict=True):
        os.environ[f"TAGI_DDP_{name}"] = str(value)
    try:
        config = DDPConfig(device_ids, backend, comm.rank, comm.size)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            communicator, chosen = bring_together(config, None, device)
        with communicator:
            communicator.barrier()
            return communicator.backend, chosen, [str(w.message) for w in caught]
    finally:
        for name in ("JOB", *names):
            del os.environ[f"TAGI_DDP_{name}"]


@pytest.mark.parametrize(
    ("backend", "device_ids", "device", "expected"),
    [
        ("nccl", [], None, [("nccl", "cuda:0"), ("nccl", "cuda:1")]),
        ("nccl", [3, 1], None, [("nccl", "cuda:3"), ("nccl", "cuda:1")]),
        ("auto", [0, 1], None, [("shm", "cpu")] * 2),
        ("auto", [], "cuda:2", [("nccl", "cuda:2")] * 2),
        ("shm", [], "cuda:0", [("shm", "cuda:0")] * 2),
    ],
)
def test_choice(
    nccl: RankPool, backend: str, device_ids: list[int], device: str | None, expected: list[Any]
) -> None:
    job = f"{backend} {device_ids} {device}"
    answers = nccl.run(place_replica, backend, device_ids, device, job, size=2)
    assert answers == [(*pair, []) for pair in expected]


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 3)])
def test_ranks_that_the_launcher_did_not_start(
    monkeypatch: pytest.MonkeyPatch, rank: int, size: int
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(f"TAGI_DDP_{name}", value)
    monkeypatch.setenv("TAGI_DDP_LOCAL_WORLD_SIZE", "2")
    told = rf"rank {rank} of {size}, but the launcher .* rank 1 of 2: use DDPConfig.from_env\(\)"
    with pytest.raises(ValueError, match=told):
        bring_together(DDPConfig([], "auto", rank, size), None, None)


@pytest.mark.parametrize("backend", ["nccl", "auto"])
def test_gpus_without_nccl(stand_in: dict[str, str], backend: str) -> None:
    pool = RankPool("shm", 2, environment={**stand_in, "TAGI_DDP_LIBNCCL": "/nowhere/libnccl.so"})
    for rank, (name, device, texts) in enumerate(
        pool.run(place_replica, backend, [0, 1], None if backend == "nccl" else "cuda:0", "job")
    ):
        assert (name, device) == ("shm", f"cuda:{rank if backend == 'nccl' else 0}")
        (text,) = texts
        assert "over the host" in text
        assert "/nowhere" in text
    pool.close()


def place_in_vain(comm: Any, device_ids: list[int]) -> str:
    with pytest.raises((BackendUnavailable, ValueError)) as error:
        place_replica(comm, "nccl", device_ids, None, "refused")
    return f"{error.type.__name__} {error.value}"


def test_no_gpu(shm: RankPool) -> None:
    for text in shm.run(place_in_vain, [], size=2):
        assert "BackendUnavailable" in text
        assert "libcuda.so.1" in text


def test_a_replica_on_the_host_is_refused_before_anything_is_exchanged() -> None:
    communicator: Any = SimpleNamespace(device="cuda:0")  # which can do nothing
    with pytest.raises(ValueError, match="works on cuda:0, but the replica lives on the CPU"):
        placement.attach_replica(fresh("mlp"), "cpu", communicator)


def last_is_refused(comm: Any) -> str:
    return place_in_vain(comm, [9]) if comm.rank == 1 else ""


def test_too_few_device_ids(nccl: RankPool) -> None:
    text = nccl.run(last_is_refused, size=2)[1]
    assert "device_ids has 1 entries, none for local rank 1" in text
