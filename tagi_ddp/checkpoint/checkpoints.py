"""Checkpoints of a whole run, saved in the background and resumed on any number of ranks."""

from __future__ import annotations

import os
import secrets
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tagi_ddp.checkpoint.disk import Call
from tagi_ddp.checkpoint.entering import enter, join
from tagi_ddp.checkpoint.errors import CheckpointError, is_damage
from tagi_ddp.checkpoint.folder import FORMAT, FORMATS, Checkpoint, Folder, label
from tagi_ddp.checkpoint.generators import state_of, states
from tagi_ddp.checkpoint.loading import Loading
from tagi_ddp.checkpoint.owner import Owner
from tagi_ddp.checkpoint.parts import check_part, communicator_of, is_elastic, states_of
from tagi_ddp.checkpoint.tree import Snapshot, check
from tagi_ddp.checks import integer
from tagi_ddp.communicators import Communicator, all_gather_object
from tagi_ddp.communicators.communicator import DEFAULT_TIMEOUT
from tagi_ddp.communicators.equality import Entry, require_equal
from tagi_ddp.communicators.guard import Closing, abort
from tagi_ddp.communicators.init import as_communicator, is_made_for
from tagi_ddp.data import DistributedSampler

T = TypeVar("T")

REMEDY = "resume(fallback=True) goes on from the last whole checkpoint before it"
_SHARE = 0.7  # the part of the communicator's timeout for which a rank waits for the disk


