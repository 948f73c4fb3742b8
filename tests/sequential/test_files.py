"""Saved networks: the engine's own format, replaced whole, loaded whole or not at all."""

from __future__ import annotations

import os
import random
import resource
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.networks import NETWORKS, fresh, learn, parameters
from support.rank_pool import RankPool
from support.reports import wrap

from tagi_ddp import DDPSequential, init
from tagi_ddp.engine.dialect import softmax_works
from tagi_ddp.engine.whole_file import whole_file
from tagi_ddp.replica.parameter_file import ParameterFileError

KILLS = 100
LAYER_NORM_BATCH = 8


def alone(name: str) -> DDPSequential:
    return DDPSequential(fresh(name), communicator=init(rank=0, world_size=1))


def trained(name: str) -> DDPSequential:
    model = alone(name)
    learn(model, *NETWORKS[name].batch(0, LAYER_NORM_BATCH))
    model.step()
    return model


def has_layer_norm(model: DDPSequential) -> bool:
    return any(type(each).__name__ == "LayerNorm" for each in model.model._cpp_backend.layers)


def test_running_statistics_go_on_from_a_file_and_from_a_state_dict(tmp_path: Path) -> None:
    model, path = trained("batch_norm"), str(tmp_path / "file")
    model.save(path)
    loaded, given = alone("batch_norm"), alone("batch_norm")
    loaded.load(path)
    given.load_state_dict(model.state_dict())
    for other in (loaded, given):
        assert other.check_replicas() == model.check_replicas()
    x, y = NETWORKS["batch_norm"].batch(1, 8)
    hashes = []
    for one in (model, loaded, given):
        learn(one, x, y)
        one.step()
        hashes.append(one.check_replicas())
    assert hashes[1:] == hashes[:1] * 2


def test_a_state_dict_without_running_statistics_warns_by_layer() -> None:
    model, other = trained("batch_norm"), alone("batch_norm")
    with pytest.warns(RuntimeWarning, match=r"keep theirs: 1 \(BatchNorm2d.*3\.main_block\.1"):
        other.load_state_dict(dict(model.state_dict()))
    assert other.check_replicas() != model.check_replicas()


def test_parameters_of_another_network_and_of_csv_files(tmp_path: Path) -> None:
    model, other, from_csv = trained("batch_norm"), alone("batch_norm"), trained("mlp")
    other.params_from(model)
    assert other.check_replicas() == model.check_replicas()
    mlp, path = trained("mlp"), str(tmp_path / "csv")
    mlp.save_csv(path)
    for device in ("cpu", "cpu:0"):
        from_csv = DDPSequential(
            fresh("mlp"), communicator=init(rank=0, world_size=1), device=device, compute="torch"
        )
        from_csv.load_csv(path)
        x, _ = NETWORKS["mlp"].batch(2, 3)
        np.testing.assert_allclose(from_csv(x)[0], mlp(x)[0], rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="state_dict has layers"):
        mlp.params_from(model)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_engine_reads_ours_and_we_read_its(name: str, tmp_path: Path) -> None:
    model, ours, its = trained(name), tmp_path / "ours", tmp_path / "its"
    model.save(str(ours))
    model.model.save(str(its))
    state = parameters(model)
    if not has_layer_norm(model):
        assert ours.read_bytes() == its.read_bytes()
    for path in (ours, its):
        other = alone(name)
        other.load(str(path))
        np.testing.assert_equal(parameters(other), state)
    engine = fresh(name)
    engine.load(str(ours))
    np.testing.assert_equal(
        parameters(DDPSequential(engine, communicator=init(rank=0, world_size=1))), state
    )


