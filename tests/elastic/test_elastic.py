"""Jobs that go on when ranks are lost, and that new ones join."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.elastic_rank import make, train
from support.networks import distance, fresh, parameters
from support.rank_pool import mpirun, worker_environment

from tagi_ddp import BackendUnavailable, DDPConfig, DDPSequential, DistributedSampler
from tagi_ddp.communicators.init import _can_import
from tagi_ddp.optim import SyncSchedule

SCRIPT = Path(__file__).parents[1] / "support" / "elastic_rank.py"
LAUNCHER = Path(sys.executable).with_name("tagi-ddp")
SUMS: dict[str, Any] = {"average": False}
MERGES: dict[str, Any] = {"reduction": "precision", "sync_every": 3}


def start(
    folder: Path, what: dict[str, Any], ranks: int = 4, restarts: int = 0
) -> subprocess.CompletedProcess[str]:
    if what["backend"] == "mpi":
        command = [*mpirun(ranks), "--with-ft", "ulfm", sys.executable]
    else:
        command = [str(LAUNCHER), "run", "-n", str(ranks), "--max-restarts", str(restarts)]
    return subprocess.run(
        [*command, str(SCRIPT), str(folder), json.dumps(what)],
        env=worker_environment({}),
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def run(folder: Path, what: dict[str, Any], **options: int) -> list[dict[str, Any]]:
    """Return what all ranks say that came to the end, after looking whether they agree."""
    done = start(folder, what, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    answers = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    assert len({answer["hash"] for answer in answers}) == 1
    assert {answer["steps"] for answer in answers} == {12 * what["epochs"]}
    groups: dict[int, set[tuple[str, int, int]]] = {}
    for answer in answers:
        for change in answer["changes"]:
            seen = (change["hash"], change["step"], change["size"])
            groups.setdefault(change["group"], set()).add(seen)
    assert all(len(seen) == 1 for seen in groups.values()), groups
    return answers


def case(backend: str, options: dict[str, Any], network: str = "mlp", **more: Any) -> Any:
    return {"backend": backend, "options": options, "network": network, "epochs": 4, **more}


def alone(what: dict[str, Any]) -> dict[str, list[np.ndarray]]:
    """Return what one process learns of the same batches."""
    with make(what["network"], {**what["options"]}, elastic=False) as model:
        train(model, what, what["epochs"])
        return parameters(model)


def learned(answer: dict[str, Any]) -> dict[str, list[np.ndarray]]:
    return {
        name: [np.array(part, np.float32) for part in parts]
        for name, parts in answer["parameters"].items()
    }


ENGINE = {**SUMS, "compute": "engine"}


@pytest.mark.parametrize(
    ("backend", "options", "network"),
    [
        ("auto", SUMS, "mlp"),
        ("shm", SUMS, "embedding"),  # whose deltas add up over steps: a lost rank takes none along
        pytest.param("shm", ENGINE, "embedding", marks=pytest.mark.slow),
        pytest.param("shm", {**SUMS, "compute": "torch"}, "embedding", marks=pytest.mark.slow),
        pytest.param("shm", ENGINE, "mlp", marks=pytest.mark.slow),
        pytest.param("shm", SUMS, "cnn", marks=pytest.mark.slow),
        pytest.param("gloo", SUMS, "mlp", marks=pytest.mark.slow),
        ("mpi", SUMS, "mlp"),
    ],
)
def test_sums_without_lost_ranks_are_those_of_one_process(
    tmp_path: Path, backend: str, options: dict[str, Any], network: str
) -> None:
    """Rank 0, too; the step in which it was lost has been made of the whole batch."""
    what = case(backend, options, network, kills={"2": 5, "0": 17})
    answers = run(tmp_path, what)
    assert [answer["number"] for answer in answers] == [1, 3]
    assert [change["size"] for change in answers[0]["changes"]] == [3, 2]
    # A rank may die when it has made a step that the others have not: then that comes again.
    for change, killed in zip(answers[0]["changes"], (5, 17), strict=True):
        assert change["step"] in (killed - 1, killed)
    assert {answer["backend"] for answer in answers} == {"shm" if backend == "auto" else backend}
    if network == "mlp":  # which takes a rank seconds
        assert all(answer["torch"] is (backend == "gloo") for answer in answers)
    assert distance(learned(answers[0]), alone(what)) < 1e-5


@pytest.mark.parametrize("compute", [pytest.param("torch", marks=pytest.mark.slow), "engine"])
def test_a_step_that_comes_again_has_changed_no_running_statistics(
    tmp_path: Path, compute: str
) -> None:
    """Lose ranks after a forward. The others go on from the state that the last step has left."""
    what = case("shm", {**SUMS, "compute": compute}, "batch_norm", kills={"2": 5, "1": 9})
    for answer in run(tmp_path, {**what, "epochs": 1}, ranks=3):
        assert len(answer["changes"]) == 2
        for change in answer["changes"]:
            assert answer["hashes"][str(change["step"])] == change["hash"]


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("shm", MERGES),
        pytest.param("shm", {"compress": "int8", **MERGES}, marks=pytest.mark.slow),
        pytest.param("gloo", MERGES, marks=pytest.mark.slow),
        pytest.param("mpi", MERGES, marks=pytest.mark.slow),
        pytest.param("shm", {**MERGES, "compute": "engine"}, marks=pytest.mark.slow),
    ],
)
def test_merges_go_on_without_lost_ranks(
    tmp_path: Path, backend: str, options: dict[str, Any]
) -> None:
    answers = run(tmp_path, case(backend, options, kills={"2": 5, "0": 17}))
    assert [answer["number"] for answer in answers] == [1, 3]
    assert [change["size"] for change in answers[0]["changes"]][:2] == [3, 2]


@pytest.mark.parametrize(
    ("backend", "options", "network"),
    [
        ("shm", SUMS, "mlp"),
        pytest.param("shm", SUMS, "embedding", marks=pytest.mark.slow),
        pytest.param("gloo", SUMS, "mlp", marks=pytest.mark.slow),
        pytest.param("shm", MERGES, "mlp", marks=pytest.mark.slow),
        pytest.param("gloo", MERGES, "mlp", marks=pytest.mark.slow),
    ],
)
def test_new_ranks_take_the_places_of_the_lost(
    tmp_path: Path, backend: str, options: dict[str, Any], network: str
) -> None:
    kills = {"0": 5, "1": 5}
    what = case(backend, options, network, kills=kills) | {"await": 3, "epochs": 40}
    answers = run(tmp_path, what, ranks=3, restarts=2)
    assert [answer["number"] for answer in answers] == [0, 1, 2]
    assert [bool(a["changes"] and a["changes"][0]["joined"]) for a in answers] == [1, 1, 0]
    if options is SUMS:
        assert distance(learned(answers[0]), alone(what)) < 1e-4


@pytest.mark.parametrize("options", [SUMS, pytest.param(MERGES, marks=pytest.mark.slow)])
def test_a_stopped_rank_is_left_behind_and_comes_back(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    what = case("shm", options, stops={"0": 5}) | {"await": 3, "epochs": 40}
    answers = run(tmp_path, what, ranks=3)
    assert [answer["number"] for answer in answers] == [0, 1, 2]
    assert [change["size"] for change in answers[1]["changes"]] == [2, 3]
    assert [change["size"] for change in answers[0]["changes"]] == [3]
    assert not answers[0]["changes"][0]["joined"]  # it has begun with the others
    if options is SUMS:
        assert distance(learned(answers[0]), alone(what)) < 1e-4


@pytest.mark.slow
def test_a_rank_that_starts_late_is_waited_for(tmp_path: Path) -> None:
    answers = run(tmp_path, case("shm", SUMS, late="1"), ranks=3)
    assert [answer["changes"] for answer in answers] == [[], [], []]


@pytest.mark.parametrize("breaks", ["0", pytest.param("2", marks=pytest.mark.slow)])
def test_a_first_group_that_is_made_again_is_no_change(tmp_path: Path, breaks: str) -> None:
    answers = run(tmp_path, case("shm", SUMS, breaks=breaks), ranks=3)
    assert [answer["changes"] for answer in answers] == [[], [], []]


@pytest.mark.parametrize(
    ("restarts", "network"),
    [
        pytest.param(0, "mlp", marks=pytest.mark.slow),
        pytest.param(0, "embedding", marks=pytest.mark.slow),
        pytest.param(3, "mlp", marks=pytest.mark.slow),
        pytest.param(3, "embedding", marks=pytest.mark.slow),
    ],
)
def test_checkpoints_follow_the_group(tmp_path: Path, restarts: int, network: str) -> None:
    """Another job goes on from them; so does this one when no rank is left, and all start again."""
    kills = {"0": 5, "1": 17, "2": 17}
    what = case("shm", SUMS, network, kills=kills, save=4)
    answers = run(tmp_path, what, ranks=3, restarts=restarts) if restarts else []
    if not restarts:
        assert start(tmp_path, what, ranks=3).returncode == 137
        assert (tmp_path / "checkpoints" / "latest").exists()
        answers = run(tmp_path, {**what, "kills": {}}, ranks=2)
    assert distance(learned(answers[0]), alone(what)) < 1e-5


def test_a_job_whose_posterior_is_lost_starts_again_as_a_whole(tmp_path: Path) -> None:
    what = case("shm", SUMS, kills={"0": 5, "1": 5})
    done = start(tmp_path, what, ranks=2)
    assert done.returncode == 137
    assert "killed by SIGKILL; all ranks were ended" in done.stderr


def test_a_rank_that_fails_is_a_lost_rank(tmp_path: Path) -> None:
    """Its error is shown; the others go on."""
    script = tmp_path / "script.py"
    script.write_text(FAILS)
    command = [str(LAUNCHER), "run", "-n", "3", str(script)]
    done = subprocess.run(
        command,
        env=worker_environment({}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "ValueError: the cause" in done.stderr
    assert "rank 1 failed; the others go on" in done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] 30 2 4.0", "[2] 30 2 4.0"]


JOINS = """
from pytagi.nn import Linear, Sequential
from tagi_ddp import DDPConfig, DDPSequential

