"""TAGI networks on groups of ranks: who trains with whom, seeds, ensembles, errors."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import numpy as np
import pytagi
import pytest
import torch
from support.networks import NETWORKS, distance, learn, parameters
from support.rank_pool import RankPool

from tagi_ddp import CommunicatorError, DDPSequential, PeerLost
from tagi_ddp.communicators import all_gather_object
from tagi_ddp.communicators.guard import AllRanksRaise
from tagi_ddp.strategy import DDPEnsGroupStrategy, DDPGroupStrategy

MLP = NETWORKS["mlp"]


def train_on_data(model: DDPSequential, data: int, steps: int = 2) -> Any:
    """Train on this rank's share of batches that are drawn from ``data``."""
    comm = model.communicator
    for step in range(steps):
        x, y = MLP.batch(100 * data + step, 12)
        learn(model, x[comm.rank :: comm.size], y[comm.rank :: comm.size])
        model.step()
    return parameters(model)


def one_network(comm: Any) -> tuple[Any, Any, Any]:
    with DDPGroupStrategy(2, 1, communicator=comm, seed=3, average=False) as strategy:
        drawn = np.random.random()
        model = strategy.setup(MLP.build())
        trained = train_on_data(model, 1)
    comm.barrier()  # the user's communicator is still open
    return drawn, trained, (model.average, strategy.group is comm)


def test_one_network(shm: RankPool) -> None:
    """All ranks train one network, and draw by their model groups."""
    seeds, trained, options = zip(*shm.run(one_network), strict=True)
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]
    assert set(options) == {(False, True)}
    assert all(distance(trained[0], other) == 0 for other in trained[1:])
    alone = shm.run(one_network_alone, size=1)[0]
    assert distance(trained[0], alone) < 1e-5


def one_network_alone(comm: Any) -> Any:
    with DDPGroupStrategy(1, 1, communicator=comm, seed=3, average=False) as strategy:
        return train_on_data(strategy.setup(MLP.build()), 1)


def ensemble(comm: Any, model_size: int, ensemble_size: int) -> tuple[int, Any, Any, Any, Any]:
    """Train each member on data of its own."""
    with DDPEnsGroupStrategy(
        model_size, ensemble_size, 1, communicator=comm, seed=3, average=False
    ) as strategy:
        model = strategy.setup(MLP.build())
        begin = parameters(model)
        trained = train_on_data(model, strategy.layout.member)
        own = [values.reshape(4, -1).copy() for values in model(MLP.batch(9, 4)[0])]
        share = np.arange(strategy.group.rank, 4, strategy.group.size)
        mixed = strategy.mixture(*(values[share] for values in own))
        return strategy.layout.member, begin, trained, own, (share, *mixed)


