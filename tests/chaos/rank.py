"""One rank of a job with a fault: trains a small network, and writes down how it ends."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from chaos.faults import NUMBER, REDUCTIONS, STEPS, TIMEOUT, Fault

from tagi_ddp import DDPSequential, NotFiniteError, init
from tagi_ddp.communicators import CommunicatorError
from tagi_ddp.environment import detect
from tagi_ddp.optim.schedule import SyncSchedule


def main() -> None:
    """Run ``folder seed``, under any launcher."""
    folder, seed = Path(sys.argv[1]), int(sys.argv[2])
    run(Fault.draw(seed), folder)


def run(fault: Fault, folder: Path) -> None:
    """Train, do what the fault says, and raise what ends that."""
    rank = detect().rank
    told = _Story(folder / f"{rank}.jsonl")
    told.say(pid=os.getpid())
    mine = fault.kind if rank == fault.culprit else "none"
    if mine == "late":
        time.sleep(0.3)
    try:
        with init(fault.backend, timeout=TIMEOUT) as comm:
            _train(fault, mine, comm, told)
    except (CommunicatorError, NotFiniteError) as error:
        blamed = list(getattr(error, "ranks", ()))
        told.say(error=type(error).__name__, blamed=blamed, text=str(error))
        raise


def _train(fault: Fault, mine: str, comm: Any, told: _Story) -> None:
    from pytagi import manual_seed
    from pytagi.nn import Linear, OutputUpdater, ReLU, Sequential

    manual_seed(fault.seed)
    network = Sequential(Linear(3, 8), ReLU(), Linear(8, 2))
    updater = OutputUpdater("cpu")
    options = dict(REDUCTIONS[fault.reduction])
    scheduled = options.get("sync_every") == "schedule"
    if scheduled:
        options |= {"sync_every": SyncSchedule(1, 0, 0, max_global_skips=4)}
        options |= {"node_size": 2 - fault.ranks % 2}
    with DDPSequential(network, communicator=comm, compute="engine", **options) as model:
        taken = 0
        if scheduled:
            model.begin_epoch(STEPS)
        for step in range(STEPS):
            dice = np.random.default_rng((fault.seed, step, comm.rank))
            x, y = (dice.normal(size=(4, n)).astype(np.float32).ravel() for n in (3, 2))
            ill = mine == "nan" and step == fault.step
            model(x)
            noise = np.full(8, 0.1, np.float32)
            updater.update(model.output_z_buffer, y, noise, model.input_delta_z_buffer)
            model.backward()
            if ill:
                _spoil(model)
            if step == fault.step:
                _do(mine, model, comm)
                if mine == "skip":
                    continue
            before = _digest(model)
            try:
                model.step()
            except NotFiniteError:
                # In a merge the steps of other ranks count.
                summed = options["reduction"] != "precision"
                told.say(refused=step, changed=summed and _digest(model) != before)
            if model.unmerged_steps == 0:
                told.say(step=taken, hash=_digest(model))
            taken += 1
        if scheduled:
            model.end_epoch(1.0)
        elif model.unmerged_steps:
            model.merge()
        comm.barrier()


def _do(mine: str, model: Any, comm: Any) -> None:
    if mine == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if mine == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if mine == "raise":
        raise KeyError("a mistake of the script's")
    if mine == "exit":
        sys.exit(NUMBER)
    if mine == "abort":
        comm.abort("the script gives up")
    if mine == "close":
        comm.close()
    if mine == "other":
        comm.all_reduce(np.ones(77))


def _spoil(model: Any) -> None:
    """Put a NaN among the deltas, whatever the engine makes of one in its input."""
    layer = model.model._cpp_backend.layers[0]
    layer.delta_mu_w = [float("nan"), *layer.delta_mu_w[1:]]


def _digest(model: Any) -> str:
    model._local.replica.pull()
    arrays = [array for _, array in model._local.replica.state()]
    assert all(np.isfinite(array).all() for array in arrays)
    state = b"".join(array.tobytes() for array in arrays)
    return hashlib.sha256(state).hexdigest()[:16]


class _Story:
    """A file with a line for each thing that happened, whole even when the process is killed."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def say(self, **what: Any) -> None:
        os.write(self._file, json.dumps(what).encode() + b"\n")


if __name__ == "__main__":
    main()