with DDPSequential(Sequential(Linear(1, 1)), DDPConfig.from_env(), elastic=True) as model:
    with model.join():
        pass
"""


def test_join_is_refused(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(JOINS)
    command = [str(LAUNCHER), "run", "-n", "1", "--timeout", "60", "script.py"]
    done = subprocess.run(
        command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=90, check=False
    )
    assert done.returncode == 1
    assert "RuntimeError: join() is not for an elastic job: loop over steps()" in done.stderr


def test_what_is_for_elastic_jobs_is_refused_in_others() -> None:
    with DDPSequential(fresh("mlp"), DDPConfig.from_env()) as model:
        for name, call in (("survive", model.survive), ("regroup", model.regroup)):
            with pytest.raises(RuntimeError, match=f"{name} needs .*elastic=True"):
                call(list)


FAILS = """
import os, time
import numpy as np
from pytagi.nn import Linear, Sequential
from tagi_ddp import DDPConfig, DDPSequential, DistributedSampler, PeerLost

model = Sequential(Linear(1, 4), Linear(4, 1))
options = {"average": False, "elastic": 10.0}
with DDPSequential(model, DDPConfig.from_env(), **options) as model:
    for step, share in model.steps(DistributedSampler(30), 6, 6):
        while step == 20:  # a collective call of the script's own
            total = np.array([2.0])
            try:
                if model.communicator.size == 3 and os.environ["RANK"] == "1":
                    raise ValueError("the cause")
                model.communicator.all_reduce(total)
                break
            except PeerLost as error:
                model.regroup(error.ranks)
        ones = np.ones(len(share), np.float32)
        model.learn(ones, ones, ones)
        time.sleep(0.1 * (step > 20))  # until the launcher knows of the end
    print(model.steps_made, model.communicator.size, total[0])
