"""Checkpoints of what else a run has: torch's modules and optimizers, DASO, and own numbers."""

from __future__ import annotations

import json
import random
import shutil
import stat
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from support.networks import NETWORKS, fresh, learn
from support.rank_pool import RankPool
from support.reports import NO_ERROR, Report, report, report_if_any
from torch import nn

from tagi_ddp import DDPSequential, DistributedSampler, accelerate
from tagi_ddp.checkpoint import CheckpointError, Checkpoints
from tagi_ddp.communicators.single import SingleCommunicator
from tagi_ddp.optim.daso import DASO, DataParallelMultiGPU

BATCHES = 8  # an epoch
STEPS = range(1, 3 * BATCHES + 1)
RESUMED = (1, 7, 10, 13, 19, 23)  # after so many steps


class Training:
    """A torch module, on which DASO works, with checkpoints after some steps."""

    def __init__(self, comm: Any, folder: str) -> None:
        self.rank = comm.rank
        torch.manual_seed(comm.rank)
        self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1))
        optimizer = torch.optim.Adam(self.net.parameters(), 0.02)
        self.daso = DASO(optimizer, 3, comm, warmup_epochs=1, cooldown_epochs=0, node_size=2)
        self.module = DataParallelMultiGPU(self.net, self.daso)
        self.daso.last_batch = BATCHES
        parts = {"net": self.net, "daso": self.daso}
        self.checkpoints = Checkpoints(folder, parts, keep=99)

    def run(self, first: int, saved: Collection[int]) -> list[Any]:
        """Train, and save after these steps; return what the module has learned."""
        for step in range(first, len(STEPS)):
            x = torch.randn(8, 4)  # from torch's global generator
            self.daso.zero_grad()
            (self.module(x).sum(1) - x.sum(1)).square().mean().backward()
            self.daso.step()
            if step % BATCHES == BATCHES - 1:
                self.daso.epoch_loss_logic(1.0)
            if step + 1 in saved:
                self.checkpoints.save(step + 1)
        self.checkpoints.wait()
        self.checkpoints.close()
        return [value.numpy().tobytes() for value in self.net.state_dict().values()]


def train_with_daso_and_save(comm: Any, folder: str, first: int) -> list[Any]:
    training = Training(comm, folder)
    if first:
        assert training.checkpoints.resume(first) == first
    found = training.run(first, () if first else RESUMED)
    training.daso.close()
    return found


def test_daso_and_torchs_random_numbers(shm: RankPool, tmp_path: Path) -> None:
    patience = {"limit": 120, "timeout": 60}  # each checkpoint waits for the disk, on all ranks
    expected = shm.run(train_with_daso_and_save, str(tmp_path), 0, size=4, **patience)
    for first in RESUMED:
        assert (
            shm.run(train_with_daso_and_save, str(tmp_path), first, size=4, **patience) == expected
        ), first


def equal_or_not(comm: Any, folder: str, same: bool) -> Report:
    torch.manual_seed(0 if same else comm.rank)
    net = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(net.parameters(), 0.1)
    net(torch.ones(2)).sum().backward()
    optimizer.step()
    checkpoints = Checkpoints(folder, {"net": net, "adam": optimizer}, communicator=comm)
    if comm.size == 2:
        checkpoints.save(1, {"mine": comm.rank})
        checkpoints.wait()
        return NO_ERROR
    saved = [value.clone() for value in net.parameters()]
    with torch.no_grad():
        for value in net.parameters():
            value.zero_()
    found = report_if_any(checkpoints.resume)
    if found == NO_ERROR:
        assert checkpoints.extra == {"mine": 0}
        pairs = zip(net.parameters(), saved, strict=True)
        assert all(torch.equal(now, before) for now, before in pairs)
    return found


@pytest.mark.parametrize("same", [True, False])
def test_parts_on_another_number_of_ranks(shm: RankPool, tmp_path: Path, same: bool) -> None:
    """Resume on three ranks a part that was equal on two. A part that differed is refused."""
    shm.run(equal_or_not, str(tmp_path), same, size=2)
    for kind, text, _ in shm.run(equal_or_not, str(tmp_path), same, size=3):
        assert kind == ("" if same else "CheckpointError")
        assert same or "net differed between the 2 ranks" in text


def test_what_a_folder_holds(tmp_path: Path) -> None:
    """A file a rank, what people want to know as JSON, and a link to the last one."""
    model, sampler = accelerate(fresh("mlp")), DistributedSampler(10, 1, 0, seed=4)
    with Checkpoints(tmp_path / "new" / "folder", model, keep=2, sampler=sampler) as checkpoints:
        for step in (3, 5, 9):
            checkpoints.save(step)
    folder = tmp_path / "new" / "folder"
    names = sorted(path.name for path in folder.iterdir())
    assert names == [".lock", "000002-step-5", "000003-step-9", "latest"]
    assert stat.S_IMODE((folder / ".lock").stat().st_mode) == 0o600
    assert (folder / "latest").resolve().name == "000003-step-9"
    assert sorted(path.name for path in (folder / "latest").iterdir()) == [
        "rank-0.safetensors",
        "run.json",
    ]
    run = json.loads((folder / "latest" / "run.json").read_text())
    assert (run["step"], run["ranks"]) == (9, 1)
    assert run["sampler"] == {"length": 10, "shuffle": 1, "seed": 4}


