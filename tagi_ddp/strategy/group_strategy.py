"""TAGI networks on groups of ranks: one network on all of them, or an ensemble of several."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from numpy.typing import ArrayLike

from tagi_ddp.communicators import Communicator, all_gather_object, init
from tagi_ddp.communicators.equality import all_or_none
from tagi_ddp.communicators.guard import Closing
from tagi_ddp.engine.buffers import FloatArray
from tagi_ddp.sequential.ddp_sequential import DDPSequential
from tagi_ddp.strategy.layout import EnsembleLayout, GroupLayout
from tagi_ddp.strategy.mixture import mixture
from tagi_ddp.strategy.seeds import compared_seed, group_seed, same_groups, seed_everything


class DDPGroupStrategy(Closing):
    """Train one TAGI network on all ranks.

    Making a strategy is a collective call; it seeds Python, numpy, torch and the engine by this
    rank's model group. Build the network after that, and pass it to `setup`. For models of torch
    there are `tagi_ddp.strategy.lightning` and `tagi_ddp.strategy.pytorch_lightning`.

    ``layout`` holds this rank's groups, ``group`` the ranks that train its network, ``world`` all.

    Args:
        num_gpus_per_model: the number of ranks of a model group, M. A TAGI network is not split
            over them; they share the samples of their group.
        read_group_size: the number of ranks of a model group that share a reader, R.
        communicator: of all ranks; it stays open when the strategy is closed. None: `init()`.
        seed: the base of all seeds; None: see `base_seed`.
        **options: keyword arguments of `DDPSequential`.

    Raises:
        TypeError, ValueError: numbers do not divide, or they or the seed differ between ranks; the
            same on every rank.
    """

    layout: GroupLayout
    world: Communicator
    group: Communicator

    def __init__(
        self,
        num_gpus_per_model: int,
        read_group_size: int,
        *,
        communicator: Communicator | None = None,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        """Compute the groups and seed this process."""
        self._options = options
        self._begin(
            lambda size, rank: GroupLayout(size, num_gpus_per_model, read_group_size, rank),
            communicator,
            seed,
        )

    def _begin(
        self,
        layout: Callable[[int, int], GroupLayout],
        communicator: Communicator | None,
        seed: int | None,
    ) -> None:
        """Make the groups by ``layout``, of the world size and a rank; seed this process."""
        with ExitStack() as made:
            self.world = made.enter_context(init()) if communicator is None else communicator
            with same_groups(self.world) as same:
                self.layout = layout(self.world.size, self.world.rank)
                base = compared_seed(same, self.layout, seed)
            self._connect(made)
            seed_everything(group_seed(base, self.layout.model_group))
            self._made = made.pop_all()

    def _connect(self, made: ExitStack) -> None:
        """Make the communicators of the groups; ``made`` closes them."""
        self.group: Communicator = self.world

    def setup(self, model: Any) -> DDPSequential:
        """Return the replica of ``model``, a pytagi Sequential, that is bound to `group`.

        A collective call. The ranks of `group` share each batch, as by
        ``DistributedSampler(data, strategy.group.size, strategy.group.rank)``.

        Raises:
            TypeError: on all ranks, if ``model`` is no Sequential on one.
        """
        with all_or_none(self.group, "models", "Give pytagi Sequentials."):
            if not hasattr(model, "_cpp_backend"):
                raise TypeError(
                    f"model must be a pytagi Sequential, got a {type(model).__name__}: for models "
                    "of torch give Lightning's Trainer a strategy of tagi_ddp.strategy.lightning "
                    "or tagi_ddp.strategy.pytorch_lightning"
                )
        return DDPSequential(model, communicator=self.group, **self._options)

    def close(self) -> None:
        """Leave the groups that the strategy made; may be called again."""
        self._made.close()

    def _give_up(self, error: BaseException) -> None:
        self._made.__exit__(type(error), error, error.__traceback__)


class DDPEnsGroupStrategy(DDPGroupStrategy):
    """Train the members of an ensemble of TAGI networks, each on its own ranks.

    The ranks of an ensemble group are split into members of ``num_gpus_per_model`` ranks each.
    Ensemble groups are replicas: the ranks of member k in all of them train one network, and make
    the ``group`` of each of these ranks. Members begin from different parameters if each rank
    builds its network after the strategy, which seeds it. ``members`` connects this rank with one
    rank of each other member.

    Args:
        num_gpus_per_model: the number of ranks of a member, M.
        num_gpus_per_ensemble: the number of ranks of an ensemble group, E, a multiple of M.
        read_group_size: the number of ranks of a member that share a reader, R.
        communicator, seed, options: as for `DDPGroupStrategy`.

    Raises:
        TypeError, ValueError: numbers do not divide, or they or the seed differ between ranks; the
            same on every rank.
    """

    layout: EnsembleLayout
    members: Communicator

    def __init__(
        self,
        num_gpus_per_model: int,
        num_gpus_per_ensemble: int,
        read_group_size: int,
        *,
        communicator: Communicator | None = None,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        """Compute the groups, make their communicators, and seed this process."""
        self._options = options
        self._begin(
            lambda size, rank: EnsembleLayout(
                size, num_gpus_per_model, read_group_size, rank, num_gpus_per_ensemble
            ),
            communicator,
            seed,
        )

    def _connect(self, made: ExitStack) -> None:
        self.group = self._split(self.layout.member, made)
        self.members = self._split(self.layout.subgroup_ranks.start, made)

    def _split(self, color: int, made: ExitStack) -> Communicator:
        group = self.world.split(color)
        assert group is not None  # This rank has a color.
        return made.enter_context(group)

    def setup(self, model: Any) -> DDPSequential:
        """Return the replica of ``model``, a pytagi Sequential, that is bound to `group`.

        A collective call. Warns if members begin from equal parameters, as networks do that were
        built before the strategy.
        """
        replica = super().setup(model)
        hashes = all_gather_object(self.members, replica.check_replicas())
        if len(set(hashes)) < len(hashes):
            warnings.warn(
                "members of the ensemble begin from equal parameters: build each network after the "
                "strategy, which seeds its member",
                RuntimeWarning,
                stacklevel=2,
            )
        return replica

    def mixture(self, mu: ArrayLike, var: ArrayLike) -> tuple[FloatArray, FloatArray]:
        """Return mean and variance of the ensemble's prediction; see `mixture`.

        A collective call of ``members``, with their predictions for the same inputs: for the same
        share of a batch, or for all of it.
        """
        return mixture(self.members, mu, var)
