"""Group strategies for Lightning's DDPStrategy, of any of Lightning's packages."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from torch import distributed as dist
from torch.utils.data import DataLoader

from tagi_ddp.strategy.gradients import remove_gradient_scale, scale_gradients
from tagi_ddp.strategy.layout import EnsembleLayout, GroupLayout
from tagi_ddp.strategy.loaders import process_dataloader, sample_group, shuffles
from tagi_ddp.strategy.seeds import compared_seed, group_seed, same_groups, seed_everything
from tagi_ddp.torch_backend.operations import all_gather_values

if TYPE_CHECKING:  # The DDPStrategy of one of the packages comes next among the bases.
    from lightning.pytorch.strategies import DDPStrategy
else:
    DDPStrategy = object


class GroupStrategy(DDPStrategy):
    """Add model groups and reader groups to a DDPStrategy, which comes next among the bases.

    ``layout`` is that of this rank, once a Trainer has the strategy. The process groups exist while
    the Trainer runs: from before ``LightningModule.setup`` until the end of the last step.

    Args:
        num_gpus_per_model: the number of ranks that share a model, M.
        read_group_size: the number of ranks of a model that share a reader, R.
        seed: the base of all seeds; None: see `base_seed`.
        **kwargs: of DDPStrategy.

    Raises:
        TypeError, ValueError: from Trainer(): numbers do not divide; when the Trainer runs: they or
            the seed differ between ranks; the same on every rank.
    """

    layout: GroupLayout

    def __init__(
        self,
        num_gpus_per_model: int,
        read_group_size: int,
        *,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Keep the numbers until the world size is known."""
        super().__init__(**kwargs)
        self._num_gpus_per_model = num_gpus_per_model
        self._read_group_size = read_group_size
        self._seed = seed
        self._base = 0
        self._group_timeout = kwargs.get("timeout")
        self._groups: dict[str, dist.ProcessGroup] = {}

    @property
    def model_group(self) -> dist.ProcessGroup:
        """The ranks that share this rank's model: the ``mgroup`` of `tagi_ddp.sharding`."""
        return self._group("model_ranks")

    @property
    def reader_group(self) -> dist.ProcessGroup:
        """The ranks that share this rank's reader."""
        return self._group("reader_ranks")

    def _group(self, ranks: str) -> dist.ProcessGroup:
        if ranks not in self._groups:
            raise RuntimeError(
                "the strategy has groups only while its Trainer runs: use them in "
                "LightningModule.setup or later"
            )
        return self._groups[ranks]

    def set_world_ranks(self) -> None:
        """Set this rank's layout."""
        super().set_world_ranks()
        self.layout = self._make_layout()

    def _make_layout(self) -> GroupLayout:
        return GroupLayout(
            self.world_size, self._num_gpus_per_model, self._read_group_size, self.global_rank
        )

    def setup_environment(self) -> None:
        """Connect all ranks, and those of each group."""
        super().setup_environment()
        with same_groups(all_gather_values) as same:
            self._base = compared_seed(same, self.layout, self._seed)
        self._make_group("model_ranks")
        self._make_group("reader_ranks")

    def _make_group(self, ranks: str) -> None:
        """Make the groups of one kind, on all ranks in the same order; keep this rank's."""
        layouts = (replace(self.layout, rank=rank) for rank in range(self.layout.world_size))
        groups = dict.fromkeys(getattr(layout, ranks) for layout in layouts)
        self._groups[ranks], _ = dist.new_subgroups_by_enumeration(
            [list(group) for group in groups], timeout=self._group_timeout
        )

    def setup(self, trainer: Any) -> None:
        """Set up as Lightning does, then seed this process by its model group."""
        super().setup(trainer)
        keep_order(trainer)
        seed_everything(group_seed(self._base, self.layout.model_group))

    def configure_ddp(self) -> None:
        """Register the gradients' hooks, then wrap the model."""
        self.register_parameter_hooks()
        super().configure_ddp()

    def register_parameter_hooks(self) -> None:
        """Scale the model's gradients for the mean over all ranks, see `scale_gradients`.

        Parameters before the split have "trainable" in their full names. May be called again.
        """
        assert self.lightning_module is not None
        scale_gradients(self.lightning_module, self.layout)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The arguments of Lightning's samplers, to share samples among the sample groups."""
        number, groups = sample_group(self.layout)
        return {"num_replicas": groups, "rank": number}

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return a loader of the samples of this rank, see `loaders.process_dataloader`.

        Lightning's sampler, if it made one, shuffles if the loader did, see `keep_order`. A loader
        without a sampler shares its samples even after ``Trainer(use_distributed_sampler=False)``,
        except in predict; give it a sampler to choose them yourself. Use that option for datasets
        that have both indices and ``set_comm_group_info``: Lightning's sampler would share the
        indices before the dataset gets the groups.
        """
        loader = process_dataloader(
            cast(DataLoader[Any], super().process_dataloader(dataloader)), self.layout
        )
        lightning_seeds = os.environ.get("PL_SEED_WORKERS") == "1"
        if lightning_seeds and isinstance(loader, DataLoader) and loader.worker_init_fn is None:
            loader.worker_init_fn = _keep_seeds
        return loader

    def teardown(self) -> None:
        """Remove the model's hooks, and leave the groups after Lightning's own teardown."""
        if self.lightning_module is not None:
            remove_gradient_scale(self.lightning_module)
            forget_order(self.lightning_module.trainer)
        try:
            super().teardown()
        finally:
            while self._groups:
                _, group = self._groups.popitem()
                dist.destroy_process_group(group)


class EnsGroupStrategy(GroupStrategy):
    """Add ensemble groups, too, whose members are model groups that share one loss.

    Args:
        num_gpus_per_model: the number of ranks that share a model, which is a member, M.
        num_gpus_per_ensemble: the number of ranks that share an ensemble, E, a multiple of M.
        read_group_size: the number of ranks of a model that share a reader, R.
        seed, kwargs: as for `GroupStrategy`.

    Raises:
        TypeError, ValueError: from Trainer(): numbers do not divide; the same on every rank.
    """

    layout: EnsembleLayout

    def __init__(
        self,
        num_gpus_per_model: int,
        num_gpus_per_ensemble: int,
        read_group_size: int,
        *,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Keep the numbers until the world size is known."""
        super().__init__(num_gpus_per_model, read_group_size, seed=seed, **kwargs)
        self._num_gpus_per_ensemble = num_gpus_per_ensemble

    @property
    def ensemble_group(self) -> dist.ProcessGroup:
        """The ranks of all members of this rank's ensemble."""
        return self._group("ensemble_ranks")

    @property
    def ensemble_subgroup(self) -> dist.ProcessGroup:
        """The ranks with this rank's number in the model, one of each member of its ensemble."""
        return self._group("subgroup_ranks")

    def _make_layout(self) -> EnsembleLayout:
        return EnsembleLayout(
            self.world_size,
            self._num_gpus_per_model,
            self._read_group_size,
            self.global_rank,
            self._num_gpus_per_ensemble,
        )

    def setup_environment(self) -> None:
        """Connect all ranks, and those of each group."""
        super().setup_environment()
        self._make_group("ensemble_ranks")
        self._make_group("subgroup_ranks")


def keep_order(trainer: Any) -> None:
    """Shuffle by Lightning's samplers only if the user's loader does; in fit it always would."""
    connector = trainer._data_connector
    prepare = type(connector)._prepare_dataloader

    def prepare_in_order(dataloader: Any, shuffle: bool, mode: Any) -> Any:
        ordered = isinstance(dataloader, DataLoader) and not shuffles(dataloader)
        return prepare(connector, dataloader, shuffle=shuffle and not ordered, mode=mode)

    connector._prepare_dataloader = prepare_in_order


def forget_order(trainer: Any) -> None:
    """Undo `keep_order`."""
    vars(trainer._data_connector).pop("_prepare_dataloader", None)


def _keep_seeds(worker: int) -> None:
    """Keep torch's seeds of a loader's worker.

    torch derives them from the seed of the process, which is that of its model group. Lightning
    would mix in the rank, and the ranks of a model group would draw differently.
    """
