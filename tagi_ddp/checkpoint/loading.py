"""The loading of a checkpoint by all ranks, once all of it has been read and checked."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, TypeVar

from tagi_ddp.checkpoint import generators as of
from tagi_ddp.checkpoint import parts as of_parts
from tagi_ddp.checkpoint.errors import CheckpointError
from tagi_ddp.checkpoint.folder import Checkpoint
from tagi_ddp.checkpoint.module_states import fitted
from tagi_ddp.checkpoint.tree import DamagedFile, read_tree
from tagi_ddp.communicators import Communicator, CommunicatorError
from tagi_ddp.communicators.equality import Entry
from tagi_ddp.data import DistributedSampler

T = TypeVar("T")


class Together(Protocol):
    """A function that calls another on each rank; all raise CheckpointError if one raises."""

    def __call__(self, describe: Callable[[], list[Entry]]) -> None:
        """Call ``describe``."""
        ...


class OnDisk(Protocol):
    """A function that calls another, which waits for the disk; TimeoutError at a limit."""

    def __call__(self, call: Callable[[], T], failure: str) -> T:
        """Return the result of ``call``; ``failure`` begins the text of the error."""
        ...


class Loading:
    """The parts of a run, and the checkpoint to load into them.

    Args:
        found: the checkpoint.
        check_run: raises ValueError if it is of another run.
        parts, sampler, generators: as for `Checkpoints`.
        communicator: of all ranks.
        agree, disk: the calls that wait for the other ranks, and for the disk.
    """

    def __init__(
        self,
        found: Checkpoint,
        check_run: Callable[[], None],
        parts: Mapping[str, Any],
        sampler: DistributedSampler | None,
        generators: Mapping[str, Any],
        communicator: Communicator,
        agree: Together,
        disk: OnDisk,
    ) -> None:
        self._check_run = check_run
        self._found, self._sampler, self._own = found, sampler, generators
        self._comm, self._agree, self._disk = communicator, agree, disk
        self._models = {n: part for n, part in parts.items() if of_parts.has_run_state(part)}
        self._others = {n: part for n, part in parts.items() if n not in self._models}
        self._states: dict[str, Any] = {}
        self._generators: dict[str, Any] = {}
        self._loads: list[Callable[[], None]] = []
        self._batch_sizes: list[int] = []
        self._ranks = 0
        self._extra: Any = None

    def check(self) -> None:
        """Read and check all that `load` loads; raise CheckpointError on all ranks."""
        self._agree(self._verify)
        self._agree(self._read_entries)
        try:
            for name, part in self._models.items():
                self._loads.append(part.check_run_state(partial(self._entry, name), self._ranks))
        except CommunicatorError:
            raise
        except Exception as error:  # All ranks raise it.
            folder = str(self._found.path.parent)
            raise CheckpointError(f"{error}. The folder is {folder!r}") from error

    def load(self) -> Any:
        """Load all; return the ``extra`` of `save`."""
        self._agree(self._load_others)
        for load in self._loads:
            load()
        if self._sampler is not None:
            self._sampler.go_on(self._batch_sizes)
        for name, (generator, state) in self._matching().items():
            if state is not None:
                of.set_state(generator, state)
            elif name in self._own:
                warnings.warn(
                    f"the generator {name!r} differed between the ranks, and the number of ranks "
                    "has changed: it keeps its present state. Seed it by rank and step",
                    RuntimeWarning,
                    stacklevel=4,
                )
        return self._extra

    # --- checks ---------------------------------------------------------------------------------

    def _verify(self) -> list[Entry]:
        """Verify this rank's share of the files; together, the ranks verify all."""
        self._read(self._check_run)
        self._ranks = self._read(lambda: self._found.ranks)
        for rank in range(self._comm.rank, self._ranks, self._comm.size):
            self._read(partial(self._found.verify, rank))
        return []

    def _read_entries(self) -> list[Entry]:
        found = self._found
        own = self._comm.rank if self._ranks == self._comm.size else None
        for name, part in self._others.items():
            state = self._read(partial(of_parts.entry_of, found, own, "parts", name))
            if state is None:
                raise ValueError(
                    f"{name} differed between the {self._ranks} ranks that saved it: resume on as "
                    "many"
                )
            self._states[name] = fitted(part, state)
            of_parts.check_state(name, part, self._states[name])
        self._generators = self._read(partial(of_parts.generators_of, found, own))
        for name, (generator, state) in self._matching().items():
            if state is not None:
                of.check_state(name, generator, state)
        if self._sampler is not None:
            sizes = self._read(lambda: found.run.get("batch_sizes", []))
            if not isinstance(sizes, list) or any(type(size) is not int for size in sizes):
                raise DamagedFile(f"{found.path / 'run.json'} is damaged: batch_sizes is {sizes!r}")
            copy.copy(self._sampler).go_on(sizes)
            self._batch_sizes = sizes
        self._extra = self._read(partial(read_tree, found.file_of(own or 0), "extra"))
        return []

    def _matching(self) -> dict[str, tuple[Any, Any]]:
        """Return the generators that exist here and were saved, with their saved states."""
        saved = self._generators
        here = {**of.global_generators(saved), **self._own}
        return {name: (here[name], saved[name]) for name in here.keys() & saved.keys()}

    def _load_others(self) -> list[Entry]:
        for name, part in self._others.items():
            part.load_state_dict(self._states[name])
        return []

    def _entry(self, part: str, rank: int, name: str) -> Any:
        return self._read(partial(of_parts.run_state_of, self._found, part, rank, name))

    def _read(self, call: Callable[[], T]) -> T:
        return self._disk(call, f"{self._found.path} has not been read")
