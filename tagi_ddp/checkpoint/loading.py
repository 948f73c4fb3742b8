"""The loading of a checkpoint by all ranks, once all of it has been read and checked."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tagi_ddp.checkpoint import generators as of
from tagi_ddp.checkpoint import parts as of_parts
from tagi_ddp.checkpoint.disk import on_disk
from tagi_ddp.checkpoint.errors import CheckpointError, is_damage
from tagi_ddp.checkpoint.folder import FORMAT, FORMATS, Checkpoint
from tagi_ddp.checkpoint.module_states import fitted
from tagi_ddp.checkpoint.tree import DamagedFile, read_tree
from tagi_ddp.communicators import Communicator, CommunicatorError

T = TypeVar("T")


def load_last(
    choose: Callable[[set[Path], list[str]], Checkpoint | None],
    check: Callable[[Checkpoint], Callable[[], T]],
    remedy: str | None,
    damaged: Callable[[Exception], bool] = is_damage,
    warns: bool = True,
) -> tuple[Checkpoint, T] | None:
    """Load the last checkpoint that is not damaged; return it, and the result; None without any.

    Args:
        choose: returns the last checkpoint but those with some paths; adds texts about those that
            lack a file to a list.
        check: checks a checkpoint; returns the function that loads it.
        remedy: the call that loads an earlier checkpoint, for the error if the last one is damaged;
            None: load the earlier one instead.
        damaged: returns whether an error of ``check`` comes from a damaged file.
        warns: whether to warn of those that are left out.
    """
    tried: set[Path] = set()
    log: list[str] = []
    result = None
    while result is None and (found := choose(tried, log)) is not None:
        try:
            load = check(found)
        except Exception as error:
            if not damaged(error):
                raise
            if remedy is not None:
                raise CheckpointError(
                    f"{error}. {remedy} goes on from the last whole checkpoint before it"
                ) from error
            log.append(f"{error}. It is left where it is")
            tried.add(found.path)
        else:
            result = found, load()
    for text in log if warns else ():
        warnings.warn(text, RuntimeWarning, stacklevel=3)
    return result


class Loading:
    """A run, and the checkpoint to load into it.

    Args:
        found: the checkpoint.
        run: the parts of the run, its sampler and its generators.
        communicator: of all ranks.
        agree: makes a context for what each rank does; all raise CheckpointError if one raises.
        limit: the seconds for which a rank waits for the disk.
    """

    def __init__(
        self,
        found: Checkpoint,
        run: of_parts.Run,
        communicator: Communicator,
        agree: Callable[[], AbstractContextManager[Any]],
        limit: float,
    ) -> None:
        self._found, self._run = found, run
        self._comm, self._agree, self._limit = communicator, agree, limit
        parts = run.parts.items()
        self._models = {n: part for n, part in parts if of_parts.has_run_state(part)}
        self._others = {n: part for n, part in parts if n not in self._models}
        self._states: dict[str, Any] = {}
        self._generators: dict[str, Any] = {}
        self._loads: list[Callable[[], None]] = []
        self._batch_sizes: list[int] = []
        self._ranks = 0
        self._extra: Any = None

    def check(self) -> None:
        """Read and check all that `load` loads; raise CheckpointError on all ranks."""
        with self._agree():
            self._verify()
        with self._agree():
            self._read_entries()
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
        with self._agree():
            for name, part in self._others.items():
                part.load_state_dict(self._states[name])
        for load in self._loads:
            load()
        if self._run.sampler is not None:
            self._run.sampler.go_on(self._batch_sizes)
        for name, (generator, state) in self._matching().items():
            if state is not None:
                of.set_state(generator, state)
            elif name in self._run.generators:
                warnings.warn(
                    f"the generator {name!r} differed between the ranks, and the number of ranks "
                    "has changed: it keeps its present state. Seed it by rank and step",
                    RuntimeWarning,
                    stacklevel=4,
                )
        return self._extra

    # --- checks ---------------------------------------------------------------------------------

    def _verify(self) -> None:
        """Verify this rank's share of the files; together, the ranks verify all."""
        saved = self._read(lambda: self._found.run)
        for name, now in {"format": FORMAT, **self._run.settings()}.items():
            if saved.get(name) not in (FORMATS if name == "format" else (now,)):
                raise ValueError(
                    f"{name} is {now} now, and was {saved.get(name)} in {self._found.path}"
                )
        self._ranks = saved["ranks"]
        for rank in range(self._comm.rank, self._ranks, self._comm.size):
            self._read(partial(self._found.verify, rank))

    def _read_entries(self) -> None:
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
        if self._run.sampler is not None:
            sizes = self._read(lambda: found.run.get("batch_sizes", []))
            if not isinstance(sizes, list) or any(type(size) is not int for size in sizes):
                raise DamagedFile(f"{found.path / 'run.json'} is damaged: batch_sizes is {sizes!r}")
            copy.copy(self._run.sampler).go_on(sizes)
            self._batch_sizes = sizes
        self._extra = self._read(partial(read_tree, found.file_of(own or 0), "extra"))

    def _matching(self) -> dict[str, tuple[Any, Any]]:
        """Return the generators that exist here and were saved, with their saved states."""
        saved = self._generators
        here = {**of.global_generators(saved), **self._run.generators}
        return {name: (here[name], saved[name]) for name in here.keys() & saved.keys()}

    def _entry(self, part: str, rank: int, name: str) -> Any:
        return self._read(partial(of_parts.run_state_of, self._found, part, rank, name))

    def _read(self, call: Callable[[], T]) -> T:
        return on_disk(call, self._limit, f"{self._found.path} has not been read")
