"""Agreement of real networks, the times of merges, and steps inside of a share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.networks import NETWORKS, learn, parameters
from support.rank_pool import RankPool
from support.reports import report, wrap_merging

from tagi_ddp._backend import cap_factor
from tagi_ddp.communicators.single import SingleCommunicator
from tagi_ddp.elastic.exchange import ElasticMerging
from tagi_ddp.update.exchange import Setting
from tagi_ddp.update.reduction import Reduction

Options = dict[str, Any]


def learn_alike(
    comm: Any, device: str, options: Options, steps: int = 4
) -> tuple[list[float], list[float], list[float]]:
    """All ranks learn the same, that surprises them: all steps are capped.

    Returns how far each layer's means moved by the rank's own steps, then merged; the agreement.
    """
    model = wrap_merging(comm, device=device, **options)
    before = parameters(model)
    for step in range(steps):
        x, y = NETWORKS["mlp"].batch(step, 6)
        learn(model, x, y + 3000)
        model.step()

    def moved() -> list[float]:
        now = parameters(model)
        return [float(np.linalg.norm(now[name][0] - before[name][0])) for name in before]

    own = moved()
    model.merge()
    return own, moved(), list(model.get_merge_agreement().values())


@pytest.mark.parametrize(
    "options",
    [{"sync_every": 10}, {"sync_every": 10, "node_size": 2}],
    ids=["one level", "two levels"],
)
@pytest.mark.parametrize("device", ["cpu", "cpu:0"])
def test_ranks_that_learn_alike_go_as_far_as_each_alone(
    shm: RankPool, device: str, options: Options
) -> None:
    own, together, agreement = shm.run(learn_alike, device, options, size=4)[0]
    np.testing.assert_allclose(together, own, rtol=0.02)
    np.testing.assert_allclose(agreement, 1, atol=1e-4)
    bayes = {**options, "merge": "bayes"}
    own, summed, nothing = shm.run(learn_alike, device, bayes, size=4)[0]
    assert all(far > 1.2 * near for far, near in zip(summed, own, strict=True))
    assert nothing == [0] * len(agreement)


@pytest.mark.parametrize("device", ["cpu", "cpu:0"])
def test_steps_alone_are_capped_as_parts_of_a_step_of_all(shm: RankPool, device: str) -> None:
    options = {"sync_every": 10}
    one = learn_alike(SingleCommunicator(), device, options, steps=1)[0]
    part = shm.run(learn_alike, device, options, 1, size=4)[0][0]
    narrower = cap_factor(24) * 2 / cap_factor(6)
    np.testing.assert_allclose(np.array(one[-1:]) / part[-1:], narrower, rtol=0.02)
    bayes = shm.run(learn_alike, device, {**options, "merge": "bayes"}, 1, size=4)[0][0]
    np.testing.assert_allclose(bayes, one, rtol=1e-5)


def tremble(comm: Any, device: str, options: Options, shares: int, local: int) -> bool:
    """All ranks learn that values are large, and small, by turns. Returns whether they are trusted.

    They merge after so many shares, each of so many steps.
    """
    model = wrap_merging(comm, device=device, sync_every=shares, **options)
    x, y = NETWORKS["mlp"].batch(comm.rank, 6)
    for merge in range(6):
        for _ in range(shares):
            for part in model.local_batches(np.arange(6), 6 // local):
                learn(model, x[part], y[part] + 3000 * (-1) ** merge)
                model.step()
    state = model._ranks.exchange.state_dict()
    level = state["node"] if state["nodes"] is None else state["nodes"]["common"]
    return bool((level["damping"]["trust"] == 1).all())


@pytest.mark.parametrize("options", [{}, {"node_size": 1}], ids=["one level", "two levels"])
@pytest.mark.parametrize("device", ["cpu", "cpu:0"])
def test_single_steps_are_trusted(shm: RankPool, device: str, options: Options) -> None:
    for shares, local, trusted in ((1, 1, True), (2, 1, False), (1, 2, False)):
        found = shm.run(tremble, device, options, shares, local, size=2)
        assert found == [trusted, trusted], (shares, local)


class NoCalls:
    """No rank is called for another group."""

    awaited = False

    def called(self, progress: int, exchanging: bool) -> bool:
        return False


def fall_behind(comm: Any) -> int:
    """Rank 1 has made two steps that rank 0 knows nothing of, and goes on from where that is."""
    with wrap_merging(comm) as model:
        reduction = Reduction("precision", sync_every=4)
        setting = Setting(comm, model._local.replica, average=False, rollback=model._local.rollback)
        exchange = ElasticMerging(setting, reduction, NoCalls())
        for _ in range(1 + comm.rank):
            learn(model, *NETWORKS["mlp"].batch(0, 6))
            exchange(6)
        exchange.enter(comm)
        exchange.take_over(0, behind=comm.rank == 1)
        steps = exchange.state_dict()["node"]["steps"]
        exchange.close()
    return int(steps)


def test_steps_that_are_left_behind_do_not_count(shm: RankPool) -> None:
    assert shm.run(fall_behind, size=2) == [1, 0]


def learn_locally(comm: Any, sizes: list[int]) -> tuple[str, str, int]:
    """Shares of a batch in local batches, and the same by as many steps."""
    x, y = NETWORKS["mlp"].batch(comm.rank, 40)
    share = np.arange(sizes[comm.rank])
    locally, by_steps = wrap_merging(comm), wrap_merging(comm, sync_every=7)
    for _ in range(2):
        for part in locally.local_batches(share, 5):
            learn(locally, x[part], y[part])
            locally.step()
        left = locally.unmerged_steps
        for first in range(0, len(share), 5):
            learn(by_steps, x[share[first : first + 5]], y[share[first : first + 5]])
            by_steps.step()
        by_steps.merge()
    return locally.check_replicas(), by_steps.check_replicas(), left


@pytest.mark.parametrize("sizes", [[20, 20, 20], [12, 30, 0]])
def test_local_batches_are_steps_of_one_share(shm: RankPool, sizes: list[int]) -> None:
    for locally, by_steps, left in shm.run(learn_locally, sizes, size=3):
        assert locally == by_steps
        assert left == 0


def merged_after(comm: Any, options: Options) -> list[int]:
    model, found = wrap_merging(comm, **options), []
    for step in range(1, 161):
        learn(model, *NETWORKS["mlp"].batch(step, 2))
        model.step()
        if model.unmerged_steps == 0:
            found.append(step)
    return found


def test_networks_that_know_little_merge_more_often(shm: RankPool) -> None:
    early = [8, 16, 24, 32, 40, 48, 56, 64, 73, 83, 94, 107, 122, 139, 158]
    assert shm.run(merged_after, {"sync_every": 32}, size=2) == [early, early]
    late = list(range(32, 161, 32))
    bayes = {"sync_every": 32, "merge": "bayes"}
    assert shm.run(merged_after, bayes, size=2) == [late, late]
    often = list(range(7, 161, 7))
    assert shm.run(merged_after, {"sync_every": 7}, size=2) == [often, often]


def cut_wrongly(comm: Any) -> tuple[str, str]:
    model = wrap_merging(comm)
    if comm.rank == 1:
        return report(lambda: next(model.local_batches(np.arange(4), 0)))[:2]
    return report(model.merge)[:2]


def test_a_wrong_size_keeps_nobody_waiting(shm: RankPool) -> None:
    waiting, wrong = shm.run(cut_wrongly, size=2, fresh=True)
    assert wrong == ("ValueError", "size must be at least 1, got 0")
    assert waiting[0] == "PeerLost"
    assert "size must be at least 1" in waiting[1]
