"""All ranks refuse a damaged checkpoint before they load anything. Its files stay in place."""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import chaos.flips
import numpy as np
import pytest
import torch
from chaos.flips import FALLBACK, flips_of_a_run, of_kind
from parallel.test_mixin import BATCH, Fit, data, settings, tagi_net
from support.networks import NETWORKS, fresh, learn
from support.rank_pool import RankPool
from support.reports import NO_ERROR, Report, report_if_any
from torch import nn

from tagi_ddp import DDPSequential, DistributedSampler
from tagi_ddp.checkpoint import CheckpointError, Checkpoints
from tagi_ddp.communicators.single import SingleCommunicator
from tagi_ddp.parallel import CheckpointConfig, ParallelMixin

FLIPS = 120


@pytest.mark.parametrize(
    "kind",
    [
        "1 rank",
        "trainer of a module",
        pytest.param("trainer of a network", marks=pytest.mark.slow),
    ],
)
def test_a_flipped_bit(kind: str, tmp_path: Path) -> None:
    flips, broken = of_kind(kind, str(tmp_path / "run"), 7 * FALLBACK, FLIPS)
    assert (flips, broken) == (FLIPS, [])


def test_a_flipped_bit_of_two_ranks(shm: RankPool, tmp_path: Path) -> None:
    for flips, broken in shm.run(flips_of_a_run, str(tmp_path), 500, FLIPS // 4, size=2):
        assert (flips, broken) == (FLIPS // 4, [])


@pytest.mark.slow
def test_a_short_campaign_of_flips() -> None:
    command = [sys.executable, chaos.flips.__file__, "--flips", "2000", "--first", "7000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert done.stdout.count("| 2000 | 0 |") == len(chaos.flips.KINDS)


# --- files that are not those of the save ---------------------------------------------------------


class Run:
    """A network of merges, of which each rank has its own parameters, with two checkpoints."""

    def __init__(self, comm: Any, folder: str, keep: int = 9) -> None:
        self.comm = comm
        self.model = DDPSequential(
            fresh("mlp"), communicator=comm, reduction="precision", sync_every=9
        )
        sampler = DistributedSampler(40, comm.size, comm.rank)
        self.checkpoints = Checkpoints(folder, self.model, keep=keep, sampler=sampler)

    def save(self, *steps: int) -> None:
        for step in steps:
            learn(self.model, *NETWORKS["mlp"].batch(self.comm.rank, 4))
            self.model.step()
            self.checkpoints.save(step, {"rank": self.comm.rank})
        self.checkpoints.wait()

    def bytes(self) -> bytes:
        return b"".join(array.tobytes() for _, array in self.model._local.replica.state())

    def close(self) -> None:
        self.checkpoints.close()
        self.model.close()


def save_steps(comm: Any, folder: str, *steps: int) -> bytes:
    run = Run(comm, folder)
    run.save(*steps)
    state = run.bytes()
    run.close()
    return state


def tried(comm: Any, folder: str, fallback: bool) -> tuple[Report, list[str], bool, bytes]:
    """Return the error of resuming, the warnings, whether anything was changed, and the state."""
    run = Run(comm, folder)
    before = run.bytes()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = report_if_any(lambda: run.checkpoints.resume(fallback=fallback))
    told = [str(warning.message) for warning in caught if warning.category is RuntimeWarning]
    state = run.bytes()
    run.close()
    return found, told, state != before, state


def cut(last: Path, before: Path) -> str:
    path = last / "rank-1.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    return "rank-1.safetensors is no checkpoint, or not all of one"


def of_another_save(last: Path, before: Path) -> str:
    shutil.copy(before / "rank-1.safetensors", last)
    return "rank-1.safetensors is of another save, or of another rank"


def of_another_rank(last: Path, before: Path) -> str:
    shutil.copy(last / "rank-0.safetensors", last / "rank-1.safetensors")
    return "rank-1.safetensors is of another save, or of another rank"


def of_another_step(last: Path, before: Path) -> str:
    shutil.copytree(before, last, dirs_exist_ok=True)
    return "run.json is damaged: ValueError: it is of step 5"


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def write(path: Path, header: dict[str, Any], arrays: bytes) -> None:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + arrays)


def without_last(header: dict[str, Any], arrays: bytes) -> bytes:
    """Remove the last array of the file from a header; return the others."""
    name = max((n for n in header if n[0] == "/"), key=lambda n: header[n]["data_offsets"])
    return arrays[: header.pop(name)["data_offsets"][0]]


def lacking_an_array(last: Path, before: Path) -> str:
    header, arrays = header_of(last / "rank-1.safetensors")
    write(last / "rank-1.safetensors", header, without_last(header, arrays))
    return "rank-1.safetensors is no checkpoint, or not all of one: .*its checksum"


def without_checksums(last: Path, before: Path) -> str:
    header, arrays = header_of(last / "rank-1.safetensors")
    header["__metadata__"] = {"tree": header["__metadata__"]["tree"]}
    write(last / "rank-1.safetensors", header, arrays)
    return "rank-1.safetensors is of another save, or of another rank"


def other_ranks(last: Path, before: Path) -> str:
    path = last / "run.json"
    path.write_text(path.read_text().replace('"ranks": 2', '"ranks": 1'))
    return "run.json is damaged: ValueError: its checksum"


def no_format(last: Path, before: Path) -> str:
    run = json.loads((last / "run.json").read_text())
    del run["checksum"]
    (last / "run.json").write_text(json.dumps({**run, "format": 3}))
    return "run.json is damaged: ValueError: it has no checksum"


DAMAGES = [
    cut,
    of_another_save,
    of_another_rank,
    of_another_step,
    lacking_an_array,
    without_checksums,
    other_ranks,
    no_format,
]


def test_files_of_another_save_or_not_all_of_one(shm: RankPool, tmp_path: Path) -> None:
    """On as many ranks as have saved, or on others; the one before is taken if that is asked."""
    expected = shm.run(save_steps, str(tmp_path / "one"), 5, size=2)
    shm.run(save_steps, str(tmp_path / "two"), 5, 8, size=2)
    for number, damage in enumerate(DAMAGES):
        folder = shutil.copytree(tmp_path / "two", tmp_path / str(number), symlinks=True)
        last, before = folder / "000002-step-8", folder / "000001-step-5"
        text = damage(last, before)
        for size in (2, 1):
            for (kind, found, _), told, changed, _ in shm.run(tried, str(folder), False, size=size):
                assert (kind, told, changed) == ("CheckpointError", [], False), damage
                assert re.search(f"{text}.* resume\\(fallback=True\\) goes on from the last", found)
        first, second = shm.run(tried, str(folder), True, size=2)
        assert (first[0], second[0], second[1]) == (NO_ERROR, NO_ERROR, [])
        (told,) = first[1]
        assert re.search(f"{text}.* It is left where it is", told)
        assert [first[3], second[3]] == expected
        assert last.is_dir()


def of_an_earlier_version(last: Path) -> None:
    """Rewrite a checkpoint as versions before format 4 wrote it."""
    run = json.loads((last / "run.json").read_text())
    del run["checksum"], run["save"]
    (last / "run.json").write_text(json.dumps({**run, "format": 3}))
    for path in last.glob("*.safetensors"):
        header, arrays = header_of(path)
        header["__metadata__"] = {"tree": header["__metadata__"]["tree"]}
        write(path, header, arrays)


def test_earlier_versions_without_checksums(shm: RankPool, tmp_path: Path) -> None:
    """They are read; what lacks an array, or has one of another size, is refused by all ranks."""
    expected = shm.run(save_steps, str(tmp_path), 5, 8, size=2)
    last = tmp_path / "000002-step-8"
    of_an_earlier_version(last)
    assert [state for *_, state in shm.run(tried, str(tmp_path), False, size=2)] == expected
    path = last / "rank-1.safetensors"
    header, arrays = header_of(path)
    name = next(name for name in header if name.endswith(".mu_w"))
    short = {**header, name: {**header[name], "shape": [header[name]["shape"][0] - 1]}}
    write(path, short, arrays)
    tree = header["__metadata__"]["tree"]
    other_name = tree.replace('.mu_w": {', '.mv_w": {')
    other_array = tree.replace('.mu_w"}', '.mu_b"}')
    assert len({tree, other_name, other_array}) == 3
    for damaged, rest in (
        (header, without_last(dict(header), arrays)),
        (short, arrays),
        ({**header, "__metadata__": {"tree": other_name}}, arrays),
        ({**header, "__metadata__": {"tree": other_array}}, arrays),
    ):
        write(path, damaged, rest)
        for (kind, text, _), told, changed, _ in shm.run(tried, str(tmp_path), False, size=2):
            assert (kind, told, changed) == ("CheckpointError", [], False), text


def test_a_state_that_does_not_fit_is_refused_before_any_is_loaded(tmp_path: Path) -> None:
    """Of torch modules, generators and samplers, each after others that fit."""
    good, bad = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    parts = {"a": good, "b": bad}
    single = SingleCommunicator()
    generator = np.random.default_rng(1)
    with Checkpoints(
        tmp_path, parts, communicator=single, generators={"own": generator}
    ) as checkpoints:
        checkpoints.save(1)
    for other, drawing, text in (
        (nn.Sequential(nn.Linear(2, 2)), generator, "b has 1.bias only in what was saved"),
        (
            nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)),
            generator,
            r"of the shape \(2, 3\), but",
        ),
        (bad, np.random.Generator(np.random.MT19937(1)), "'own' cannot go on from its state"),
    ):
        module = nn.Linear(2, 2)
        before = [value.clone() for value in (*module.parameters(), *other.parameters())]
        state = str(drawing.bit_generator.state)
        with (
            Checkpoints(
                tmp_path,
                {"a": module, "b": other},
                communicator=single,
                generators={"own": drawing},
            ) as checkpoints,
            pytest.raises(CheckpointError, match=text),
        ):
            checkpoints.resume()
        assert all(map(torch.equal, before, (*module.parameters(), *other.parameters())))
        assert state == str(drawing.bit_generator.state)


