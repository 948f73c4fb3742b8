"""Four ranks that train by Lightning's Trainer: ``python lightning_ranks.py PACKAGE``.

PACKAGE is lightning or pytorch_lightning. It is slow to import, so one process does so and forks
the ranks, which find the variables that torchrun sets. Ends within LIMIT seconds.
"""

from __future__ import annotations

import copy
import gc
import importlib
import itertools
import logging
import multiprocessing
import os
import random
import sys
import time
import warnings
from multiprocessing.connection import wait
from typing import Any

import numpy as np
import pytest
import torch
from support.rank_pool import free_port
from torch import distributed as dist
from torch.utils.data import DataLoader, Dataset, TensorDataset

from strategy.sharded import CHANNELS, NODES, Net, draw, members_of, split_loss, whole_loss
from tagi_ddp.communicators.network import checked
from tagi_ddp.strategy import GroupLayout, group_seed

PACKAGE = sys.argv[1]
LIMIT = 100.0
RANKS, SAMPLES, BATCH, RATE = 4, 24, 2, 0.05
OPTIONS = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
    "devices": RANKS,
    "max_epochs": 1,
}

pl = importlib.import_module("lightning.pytorch" if PACKAGE == "lightning" else PACKAGE)
ours = importlib.import_module(f"tagi_ddp.strategy.{PACKAGE}")


class Task(pl.LightningModule):
    """Trains a split model, or the members of an ensemble of it, which differ by noise."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.net = Net(seed)
        self.seen: list[tuple[torch.Tensor, ...]] = []
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.draws: tuple[float, ...] = ()
        self.fails = False

    def setup(self, stage: str) -> None:
        strategy = self.trainer.strategy
        assert strategy.reader_group.size() == strategy.layout.read_group_size
        assert strategy.model_group.rank() == strategy.layout.model_rank
        assert strategy.model_group.size() == strategy.layout.num_gpus_per_model
        if hasattr(strategy, "ensemble_group"):
            assert strategy.ensemble_group.rank() == strategy.layout.ensemble_rank
            assert strategy.ensemble_group.size() == strategy.layout.num_gpus_per_ensemble

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=RATE)

    def on_train_start(self) -> None:
        if self.trainer.current_epoch > 0:  # twice, for configure_ddp has done so
            self.trainer.strategy.register_parameter_hooks()
        self.draws = random.random(), np.random.random()

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        strategy = self.trainer.strategy
        index, x, target, drawn = batch
        noise = torch.randn_like(x)
        self.seen.append((index, noise, drawn))
        subgroup = getattr(strategy, "ensemble_subgroup", None)
        members = members_of(strategy.layout)
        return split_loss(self.net, x, target, noise, strategy.model_group, subgroup, members)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients.append({n: p.grad.clone() for n, p in self.net.named_parameters()})

    def on_train_epoch_end(self) -> None:
        if self.fails:
            raise KeyError("a task that fails")

    def predict_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return self.net(batch[0], self.trainer.strategy.model_group)

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.predict_step(batch, index)

    test_step = validation_step


class Samples(Dataset):
    """Number, input and target of a sample, and a number that the reading process draws."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(9)
        self.x = draw(generator, SAMPLES, NODES, CHANNELS)
        self.target = draw(generator, SAMPLES, NODES, 1)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return index, self.x[index], self.target[index], torch.rand(())


class Told(TensorDataset):
    """Inputs, and what the strategy says of the groups."""

    def set_comm_group_info(self, *info: int) -> None:
        self.info = info


def gathered(value: Any) -> list[Any]:
    values = [None] * RANKS
    dist.all_gather_object(values, value)
    return values