@pytest.mark.parametrize(
    ("world", "model_size", "ensemble_size"),
    [(1, 1, 1), (2, 1, 2), (4, 1, 2), (4, 2, 4), (4, 1, 4), (4, 2, 2)],
)
def test_members_train_apart(
    shm: RankPool, world: int, model_size: int, ensemble_size: int
) -> None:
    answers = shm.run(ensemble, model_size, ensemble_size, size=world)
    members = [answer[0] for answer in answers]
    assert len(set(members)) == ensemble_size // model_size
    for (member, begin, trained, own, _), other in itertools.product(answers, answers):
        same = member == other[0]
        assert (distance(begin, other[1]) == 0) == same
        assert (distance(trained, other[2]) == 0) == same
        assert np.array_equal(own[0], other[3][0]) == same

    means, variances = (
        np.array([answers[members.index(member)][3][i] for member in set(members)], np.float64)
        for i in (0, 1)
    )
    mean = means.mean(axis=0)
    variance = (variances + means**2).mean(axis=0) - mean**2
    for *_, (share, mixed_mean, mixed_variance) in answers:
        np.testing.assert_allclose(mixed_mean, mean[share], rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(mixed_variance, variance[share], rtol=1e-5)


def member_by_hand(comm: Any) -> tuple[Any, Any]:
    """Train the members of two ranks each, by the strategy and without it."""
    with DDPEnsGroupStrategy(2, 4, 1, communicator=comm, seed=3, average=False) as strategy:
        net = MLP.build()
        state = net.state_dict()
        trained = train_on_data(strategy.setup(net), strategy.layout.member)
    with comm.split(comm.rank // 2) as group:
        net = MLP.build()
        net.load_state_dict(state)
        model = DDPSequential(net, average=False, communicator=group)
        return trained, train_on_data(model, comm.rank // 2)


def test_a_member_is_a_ddp_sequential(shm: RankPool) -> None:
    for ours, by_hand in shm.run(member_by_hand):
        assert distance(ours, by_hand) == 0


def built_before(comm: Any) -> str:
    pytagi.manual_seed(5)
    net = MLP.build()
    strategy = DDPEnsGroupStrategy(1, 2, 1, communicator=comm, seed=3)
    with strategy, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy.setup(net)
    return " ".join(str(warning.message) for warning in caught)


def test_equal_members_warn(shm: RankPool) -> None:
    for text in shm.run(built_before, size=2):
        assert "equal parameters: build each network after the strategy" in text


WRONG = {
    "num_gpus_per_model is 3, which does not divide world_size, 4": (3, 4, 1),
    "read_group_size is 2, which does not divide num_gpus_per_model, 1": (1, 4, 2),
    "num_gpus_per_ensemble is 3, which does not divide world_size, 4": (1, 3, 1),
    "num_gpus_per_model is 4, which does not divide num_gpus_per_ensemble, 2": (4, 2, 1),
    "num_gpus_per_ensemble must be at least 1, got 0": (1, 0, 1),
}


def create_groups_of_wrong_sizes(comm: Any, sizes: tuple[int, int, int]) -> tuple[str, list[str]]:
    texts = []
    for kind, numbers in ((DDPEnsGroupStrategy, sizes), (DDPGroupStrategy, (sizes[0], sizes[2]))):
        try:
            kind(*numbers, communicator=comm, seed=1).close()
        except ValueError as error:
            texts.append(str(error))
    return texts[0], all_gather_object(comm, texts)


@pytest.mark.parametrize("text", WRONG)
def test_wrong_divisors(shm: RankPool, text: str) -> None:
    for own, everywhere in shm.run(create_groups_of_wrong_sizes, WRONG[text]):
        assert text in own
        assert everywhere == [everywhere[0]] * 4


DIFFERENT = {
    "num_gpus_per_model of rank 1: 2; rank 0 has num_gpus_per_model: 1": (
        (1, 2, 1, 3),
        (2, 2, 1, 3),
    ),
    "num_gpus_per_ensemble of rank 1: 1; rank 0 has num_gpus_per_ensemble: 2": (
        (1, 2, 1, 3),
        (1, 1, 1, 3),
    ),
    "num_gpus_per_ensemble of rank 1: 2; rank 0 has seed: 3": (
        (1, None, 1, 3),
        (1, 2, 1, 3),
    ),
    "seed of rank 1: 4; rank 0 has seed: 3": (
        (1, None, 1, 3),
        (1, None, 1, 4),
    ),
}
REFUSED = {
    "read_group_size must be an integer, got '1'": (
        (1, 2, 1, 3),
        (1, 2, "1", 3),
    ),
    "num_gpus_per_model must be an integer, got True": (
        (1, None, 1, 3),
        (True, None, 1, 3),
    ),
    "base must be an integer, got 'x'": (
        (1, 2, 1, 3),
        (1, 2, 1, "x"),
    ),
}


def create_groups_that_differ(comm: Any, calls: list[Any]) -> tuple[str, bool]:
    model, ensemble, reader, seed = calls[comm.rank]
    sizes = (model, reader) if ensemble is None else (model, ensemble, reader)
    kind = DDPGroupStrategy if ensemble is None else DDPEnsGroupStrategy
    with pytest.raises((ValueError, TypeError)) as caught:
        kind(*sizes, communicator=comm, seed=seed)
    comm.barrier()  # the group goes on being usable
    return str(caught.value), isinstance(caught.value, AllRanksRaise)


@pytest.mark.parametrize("text", DIFFERENT)
def test_numbers_that_differ_between_ranks(shm: RankPool, text: str) -> None:
    for found, all_raise in shm.run(create_groups_that_differ, DIFFERENT[text], size=2):
        assert found.startswith(f"the ranks' groups differ first at {text}. Give the same")
        assert all_raise  # none tells the others, which know


@pytest.mark.parametrize("text", REFUSED)
def test_numbers_that_are_wrong_on_one_rank(shm: RankPool, text: str) -> None:
    (first, all_raise), (second, _) = shm.run(create_groups_that_differ, REFUSED[text], size=2)
    assert second == text
    assert first == f"rank 1: {text}"
    assert all_raise


def wrong_seed(comm: Any) -> str:
    with pytest.raises(TypeError) as caught:
        DDPGroupStrategy(1, 1, communicator=comm, seed="x")  # type: ignore[arg-type]
    comm.barrier()
    return str(caught.value)


def test_a_seed_that_is_no_number(shm: RankPool) -> None:
    assert shm.run(wrong_seed, size=2) == ["base must be an integer, got 'x'"] * 2


def give_a_torch_module(comm: Any) -> str:
    strategy = DDPGroupStrategy(1, 1, communicator=comm, seed=3)
    model = torch.nn.Linear(2, 2) if comm.rank == 1 else MLP.build()
    try:
        strategy.setup(model)
    except (TypeError, PeerLost) as error:
        return str(error)
    return "nothing"


def test_torch_modules_are_sent_to_lightning(shm: RankPool) -> None:
    for text in shm.run(give_a_torch_module, size=2, fresh=True):
        assert "model must be a pytagi Sequential, got a Linear" in text
        assert "tagi_ddp.strategy.lightning" in text


def leave_in_an_error(comm: Any) -> tuple[str, str]:
    try:
        with DDPEnsGroupStrategy(1, 2, 1, communicator=comm, seed=3) as strategy:
            if comm.rank == 1:
                raise KeyError("the data of member 1")
            strategy.mixture([0.0], [1.0])
    except (KeyError, PeerLost) as error:
        kind, text = type(error).__name__, str(error)
    comm.barrier()
    return kind, text


def test_no_member_waits_for_one_that_failed(shm: RankPool) -> None:
    (kind, text), (other, _) = shm.run(leave_in_an_error, size=2, fresh=True)
    assert (kind, other) == ("PeerLost", "KeyError")
    assert "the data of member 1" in text


def test_closed() -> None:
    with DDPEnsGroupStrategy(1, 1, 1, seed=3) as strategy:  # one process, without a launcher
        model = strategy.setup(MLP.build())
        train_on_data(model, 0)
        mean, variance = model(MLP.batch(9, 4)[0])
        np.testing.assert_array_equal(strategy.mixture(mean, variance), (mean, variance))
    strategy.close()
    for call in (lambda: strategy.mixture([0.0], [1.0]), strategy.world.barrier):
        with pytest.raises(CommunicatorError, match="closed"):
            call()