def test_what_is_set_aside_stays_and_is_not_counted(shm: RankPool, tmp_path: Path) -> None:
    def names() -> list[str]:
        return sorted(path.name for path in tmp_path.glob("*-step-*"))

    shm.run(save_steps, str(tmp_path), 1, 2, 3, size=1)
    flip(tmp_path / "000003-step-3" / "rank-0.safetensors", -1)
    shm.run(save_after_fallback, str(tmp_path), size=1)
    assert names() == ["000003-step-3", "000005-step-5", "000006-step-6"]


def save_after_fallback(comm: Any, folder: str) -> None:
    run = Run(comm, folder, keep=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert run.checkpoints.resume(fallback=True) == 2
        assert run.checkpoints.resume(fallback=True) == 2
    with pytest.raises(CheckpointError, match=r"rank-0\.safetensors is damaged: the checksum of /"):
        run.checkpoints.resume()
    run.save(4, 5, 6)
    run.close()


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_the_trainer_falls_back(tmp_path: Path) -> None:
    """And goes on from there."""
    config = settings(str(tmp_path), checkpoint=CheckpointConfig(1))
    arguments: Any = {"epochs": 2, "batch_size": BATCH}
    with ParallelMixin(config) as trainer:
        whole = trainer.train(Fit(), tagi_net(), data(), **arguments)
    last = tmp_path / "checkpoints" / "latest"
    flip(last / "rank-0.safetensors", -1)
    flip(last.parent / "000004-step-4" / "run.json", 0)
    (last.parent / "000005-step-5" / "run.json").unlink()
    net = tagi_net()
    with ParallelMixin(config) as trainer:
        with pytest.raises(CheckpointError, match=r"000006-.* load_checkpoint\(fallback=True\)"):
            trainer.load_checkpoint(Fit(), net)
        with pytest.warns(RuntimeWarning) as warned:
            assert trainer.load_checkpoint(Fit(), net, fallback=True).num_steps == 3
        texts = [str(each.message) for each in warned]
        assert len(texts) == 3
        assert "000005-step-5 lacks run.json" in texts[1]
        assert trainer.train(Fit(), net, data(), **arguments) == whole[1:]