"""


@pytest.mark.parametrize(
    ("backend", "options", "error", "text"),
    [
        ("shm", {"sharded": True}, ValueError, "sharded cannot be True with elastic"),
        ("shm", {"node_size": 2, **MERGES}, ValueError, "node_size cannot be 2 with elastic"),
        ("shm", {"device": "cuda:0"}, ValueError, "device cannot be 'cuda:0' with elastic"),
        (
            "shm",
            {"reduction": "precision", "sync_every": SyncSchedule(10, 2)},
            ValueError,
            "sync_every cannot be",
        ),
        ("shm", {"elastic": -1.0}, ValueError, "elastic must be"),
        ("shm", {}, BackendUnavailable, "start them with tagi-ddp run"),
        ("mpi", {}, BackendUnavailable, "mpirun --with-ft ulfm"),
        ("nccl", {}, BackendUnavailable, "not 'nccl'"),
    ],
)
def test_what_cannot_be_elastic_is_named(
    backend: str, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    if backend == "mpi" and not _can_import("tagi_ddp.communicators.network.mpi"):
        pytest.skip("mpi4py finds no MPI")
    with pytest.raises(error, match=text):
        DDPSequential(fresh("mlp"), DDPConfig([], backend, 0, 1), **{"elastic": True, **options})


def test_steps_need_an_elastic_model() -> None:
    with (
        DDPSequential(fresh("mlp"), DDPConfig([], "auto", 0, 1)) as model,
        pytest.raises(RuntimeError, match="steps needs DDPSequential"),
    ):
        next(model.steps(DistributedSampler(10), 5, 1))


def test_a_turn_without_a_step_is_an_error(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(FAILS.replace("        model.learn(ones, ones, ones)\n", ""))
    done = subprocess.run(
        [str(LAUNCHER), "run", "-n", "1", str(script)],
        env=worker_environment({}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "0 steps were made of step 0: call step() or learn() once for each share" in done.stderr
