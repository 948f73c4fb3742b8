"""A rank of an elastic job: ``elastic_rank.py FOLDER JSON``; it tells of itself in a file.

The JSON is an object: options of DDPSequential, "backend", "network", "epochs", and what happens to
ranks by their first number: "kills" and "stops", at a step; "await", ranks for which the others
wait by small steps; "late", one that starts late; "breaks", one that breaks the first group;
"save", a number of steps from checkpoint to checkpoint.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from support.networks import NETWORKS, SIGMA_V, fresh, parameters

from tagi_ddp import DDPConfig, DDPSequential, DistributedSampler, Timeout
from tagi_ddp.checkpoint import Checkpoints
from tagi_ddp.communicators.single import SingleCommunicator
from tagi_ddp.elastic.exchange import ElasticSum
from tagi_ddp.replica.equality import check_state

SAMPLES, BATCH = 96, 8
HASHES: dict[int, str] = {}  # of this rank's replica, by the number of steps it had made
PATIENCE = 3.0  # seconds; on a busy machine a rank may stand still for one or two
# The rank of this process in its first group, or whose place it takes.
NUMBER = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("RANK", "0")


def make(name: str, options: dict[str, Any], elastic: bool = True) -> Any:
    """Return the model, alone or as a rank."""
    backend = options.pop("backend", "auto")
    config = DDPConfig.from_env(backend) if elastic else DDPConfig([], "auto", 0, 1)
    more = {"elastic": PATIENCE} if elastic else {}
    return DDPSequential(fresh(name), config, **options, **more)


def train(model: Any, what: dict[str, Any], epochs: int) -> None:
    """Make all steps, on the same samples however many ranks there are."""
    sampler = DistributedSampler(SAMPLES, 1, 0, seed=3)
    if not model.elastic:
        for _, share in sampler.steps(BATCH, epochs):
            learn(model, what, share)
        return
    folder = Path(sys.argv[1])
    with Checkpoints(folder / "checkpoints", model, sampler=sampler, keep=2) as checkpoints:
        for step, share in model.steps(sampler, BATCH, epochs, checkpoints.resume()):
            happen(model, what, step, folder)
            learn(model, what, share)
            HASHES.setdefault(
                model.steps_made, check_state(SingleCommunicator(), model._local.replica)
            )
            if "save" in what and model.steps_made % what["save"] == 0:
                checkpoints.save(model.steps_made)


def learn(model: Any, what: dict[str, Any], share: Any) -> None:
    x, y = NETWORKS[what["network"]].batch(0, SAMPLES)
    model.learn(x[share], y[share], np.full(y[share].shape, SIGMA_V**2, np.float32))


def happen(model: Any, what: dict[str, Any], step: int, folder: Path) -> None:
    """Do to this process what the case says, but not twice; tell that it takes steps."""
    (folder / f"{NUMBER}.begun").touch()
    if model.communicator.size < what.get("await", 0):
        time.sleep(0.03)
    done = folder / f"{NUMBER}.done"
    if model.joined or done.exists():
        return
    if what.get("kills", {}).get(NUMBER) == step:
        done.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if what.get("stops", {}).get(NUMBER) == step:
        done.touch()
        again = f"sleep {2 * PATIENCE}; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", again], stdout=subprocess.DEVNULL)
        os.kill(os.getpid(), signal.SIGSTOP)


def break_first_group() -> None:
    """Make this rank raise once, as soon as its first group has agreed on what to begin with."""
    make_equal = ElasticSum.make_equal

    def broken(exchange: ElasticSum) -> None:
        ElasticSum.make_equal = make_equal  # type: ignore[method-assign]
        raise Timeout("the network is slow")

    ElasticSum.make_equal = broken  # type: ignore[method-assign]


def main() -> None:
    """Train, and write what came of it."""
    folder, what = Path(sys.argv[1]), json.loads(sys.argv[2])
    if what.get("late") == NUMBER:
        time.sleep(2 * PATIENCE)
    if what.get("breaks") == NUMBER:
        break_first_group()
    model = make(what["network"], {"backend": what["backend"], **what["options"]})
    with model:
        train(model, what, what["epochs"])
        answer = {
            "number": int(NUMBER),
            "hash": model.check_replicas(),
            "steps": model.steps_made,
            "backend": model.communicator.backend,
            "torch": "torch" in sys.modules,
            "changes": [vars(change) for change in model.changes],
            "hashes": HASHES,
            "parameters": {
                name: [part.tolist() for part in parts] for name, parts in parameters(model).items()
            },
        }
        (folder / f"{NUMBER}-{os.getpid()}.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