def check_fit(trainer: Any, base: int, task: Task, workers: int = 0) -> None:
    """Train one more epoch; each step must be that of the unsplit model, on all that was read."""
    strategy = trainer.strategy
    data = Samples()
    whole = copy.deepcopy(task.net)
    task.seen, task.gradients = [], []
    trainer.fit_loop.max_epochs = trainer.current_epoch + 1
    trainer.fit(task, DataLoader(data, BATCH, shuffle=True, num_workers=workers))
    check_nothing_left(strategy, task)

    layout: GroupLayout = strategy.layout
    assert layout.rank == dist.get_rank()
    by_rank = gathered(task.seen)
    seeds = [group_seed(base, r // layout.num_gpus_per_model) for r in range(RANKS)]
    for seed, draws in zip(seeds, gathered(task.draws), strict=True):
        assert draws == (random.Random(seed).random(), np.random.RandomState(seed).random())
    check_draws(by_rank, seeds)

    ranks_of_groups = RANKS // trainer.distributed_sampler_kwargs["num_replicas"]
    groups = [by_rank[r : r + ranks_of_groups] for r in range(0, RANKS, ranks_of_groups)]
    everything = [int(i) for group in groups for index, *_ in group[0] for i in index]
    assert sorted(everything) == list(range(SAMPLES))
    assert everything != sorted(everything), "not shuffled"
    optimizer = torch.optim.SGD(whole.parameters(), lr=RATE)
    for step, gradients in enumerate(task.gradients):
        batches = []
        for group in groups:
            index = group[0][step][0]
            assert all(torch.equal(member[step][0], index) for member in group)
            noises = [member[step][1] for member in group[:: layout.num_gpus_per_model]]
            batches.append((data.x[index], data.target[index], noises))
        optimizer.zero_grad()
        whole_loss(whole, batches).backward()
        for name, parameter in whole.named_parameters():
            assert parameter.grad.abs().max() > 1e-4, name
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-10)
        optimizer.step()
    assert len(task.gradients) == SAMPLES // len(groups) // BATCH
    for own, expected in zip(task.net.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(own, expected, rtol=0, atol=1e-10)


def check_draws(by_rank: list[Any], seeds: list[int]) -> None:
    """Check that ranks draw the same, here and in their workers, if they have the same seed."""
    for kind in (1, 2):
        drawn = [torch.stack([step[kind] for step in steps]) for steps in by_rank]
        for first, second in itertools.combinations(range(RANKS), 2):
            same = torch.equal(drawn[first], drawn[second])
            assert same == (seeds[first] == seeds[second]), (kind, first, second)


def check_nothing_left(strategy: Any, task: Task) -> None:
    assert not any(p._backward_hooks for p in task.parameters())
    assert len(dist.distributed_c10d._world.pg_map) == 1, "groups are left"
    gc.collect()
    assert not list(checked._open), "connections are left"
    with pytest.raises(RuntimeError, match="only while its Trainer runs"):
        _ = strategy.model_group


def check_without_fit(strategy: Any, info: tuple[int, ...]) -> None:
    """Validate, test and predict with split models whose parameters differ at first."""
    trainer = pl.Trainer(strategy=strategy, **OPTIONS, use_distributed_sampler=False)
    for run in (trainer.validate, trainer.test, trainer.predict):
        task = Task(seed=dist.get_rank())
        data = Told(Samples().x)
        answers = run(task, DataLoader(data, SAMPLES))
        assert data.info == info
        check_nothing_left(strategy, task)
        for own, expected in zip(task.net.parameters(), Net(seed=0).parameters(), strict=True):
            assert torch.equal(own, expected)
    torch.testing.assert_close(answers[0], Net(seed=0)(data.tensors[0]), rtol=0, atol=1e-10)


class Reads(pl.LightningModule):
    """Notes the numbers of the samples that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.seen: list[int] = []

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        self.seen += batch[0].tolist()
        return self.weight * batch[0].sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=RATE)


def check_order() -> None:
    """Samples come in order where the loader or its sampler has one, else in one that is drawn."""
    data, backwards = TensorDataset(torch.arange(SAMPLES)), range(SAMPLES)[::-1]
    for own in (True, False):  # Lightning's sampler, and ours
        for options, order in (
            ({"shuffle": False}, range(SAMPLES)),
            ({"sampler": backwards}, backwards),
            ({"shuffle": True}, None),
        ):
            strategy, task = ours.DDPGroupStrategy(2, 1, seed=5), Reads()
            trainer = pl.Trainer(strategy=strategy, use_distributed_sampler=own, **OPTIONS)
            for _ in range(2):
                task.seen = []
                trainer.fit_loop.max_epochs = trainer.current_epoch + 1
                trainer.fit(task, DataLoader(data, BATCH, **options))
                share = list(order or range(SAMPLES))
                if own or "sampler" not in options:
                    share = share[strategy.layout.model_group :: 2]
                assert (task.seen == share) == (order is not None), (own, options, task.seen)
            assert "_prepare_dataloader" not in vars(trainer._data_connector)


def check_numbers_differ() -> None:
    """Numbers and seeds that differ between ranks are named on all of them, at once."""
    last = dist.get_rank() == RANKS - 1
    for model, seed, text in (
        (4 if last else 2, 5, "num_gpus_per_model of rank 3: 4; rank 0 has num_gpus_per_model: 2"),
        (2, 6 if last else 5, "differ first at seed of rank 3: 6; rank 0 has seed: 5"),
    ):
        trainer = pl.Trainer(strategy=ours.DDPGroupStrategy(model, 1, seed=seed), **OPTIONS)
        begin = time.monotonic()
        with pytest.raises(ValueError, match=text):
            trainer.fit(Reads(), DataLoader(TensorDataset(torch.arange(SAMPLES))))
        assert time.monotonic() - begin < 5


WRONG = {
    "num_gpus_per_model is 3, which does not divide world_size, 4": (3, 4, 1),
    "read_group_size is 2, which does not divide num_gpus_per_model, 1": (1, 4, 2),
    "num_gpus_per_ensemble is 3, which does not divide world_size, 4": (1, 3, 1),
    "num_gpus_per_model is 4, which does not divide num_gpus_per_ensemble, 2": (4, 2, 1),
}


def refusals() -> list[str]:
    texts = []
    for text, (model, ensemble, reader) in WRONG.items():
        strategies = [ours.DDPEnsGroupStrategy(model, ensemble, reader)]
        if "ensemble" not in text:
            strategies.append(ours.DDPGroupStrategy(model, reader))
        for strategy in strategies:
            with pytest.raises(ValueError, match=text) as caught:
                pl.Trainer(strategy=strategy, **OPTIONS)
            texts.append(str(caught.value))
    assert not dist.is_initialized()
    return texts


def main() -> None:
    """Run all checks on this rank."""
    refused = refusals()
    task = Task(seed=1)
    trainer = pl.Trainer(strategy=ours.DDPGroupStrategy(2, 1, seed=5), **OPTIONS)
    check_fit(trainer, 5, task)
    assert gathered(refused) == [refused] * RANKS
    check_fit(trainer, 5, task)
    os.environ["TAGI_DDP_BASE_SEED"] = "8"
    strategy = ours.DDPGroupStrategy(2, 2)
    check_fit(pl.Trainer(strategy=strategy, use_distributed_sampler=False, **OPTIONS), 8, task)

    pl.seed_everything(3, workers=True, verbose=False)
    strategy = ours.DDPEnsGroupStrategy(2, 4, 2, seed=-6, process_group_backend="gloo")
    check_fit(pl.Trainer(strategy=strategy, **OPTIONS), -6, task, workers=1)
    strategy = ours.DDPEnsGroupStrategy(1, 2, 1)
    check_fit(pl.Trainer(strategy=strategy, **OPTIONS), 8, Task(seed=2))

    task.fails = True
    trainer = pl.Trainer(strategy=ours.DDPEnsGroupStrategy(2, 2, 1), **OPTIONS)
    with pytest.raises(KeyError, match="a task that fails"):
        trainer.fit(task, DataLoader(Samples(), BATCH))
    check_nothing_left(trainer.strategy, task)

    check_order()
    check_numbers_differ()
    rank = dist.get_rank()
    info = (rank, rank // 2, rank % 2, 2)
    check_without_fit(ours.DDPGroupStrategy(2, 1), (*info, 0, 1))
    check_without_fit(ours.DDPEnsGroupStrategy(2, 4, 2), (*info, 0, rank, 1, rank % 2, 2))
    for strategy in (ours.DDPGroupStrategy, ours.DDPEnsGroupStrategy):
        assert issubclass(strategy, pl.strategies.DDPStrategy)
    dist.barrier()
    dist.destroy_process_group()


def start(rank: int, port: int) -> None:
    """Be a rank, as torchrun starts it."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        WORLD_SIZE=str(RANKS),
        LOCAL_WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="test",
    )
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # Lightning's hints to users: a sampler, more workers
    for name in ("lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    main()


def start_all() -> int:
    """Fork the ranks; return 0 if all end well."""
    gc.freeze()  # what is imported is left out of the ranks' collections, which so take no time
    fork = multiprocessing.get_context("fork")
    port = free_port()
    ranks = [fork.Process(target=start, args=(rank, port)) for rank in range(RANKS)]
    deadline = time.monotonic() + LIMIT
    try:
        for rank in ranks:
            rank.start()
        running = {rank.sentinel: rank for rank in ranks}
        while running:
            ended = wait(list(running), max(0.0, deadline - time.monotonic()))
            if not ended:
                print(f"ranks were not done in {LIMIT:g} s", file=sys.stderr)
                return 1
            if any(running.pop(sentinel).exitcode for sentinel in ended):
                return 1
        return 0
    finally:
        for rank in ranks:
            if rank.is_alive():
                rank.kill()
            rank.join()


if __name__ == "__main__":
    sys.exit(start_all())