def test_what_is_left_half_is_never_taken(tmp_path: Path) -> None:
    """Nor removed if it was whole once."""
    model = accelerate(fresh("mlp"))
    x, y = NETWORKS["mlp"].batch(0, 4)
    with Checkpoints(tmp_path, model) as checkpoints:
        checkpoints.save(1)
        expected = model.check_replicas()
        learn(model, x, y)
        model.step()
        checkpoints.save(2)
        checkpoints.wait()
        for name in ("rank-0.safetensors", "run.json"):
            (tmp_path / "latest" / name).unlink()
            with pytest.warns(RuntimeWarning, match="it is not used") as warned:
                assert checkpoints.resume() == 1
            assert f"-step-2 lacks {name}" in str(warned[0].message)
            checkpoints.save(2)
            checkpoints.wait()
        (tmp_path / "latest" / "run.json").unlink()
    saving = tmp_path / ".saving-000005-step-3-0123456789abcdef"
    for left in (saving, tmp_path / ".removed-0123456789abcdef"):
        shutil.copytree(tmp_path / "000004-step-2", left)
    (tmp_path / ".latest.1").symlink_to("000001-step-1")
    (tmp_path / ".seen.0123456789abcdef").touch()
    with Checkpoints(tmp_path, model) as checkpoints:
        names = [".lock", *(f"00000{n + 1}-step-{s}" for n, s in enumerate([1, 2, 2, 2])), "latest"]
        assert sorted(path.name for path in tmp_path.iterdir()) == names
        with pytest.warns(RuntimeWarning, match="it is not used") as warned:
            assert checkpoints.resume() == 1
        assert len(warned) == 3
        assert model.check_replicas() == expected


@pytest.mark.parametrize("text", [b"", b'{"ranks": 1', b"[]", b"{}", b'{"ranks": "all"}', b"\xff"])
def test_what_is_damaged_is_named_and_stays(tmp_path: Path, text: bytes) -> None:
    model = accelerate(fresh("mlp"))
    with Checkpoints(tmp_path, model) as checkpoints:
        checkpoints.save(1)
        checkpoints.wait()
        (tmp_path / "latest" / "run.json").write_bytes(text)
    for _ in range(2):
        with Checkpoints(tmp_path, model) as checkpoints:
            with pytest.raises(CheckpointError, match=r"000001-step-1/run\.json is damaged: .*: "):
                checkpoints.resume()
            with pytest.raises(CheckpointError, match=r"no whole checkpoint .*run\.json is"):
                checkpoints.resume(fallback=True)
    assert (tmp_path / "latest" / "rank-0.safetensors").exists()


def test_nothing_is_loaded_if_a_part_does_not_fit(tmp_path: Path) -> None:
    parts = {"first": accelerate(fresh("mlp")), "second": accelerate(fresh("mlp"))}
    with Checkpoints(tmp_path, parts) as checkpoints:
        checkpoints.save(1)
    first, other = parts["first"], accelerate(fresh("layer_norm"))
    learn(first, *NETWORKS["mlp"].batch(0, 4))
    first.step()
    before = first.check_replicas()
    with Checkpoints(tmp_path, {"first": first, "second": other}) as checkpoints:
        with pytest.raises(ValueError, match="give the network that was saved"):
            checkpoints.resume()
        assert first.check_replicas() == before


def test_an_earlier_step(tmp_path: Path) -> None:
    """And what is saved after it is the last one then."""
    with Checkpoints(tmp_path, accelerate(fresh("mlp")), keep=9) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(step)
        assert checkpoints.resume() == 30
        assert checkpoints.resume(20) == 20
        with pytest.raises(CheckpointError, match=r"step is 15, but there are those of \[10, 20,"):
            checkpoints.resume(15)
        checkpoints.save(25)
        checkpoints.wait()
        assert checkpoints.resume() == 25


def test_nothing_to_resume(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, accelerate(fresh("mlp"))) as checkpoints:
        assert checkpoints.resume() == 0
        assert checkpoints.extra is None


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"keep": 0}, "keep must be at least 1, got 0"),
        ({"parts": fresh("mlp")}, "model is a bare network"),
        ({"parts": 3}, "model is a int, which has no state_dict"),
        ({"parts": {"$a": accelerate(fresh("mlp"))}}, "names that are text and do not begin"),
        ({"generators": {"a": 3}}, "generators must be of numpy, torch or Python's random"),
    ],
)
def test_arguments(tmp_path: Path, arguments: dict[str, Any], text: str) -> None:
    parts = arguments.pop("parts", accelerate(fresh("mlp")))
    with pytest.raises(CheckpointError, match=text):
        Checkpoints(tmp_path, parts, communicator=SingleCommunicator(), **arguments)


