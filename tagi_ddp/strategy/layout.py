"""The groups of a rank: plain arithmetic, without processes.

All groups but the ensemble sub-groups are blocks of consecutive ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from tagi_ddp.checks import integer


@dataclass(frozen=True)
class GroupLayout:
    """The groups of ``rank`` among ``world_size`` ranks that share models and readers.

    Args:
        world_size: the number of ranks, W.
        num_gpus_per_model: the number of ranks that share a model, M, which must divide W.
        read_group_size: the number of these that share a reader, R, which must divide M.
        rank: this rank, r, 0 to W - 1.

    Raises:
        TypeError, ValueError: naming the argument, or both numbers of which one must divide the
            other; the same on every rank.
    """

    world_size: int
    num_gpus_per_model: int
    read_group_size: int
    rank: int

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name, low in (
            ("world_size", 1),
            ("num_gpus_per_model", 1),
            ("read_group_size", 1),
            ("rank", 0),
        ):
            object.__setattr__(self, name, integer(name, getattr(self, name), low))
        _check_divides("num_gpus_per_model", self.num_gpus_per_model, "world_size", self.world_size)
        _check_divides(
            "read_group_size", self.read_group_size, "num_gpus_per_model", self.num_gpus_per_model
        )
        if self.rank >= self.world_size:
            raise ValueError(f"rank is {self.rank}, but world_size is {self.world_size}")

    @property
    def model_group(self) -> int:
        """The number of this rank's model group, r // M."""
        return self.rank // self.num_gpus_per_model

    @property
    def model_rank(self) -> int:
        """This rank's number in its model group, r % M."""
        return self.rank % self.num_gpus_per_model

    @property
    def model_groups(self) -> int:
        """The number of model groups, W / M."""
        return self.world_size // self.num_gpus_per_model

    @property
    def model_ranks(self) -> range:
        """The ranks of this rank's model group."""
        return _block(self.model_group, self.num_gpus_per_model)

    @property
    def reader_group(self) -> int:
        """The number of this rank's reader group inside of its model group, (r % M) // R."""
        return self.model_rank // self.read_group_size

    @property
    def reader_rank(self) -> int:
        """This rank's number in its reader group, (r % M) % R."""
        return self.model_rank % self.read_group_size

    @property
    def reader_root(self) -> int:
        """The rank that reads for this rank's reader group, (r // R) R."""
        return self.rank // self.read_group_size * self.read_group_size

    @property
    def reader_ranks(self) -> range:
        """The ranks of this rank's reader group."""
        return _block(self.rank // self.read_group_size, self.read_group_size)


@dataclass(frozen=True)
class EnsembleLayout(GroupLayout):
    """A `GroupLayout` whose model groups are members of ensembles.

    Args:
        num_gpus_per_ensemble: the number of ranks that share an ensemble, E, a multiple of M that
            must divide W.
    """

    num_gpus_per_ensemble: int

    def __post_init__(self) -> None:
        """Check the numbers."""
        name = "num_gpus_per_ensemble"
        size = integer(name, self.num_gpus_per_ensemble, 1)
        object.__setattr__(self, name, size)
        super().__post_init__()
        _check_divides(name, size, "world_size", self.world_size)
        _check_divides("num_gpus_per_model", self.num_gpus_per_model, name, size)

    @property
    def ensemble_group(self) -> int:
        """The number of this rank's ensemble group, r // E."""
        return self.rank // self.num_gpus_per_ensemble

    @property
    def ensemble_rank(self) -> int:
        """This rank's number in its ensemble group, r % E."""
        return self.rank % self.num_gpus_per_ensemble

    @property
    def ensemble_groups(self) -> int:
        """The number of ensemble groups, W / E."""
        return self.world_size // self.num_gpus_per_ensemble

    @property
    def ensemble_ranks(self) -> range:
        """The ranks of this rank's ensemble group."""
        return _block(self.ensemble_group, self.num_gpus_per_ensemble)

    @property
    def members(self) -> int:
        """The number of members of an ensemble, E / M."""
        return self.num_gpus_per_ensemble // self.num_gpus_per_model

    @property
    def member(self) -> int:
        """The number of this rank's member in its ensemble."""
        return self.ensemble_rank // self.num_gpus_per_model

    @property
    def subgroup_ranks(self) -> range:
        """The ranks with this rank's `model_rank`, one in each member of its ensemble."""
        ranks = self.ensemble_ranks
        return range(ranks.start + self.model_rank, ranks.stop, self.num_gpus_per_model)


def _block(number: int, size: int) -> range:
    return range(number * size, (number + 1) * size)


def _check_divides(part_name: str, part: int, whole_name: str, whole: int) -> None:
    if whole % part:
        raise ValueError(
            f"{part_name} is {part}, which does not divide {whole_name}, {whole}; choose one that "
            "does"
        )