def test_every_other_layer(tmp_path: Path) -> None:
    """Those of no network above: byte by byte the engine's file."""
    from pytagi import nn

    names = ("Sigmoid", "Tanh", "LeakyReLU", "MixtureReLU", "MixtureSigmoid")
    activations = [getattr(nn, name)() for name in (*names, "MixtureTanh", "EvenExp")]
    network = nn.Sequential(
        nn.Conv2d(1, 2, 3, in_width=8, in_height=8),
        nn.MaxPool2d(2, 2),
        *activations[:-1],
        nn.Linear(18, 6),
        activations[-1],
        nn.Softmax() if softmax_works() else nn.ReLU(),
        nn.Remax(),
    )
    smoother = nn.Sequential(nn.SLSTM(1, 4, seq_len=1), nn.SLinear(4, 1))
    for model in (network, smoother):
        wrapped = DDPSequential(model, communicator=init(rank=0, world_size=1), compute="engine")
        wrapped.save(str(tmp_path / "ours"))
        model.save(str(tmp_path / "its"))
        assert (tmp_path / "ours").read_bytes() == (tmp_path / "its").read_bytes()
        wrapped.load(str(tmp_path / "its"))


def test_a_bare_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = trained("mlp")
    model.save("net.bin")
    model.load("net.bin")
    assert [path.name for path in tmp_path.iterdir()] == ["net.bin"]


def damage(data: bytes, kind: str) -> bytes:
    first = struct.unpack("<Q", data[:8])[0] + 8  # where the first layer's means begin
    floats = np.frombuffer(data[first:], np.float32, 32 * 12 * 2).copy()
    if kind == "cut in the last layer":
        return data[:-6]
    if kind == "cut at a layer":
        return data[:first]
    if kind == "empty":
        return b""
    if kind == "too long":
        return data + b"\0" * 4
    if kind == "a picture":
        return b"\x89PNG\r\n\x1a\n" + data[8:]
    if kind == "a mean that is NaN":
        floats[7] = np.nan
    if kind == "a variance below 0":
        floats[32 * 12 + 7] = -0.5
    if kind == "an infinite variance":
        floats[32 * 12 + 7] = np.inf
    return data[:first] + floats.tobytes() + data[first + floats.nbytes :]