def test_calls(tmp_path: Path) -> None:
    model = accelerate(fresh("mlp"))
    x, y = NETWORKS["mlp"].batch(0, 4)
    with Checkpoints(tmp_path, model) as checkpoints:
        with pytest.raises(CheckpointError, match="step must be at least 0, got -1"):
            checkpoints.save(-1)
        with pytest.raises(CheckpointError, match="extra/x is a set"):
            checkpoints.save(1, {"x": {1}})
        learn(model, x, y)
        with pytest.raises(RuntimeError, match=r"deltas of a backward\(\) that no step\(\)"):
            checkpoints.save(1)
        model.step()
        checkpoints.save(1)
    checkpoints.close()
    with pytest.raises(CheckpointError, match="these checkpoints are closed"):
        checkpoints.save(2)
    assert [path.name for path in tmp_path.glob("*-step-*")] == ["000001-step-1"]


def fail_to_write(comm: Any, folder: str) -> Report:
    """Rank 1 cannot write its file, and all hear of it when they save again."""
    model = DDPSequential(fresh("mlp"), communicator=comm)
    checkpoints = Checkpoints(folder, model)
    checkpoints.save(1)
    checkpoints.wait()
    if comm.rank == 1:
        write = checkpoints._folder.write

        def no_file(checkpoint: Any, rank: int, *rest: Any) -> None:
            saving = checkpoints._folder.saving(checkpoint, rest[-1])
            saving.file_of(rank).mkdir(parents=True)
            write(checkpoint, rank, *rest)

        checkpoints._folder.write = no_file  # type: ignore[method-assign]
    checkpoints.save(2)
    told = report(lambda: checkpoints.save(3))
    assert checkpoints.resume() == 1
    checkpoints.close()
    return told


def test_all_ranks_hear_of_one_that_could_not_write(shm: RankPool, tmp_path: Path) -> None:
    for kind, text, _ in shm.run(fail_to_write, str(tmp_path), size=2, fresh=True):
        assert kind == "CheckpointError"
        assert "IsADirectoryError" in text or "Is a directory" in text


def unequal(comm: Any, folder: str) -> Report:
    model = DDPSequential(fresh("mlp"), communicator=comm)
    with Checkpoints(folder, model) as checkpoints:
        return report(lambda: checkpoints.save(1 + comm.rank))


def test_ranks_at_different_steps(shm: RankPool, tmp_path: Path) -> None:
    for kind, text, _ in shm.run(unequal, str(tmp_path), size=2, fresh=True):
        assert kind == "CheckpointError"
        assert "differ first at step of rank 1: 2; rank 0 has step: 1" in text


def apart(comm: Any, folder: str) -> Report:
    model = DDPSequential(fresh("mlp"), communicator=comm)
    return report(lambda: Checkpoints(f"{folder}/{comm.rank}", model))


def test_a_folder_that_ranks_do_not_share(shm: RankPool, tmp_path: Path) -> None:
    for kind, text, _ in shm.run(apart, str(tmp_path), size=2, fresh=True):
        assert kind == "CheckpointError"
        assert "is not seen by rank 1: give one on a shared file system" in text


def given_by_one(comm: Any, folder: str) -> list[Report]:
    """Give a generator, or a part, on rank 1 only."""
    model, net = DDPSequential(fresh("mlp"), communicator=comm), nn.Linear(1, 1)
    mine = comm.rank == 1
    return [
        report(lambda: Checkpoints(folder, model, generators={"a": random} if mine else None)),
        report(lambda: Checkpoints(folder, {"m": model, "net": net} if mine else {"m": model})),
    ]


def test_what_one_rank_alone_gives_is_named(shm: RankPool, tmp_path: Path) -> None:
    for generator, part in shm.run(given_by_one, str(tmp_path), size=2):
        assert generator[0] == part[0] == "CheckpointError"
        assert "generators of rank 1: ['a']; rank 0 has generators: []" in generator[1]
        assert "parts of rank 1: ['m', 'net']; rank 0 has parts: ['m']" in part[1]


def recovering(comm: Any, folder: str) -> list[Report]:
    """One rank is not ready, or gives what cannot be saved; the group can go on after it."""
    model = DDPSequential(fresh("mlp"), communicator=comm)
    x, y = NETWORKS["mlp"].batch(comm.rank, 4)
    with Checkpoints(folder, model) as checkpoints:
        learn(model, x, y)
        model.step()
        if comm.rank == 1:
            learn(model, x, y)
        reports = [report(lambda: checkpoints.save(1))]
        if comm.rank == 0:
            learn(model, x, y)
        model.step()
        reports.append(report(lambda: checkpoints.save(2, {1} if comm.rank else None)))
        checkpoints.save(2)
        checkpoints.wait()
        assert checkpoints.resume() == 2
        learn(model, x, y)
        model.step()
        model.check_replicas()
    return reports


def test_an_error_of_one_rank_leaves_the_group_as_it_is(shm: RankPool, tmp_path: Path) -> None:
    for first, second in shm.run(recovering, str(tmp_path), size=2):
        assert first[0] == "NotBetweenSteps"
        assert "deltas of a backward() that no step() has applied" in first[1]
        assert second[0] == "CheckpointError"
        assert "extra is a set, which cannot be saved" in second[1]
