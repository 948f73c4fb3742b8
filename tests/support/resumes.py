"""A script that trains, with checkpoints: `RESUMES` FOLDER [STEP:STEP ...].

Rank 0 tells from which step it goes on; at the end all tell the hash of their replicas. Rank 1
kills itself at a step if the run has gone on from another one, as FROM:STEP says.
"""

RESUMES = """
import os, signal, sys
import numpy as np
from pytagi import manual_seed
from pytagi.nn import Linear, ReLU, Sequential
from tagi_ddp import DDPConfig, DDPSequential, DistributedSampler
from tagi_ddp.checkpoint import Checkpoints

folder, *kills = sys.argv[1:]
x = np.random.default_rng(0).standard_normal((60, 4), np.float32)
y = x.sum(1, keepdims=True)
manual_seed(1)
network = Sequential(Linear(4, 8), ReLU(), Linear(8, 1))
config = DDPConfig.from_env()
rank = config.rank
with DDPSequential(network, config, average=False) as model:
    sampler = DistributedSampler(len(x))
    with Checkpoints(folder, model, sampler=sampler) as checkpoints:
        first = checkpoints.resume()
        rank or print("from", first, flush=True)
        for step, share in sampler.steps(12, 4, first):
            if rank == 1 and f"{first}:{step}" in kills:
                os.kill(os.getpid(), signal.SIGKILL)
            model.learn(x[share], y[share], np.full_like(y[share], 0.1))
            if step % 3 == 2:
                checkpoints.save(step + 1)
                checkpoints.wait()
    print("hash", model.check_replicas(), flush=True)
"""