DAMAGES = {
    "cut in the last layer": r"layer 4 \(Linear\(24,5\)\): the file ends within it, at \d+ bytes",
    "cut at a layer": r"layer 0 \(Linear\(12,32\)\): the file ends within it",
    "empty": r"layer 0 \(Linear\(12,32\)\): the file ends before it, at 0 bytes",
    "too long": r"has 4 bytes after the last layer of this network",
    "a picture": r"layer 0 \(Linear\(12,32\)\): the file has no layer's description in its place",
    "a mean that is NaN": r"layer 0 \(Linear\(12,32\)\): its mean 7 is nan",
    "a variance below 0": r"layer 0 \(Linear\(12,32\)\): its variance 7 is -0.5",
    "an infinite variance": r"layer 0 \(Linear\(12,32\)\): its variance 7 is inf",
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_file_changes_nothing(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "net.bin"
    model = trained("mlp")
    model.save(str(path))
    path.write_bytes(damage(path.read_bytes(), kind))
    before = parameters(model)
    with pytest.raises(ParameterFileError, match=DAMAGES[kind]) as caught:
        model.load(str(path))
    assert str(path) in str(caught.value)
    np.testing.assert_equal(parameters(model), before)
    learn(model, *NETWORKS["mlp"].batch(0, 8))
    model.step()  # which goes on


def test_another_networks_file(tmp_path: Path) -> None:
    path = str(tmp_path / "net.bin")
    trained("cnn").save(path)
    with pytest.raises(ParameterFileError, match=r"layer 0 .*: the file has 'Conv2d\(.*' in its"):
        trained("mlp").load(path)


def load_refused(comm: Any, path: str) -> list[str]:
    model = wrap(comm, "mlp")
    before = model.check_replicas()
    texts = []
    for name in (path, "/nowhere/net.bin"):
        try:
            model.load(name)
        except (ParameterFileError, FileNotFoundError) as error:
            texts.append(f"{type(error).__name__}: {error}")
    assert model.check_replicas() == before
    learn(model, *NETWORKS["mlp"].batch(comm.rank, 8))
    model.step()
    return texts


def test_all_ranks_refuse_and_go_on(shm: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "net.bin"
    path.write_bytes(b"nothing of the kind")
    for cut, missing in shm.run(load_refused, str(path), size=2):
        assert cut.startswith("ParameterFileError")
        assert "layer 0 (Linear(12,32)): the file" in cut
        assert "No such file" in missing


def test_a_full_disk_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "net.bin"
    model = trained("mlp")
    model.save(str(path))
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            model.save(str(path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(OSError, match="No space left"):
        model.save("/dev/full")


def test_a_file_of_another_mode_behind_a_link(tmp_path: Path) -> None:
    path, link = tmp_path / "net.bin", tmp_path / "link"
    path.touch(0o640)
    path.chmod(0o640)
    link.symlink_to(path.name)
    trained("mlp").save(str(link))
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640
    assert path.stat().st_size > 1000
    with pytest.raises(FileNotFoundError):
        trained("mlp").save(str(tmp_path / "no folder" / "net.bin"))


def test_where_files_need_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on file systems of networks."""
    monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY)  # which cannot be written to
    path = tmp_path / "net.bin"
    for content in (b"old", b"new"):
        with whole_file(path) as file:
            file.write(content)
    with pytest.raises(TypeError), whole_file(path) as file:
        file.write("half")  # type: ignore[arg-type]
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


SAVE = """
import os, sys
from support.networks import fresh
from tagi_ddp import DDPSequential, init
folder, kills = sys.argv[1], int(sys.argv[2])
models = [DDPSequential(fresh("mlp"), communicator=init(rank=0, world_size=1)) for _ in range(2)]
for layer in models[1].model._cpp_backend.layers[::2]:
    layer.mu_w = [1.0] * layer.num_weights
for name, model in zip(("old", "new"), models):
    model.save(f"{folder}/{name}")
for _ in range(kills):
    child = os.fork()
    if child == 0:
        while True:
            for model in models:
                model.save(f"{folder}/net.bin")
    print(child, flush=True)
    sys.stdin.readline()
    os.waitpid(child, 0)
"""


@pytest.mark.slow
def test_a_kill_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    rng = random.Random(5)
    process = subprocess.Popen(
        [sys.executable, "-c", SAVE, str(tmp_path), str(KILLS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        for _ in range(KILLS):
            child = int(process.stdout.readline())
            while not (tmp_path / "net.bin").exists():
                time.sleep(0.001)
            time.sleep(rng.uniform(0, 0.02))
            os.kill(child, signal.SIGKILL)
            process.stdin.write("\n")
            process.stdin.flush()
            whole = [(tmp_path / name).read_bytes() for name in ("old", "new")]
            assert (tmp_path / "net.bin").read_bytes() in whole
    assert process.returncode == 0
    left = {path.name for path in tmp_path.iterdir()} - {"net.bin", "old", "new"}
    # Between the link and the replacement, a moment, a file has another name.
    assert len(left) <= 1 + KILLS // 20
    for name in left:
        assert (tmp_path / name).read_bytes() in whole


STATES = {
    "mu_w of Linear.0 has 3 elements, not 384": lambda state: {
        **state,
        "Linear.0": ([0.0] * 3, *state["Linear.0"][1:]),
    },
    "var_b of Linear.4 has -1.0 at 2": lambda state: {
        **state,
        "Linear.4": (*state["Linear.4"][:3], [1.0, 1.0, -1.0, 1.0, 1.0]),
    },
    "Linear.2 must hold mu_w, var_w, mu_b, var_b": lambda state: {**state, "Linear.2": ([0.0],)},
    "state_dict has layers": lambda state: {"Linear.0": state["Linear.0"]},
}


def load_state_refused(comm: Any, text: str) -> str:
    model = wrap(comm, "mlp")
    before = model.check_replicas()
    state = model.state_dict()
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (its text is returned)
        model.load_state_dict(STATES[text](state) if comm.rank == 0 else {})
    assert model.check_replicas() == before
    model.load_state_dict(state if comm.rank == 0 else {})
    return str(caught.value)


@pytest.mark.parametrize("text", STATES)
def test_a_state_of_another_network(shm: RankPool, text: str) -> None:
    for told in shm.run(load_state_refused, text, size=2):
        assert text in told