class Checkpoints(Closing):
    """A folder of checkpoints of one run, on a file system that all ranks see.

    ``with Checkpoints("run/checkpoints", model, sampler=sampler) as checkpoints:``
    ``for step, share in sampler.steps(256, 10, checkpoints.resume()):`` train on the share, then
    ``checkpoints.save(step + 1)``, every so many steps.

    `save` copies the state in memory. A thread writes the copy, each rank's to a file of its own: a
    safetensors file, with all but arrays as JSON in its header, readable without this package. The
    constructor and all methods are collective calls.

    Args:
        folder: of the ``<number>-step-<step>`` folders, and of ``latest``, a link to the last one.
        parts: a DDPSequential; or a dict of those and of objects with ``state_dict`` and
            ``load_state_dict``: torch's modules and optimizers, `SyncSchedule`, `DASO` and others.
        communicator: of all ranks, or a ProcessGroup; None: that of the first part that has one.
        keep: the number of whole checkpoints to keep; older ones are removed.
        sampler: its length, seed, shuffling and sizes of global batches are saved and must be the
            same when resuming: with another size of the first batch it raises ValueError.
        generators: the script's random number generators, by name: numpy's, Python's, torch's. The
            global generators of all three are always saved.

    Raises:
        CheckpointError: on all ranks: an argument is wrong, a torch module or optimizer holds
            something that cannot be saved, ranks differ, or another job saves into the folder.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        parts: Any,
        *,
        communicator: Communicator | Any | None = None,
        keep: int = 3,
        sampler: DistributedSampler | None = None,
        generators: Mapping[str, Any] | None = None,
    ) -> None:
        """Compare the ranks' arguments, own the folder, and clear it of incomplete checkpoints."""
        self._parts = dict(parts) if isinstance(parts, Mapping) else {"model": parts}
        self._explicit = None if communicator is None else as_communicator(communicator)
        self._made = self._explicit is not None and is_made_for(self._explicit, communicator)
        self._keep = keep
        self._sampler = sampler
        self._generators = dict(generators or {})
        self._folder = Folder(folder)
        self._snapshot = Snapshot()
        self._writing: Call[None] | None = None
        self._closed = False
        self.extra: Any = None
        self._elastic = next((part for part in self._parts.values() if is_elastic(part)), None)
        self._joined = self._elastic is not None and self._elastic.joined
        self._number = 0  # the number of the next checkpoint
        self._owner = Owner(self._folder.path)
        try:
            number = None if self._joined else self._surviving(self._start)
            if number is None:  # The other ranks have begun before.
                self._arguments()
                join(self._folder, self._owner, self._communicator, self._on_disk)
            self._number = number or 0
        except BaseException:
            self._owner.release()
            raise

    def _arguments(self) -> list[Entry]:
        for name, part in self._parts.items():
            check_part(name, part)
        integer("keep", self._keep, 1)
        for generator in self._generators.values():
            state_of(generator)
        return [(name, str(value)) for name, value in self._run(0).items()]

    def _start(self) -> int:
        """Own and clear the folder; return the number of the next checkpoint."""
        self._agree(self._arguments)
        try:
            return enter(self._folder, self._owner, self._communicator, self._on_disk)
        except BaseException:
            self._owner.release()
            raise

    # --- saving -------------------------------------------------------------------------------

    def save(self, step: int, extra: Any = None) -> None:
        """Save the run after ``step`` steps; return once the state has been copied.

        Wait for the previous checkpoint if it is still being written. An elastic job saves only
        steps that were made: this does nothing if the last step is repeated because a rank was
        lost, or if the ranks are at different steps since.

        Args:
            step: the number of steps made, the same on all ranks. An elastic job counts them itself
                and raises ValueError for another number.
            extra: further values of this rank, which `resume` puts into `extra`: numbers, text,
                arrays and tensors, in dicts, lists and tuples.

        Raises:
            CheckpointError: on all ranks: one could not write the previous checkpoint, or has
                something that cannot be saved.
            RuntimeError: on all ranks, between `backward` and `step`: `DDPSequential.run_state`.
        """
        if self._elastic is None or self._elastic.saves(step):
            self._surviving(partial(self._save, step, extra))

    def _save(self, step: int, extra: Any) -> None:
        self._agree(lambda: [("step", str(integer("step", step, 0)))], wait=True)
        everyone = all_gather_object(self._communicator, [self._number, secrets.token_hex(8)])
        self._number, save = max(number for number, _ in everyone), everyone[0][1]
        self._collect(self._snapshot.take, extra)
        checkpoint = self._folder.checkpoint(self._number, step)
        self._number += 1
        rank = self._communicator.rank
        sizes = [] if self._sampler is None else self._sampler.batch_sizes
        run = {**self._run(step), "save": save, "batch_sizes": sizes}
        path = self._folder.saving(checkpoint, run).file_of(rank)
        write = partial(self._write, checkpoint, rank, run)
        self._writing = Call(write, self._limit, f"{path} has not been written")

    def check(self) -> None:
        """Check early that `save` can save all parts as they are now; nothing is written.

        Raise CheckpointError, on all ranks, that names what cannot be saved.
        """
        self._surviving(partial(self._collect, check, None))

    def _collect(self, use: Callable[[Any], None], extra: Any) -> None:
        """Call a function with all that this rank saves."""
        try:
            parts = states_of(self._parts)
        except BaseException as error:
            self._give_up(error)
            raise

        def call() -> list[Entry]:
            use({"parts": parts, "generators": states(self._generators), "extra": extra})
            return []

        self._agree(call)

    def _write(self, checkpoint: Checkpoint, rank: int, run: dict[str, Any]) -> None:
        write = partial(self._snapshot.write, save=label(run, rank))
        self._folder.write(checkpoint, rank, write, run)
        if rank == 0:
            self._publish_and_prune()

    def _publish_and_prune(self) -> None:
        self._folder.publish()
        self._folder.prune(self._keep)

    def wait(self) -> None:
        """Wait until the last checkpoint is whole and older ones are removed."""
        self._surviving(self._wait)

    def _wait(self) -> None:
        self._agree(list, wait=True)
        self._agree(self._prune)

    def _prune(self) -> list[Entry]:
        if self._communicator.rank == 0:
            failure = f"{self._folder.path} has not been cleared of earlier checkpoints"
            self._on_disk(self._publish_and_prune, failure)
        return []

    def close(self) -> None:
        """Wait for this rank's file and release the folder; may be called again.

        Raise CheckpointError if the file could not be written.
        """
        self._closed = True
        try:
            self._finish()
        except Exception as error:
            raise self._error_of(error) from error
        finally:
            if self._explicit is not None and self._made:
                self._explicit.close()
            if self._writing is None:
                self._owner.release()

    def _finish(self) -> None:
        """Wait for the file that is being written."""
        if self._writing is not None:
            try:
                self._writing.result()
            finally:
                if self._writing.done:
                    self._writing = None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Wait for all ranks' files if the block raised no error, and close."""
        try:
            if error is None:
                self.wait()
        finally:
            super().__exit__(kind, error, trace)

    # --- resuming -----------------------------------------------------------------------------

    def resume(self, step: int | None = None, *, fallback: bool = False) -> int:
        """Load the last whole checkpoint; return its number of steps, 0 if there is none.

        On the number of ranks that saved it, each rank gets its own state again, bit for bit. For
        another number see `DDPSequential.load_run_state`; other parts, generators and `extra` are
        then loaded on all ranks if they were equal on all. If not, parts are refused, generators
        keep their state, with a warning, and `extra` is rank 0's. A rank that joins an elastic job
        takes the state and the step of the others.

        The ranks verify the checksums of all files before anything is loaded. A checkpoint that
        lacks a file is left out, with a RuntimeWarning that names it.

        Args:
            step: load the checkpoint of this step instead of the last one.
            fallback: load the one before, with a RuntimeWarning, if the last one is damaged.

        Raises:
            CheckpointError: on all ranks, and before anything is changed: there is no checkpoint of
                this step, the network or the sampler is another one, or a file is damaged.
        """
        call = partial(self._resume, step, fallback)
        made = None if self._joined else self._surviving(call, changes=True)
        if made is None and self._elastic is not None:  # The other ranks have resumed before.
            made = int(self._elastic.steps_made)
        return made or 0

    def _resume(self, step: int | None, fallback: bool) -> int:
        tried: set[Path] = set()
        log: list[str] = []
        found = self._choose(step, fallback, tried, log)
        while found is not None:
            loading = self._loading(found)
            try:
                loading.check()
            except CheckpointError as error:
                if not any(all_gather_object(self._communicator, is_damage(error))):
                    raise
                if not fallback:
                    raise CheckpointError(f"{error}. {REMEDY}") from error
                log.append(f"{error}. It is left where it is")
                tried.add(found.path)
                self._folder.set_aside.add(found.path)
            else:
                self._load(loading)
                break
            found = self._choose(step, fallback, tried, log)
        if self._communicator.rank == 0:
            for text in log:
                warnings.warn(text, RuntimeWarning, stacklevel=2)
        return 0 if found is None else found.step

    def go_on(self, found: Checkpoint | None) -> None:
        """Load a checkpoint as `resume` does, from any folder; all ranks must have found it."""

        def check() -> list[Entry]:
            return [("checkpoint", "none" if found is None else found.path.name)]

        self._agree(check, wait=True)
        if found is not None:
            loading = self._loading(found)
            loading.check()
            self._load(loading)

    def _loading(self, found: Checkpoint) -> Loading:
        return Loading(
            found,
            partial(self._check_run, found),
            self._parts,
            self._sampler,
            self._generators,
            self._communicator,
            self._agree,
            self._on_disk,
        )

    def _load(self, loading: Loading) -> None:
        try:
            self.extra = loading.load()
        except BaseException as error:
            self._give_up(error)
            raise

    def _choose(
        self, step: int | None, fallback: bool, tried: set[Path], log: list[str]
    ) -> Checkpoint | None:
        """Return, on all ranks, the checkpoint that rank 0 finds."""
        found: list[tuple[int, int]] = []

        def last() -> Checkpoint | None:
            self._folder.publish()
            return self._folder.last(step, tried, log)

        def look() -> list[Entry]:
            if self._communicator.rank == 0:
                chosen = self._on_disk(last, f"{self._folder.path} has not been read")
                found.extend([] if chosen is None else [(chosen.number, chosen.step)])
            return [("step", str(step)), ("fallback", str(fallback))]

        self._agree(list, wait=True)  # All ranks' files exist when rank 0 looks.
        self._agree(look)
        for number, steps in all_gather_object(self._communicator, found)[0]:
            return self._folder.checkpoint(number, steps)
        return None

    def _check_run(self, checkpoint: Checkpoint) -> None:
        saved, now = checkpoint.run, self._run(checkpoint.step)
        for name in ("format", "parts", "sampler", "generators"):
            known = FORMATS if name == "format" else (now[name],)
            if saved.get(name) not in known:
                raise ValueError(
                    f"{name} is {now[name]} now, and was {saved.get(name)} in {checkpoint.path}"
                )

    def _run(self, step: int) -> dict[str, Any]:
        """Return the entries of run.json that describe the run, which `resume` compares."""
        return {
            "format": FORMAT,
            "step": step,
            "ranks": self._communicator.size,
            "parts": sorted(self._parts),
            "sampler": None if self._sampler is None else self._sampler.settings,
            "generators": sorted(self._generators),
        }

    # --- together -----------------------------------------------------------------------------

    @property
    def _communicator(self) -> Communicator:
        return self._explicit or communicator_of(self._parts)

    def _surviving(self, call: Callable[[], T], changes: bool = False) -> T | None:
        """Make a collective call, in an elastic job by `DDPSequential.survive`."""
        return call() if self._elastic is None else self._elastic.survive(call, changes)

    def _agree(self, describe: Callable[[], list[Entry]], wait: bool = False) -> None:
        """Call a function on all ranks; all raise if one of them raises or the results differ."""

        def checked() -> list[Entry]:
            try:
                if self._closed:
                    raise RuntimeError("these checkpoints are closed; make new ones to go on")
                if wait:
                    self._finish()
                return describe()
            except Exception as error:
                raise self._error_of(error) from error

        remedy = "Do the same on all ranks."
        require_equal(self._communicator, checked, "checkpoints", remedy, CheckpointError)

    def _error_of(self, error: Exception) -> CheckpointError:
        return CheckpointError(f"{error}. The folder is {str(self._folder.path)!r}")

    @property
    def _limit(self) -> float:
        """The seconds for which a rank waits for the disk; the others wait longer for that rank.

        In an elastic job they do not: they go on without a late rank, and admit it again.
        """
        timeout = self._communicator.timeout
        return _SHARE * (timeout if self._elastic is None else max(timeout, DEFAULT_TIMEOUT))

    def _on_disk(self, call: Callable[[], T], failure: str) -> T:
        return Call(call, self._limit, failure).result()

    def _give_up(self, error: BaseException) -> None:
        abort([self._communicator], error)
