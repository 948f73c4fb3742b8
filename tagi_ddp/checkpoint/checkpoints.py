"""Checkpoints of a whole run, saved in the background and resumed on any number of ranks."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tagi_ddp.checkpoint.disk import Call, on_disk
from tagi_ddp.checkpoint.entering import enter, join
from tagi_ddp.checkpoint.errors import CheckpointError, is_damage
from tagi_ddp.checkpoint.folder import FORMAT, Checkpoint, Folder, label
from tagi_ddp.checkpoint.generators import states
from tagi_ddp.checkpoint.loading import Loading, load_last
from tagi_ddp.checkpoint.owner import Owner
from tagi_ddp.checkpoint.parts import Run, communicator_of, is_elastic, states_of
from tagi_ddp.checkpoint.preemption import SIGNALS, Preempted, Preemption
from tagi_ddp.checkpoint.tree import Snapshot, check
from tagi_ddp.checks import integer
from tagi_ddp.communicators import Communicator, all_gather_object
from tagi_ddp.communicators.communicator import DEFAULT_TIMEOUT
from tagi_ddp.communicators.equality import Same, all_or_none
from tagi_ddp.communicators.guard import Closing, abort, or_abort
from tagi_ddp.communicators.init import adopted
from tagi_ddp.data import DistributedSampler
from tagi_ddp.trace import script_step

T = TypeVar("T")

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
        on_signal: after SIGTERM or SIGUSR1 on any rank, save after the step in progress and end all
            ranks with the exit status 75; see `after_step`. A function returns the ``extra`` of
            that checkpoint. It replaces no handler of the script, and works in the main thread,
            from the first step on.
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
        on_signal: bool | Callable[[], Any] = True,
    ) -> None:
        """Compare the ranks' arguments, own the folder, and clear it of incomplete checkpoints."""
        named = dict(parts) if isinstance(parts, Mapping) else {"model": parts}
        self._run = Run(named, sampler, dict(generators or {}))
        self._made, self._explicit = ExitStack(), None
        if communicator is not None:
            self._explicit = self._made.enter_context(adopted(communicator))
        self._keep = keep
        self._folder = Folder(folder)
        self._snapshot = Snapshot()
        self._writing: Call[None] | None = None
        self._closed = False
        self._saved: int | None = None  # the step of the last checkpoint
        self.extra: Any = None
        self._elastic = next((part for part in named.values() if is_elastic(part)), None)
        self._joined = self._elastic is not None and self._elastic.joined
        self._owner = Owner(self._folder.path)
        number = None if self._joined else self._surviving(self._begin)
        if number is None:  # The other ranks have begun before, and make no call here.
            self._check_arguments()
            number = self._own(join)
        self._number = number  # that of the next checkpoint
        self._extra = on_signal if callable(on_signal) else None
        self._warned = bool(on_signal)
        self._preemption: Preemption | None = None  # from the first `after_step` on
        # Ranks with samplers of their own may make different numbers of steps.
        shared = sampler is not None and sampler.num_replicas == self._communicator.size
        if sampler is not None and on_signal and (shared or self._elastic is not None):
            sampler.after_step = self.after_step

    def _check_arguments(self) -> None:
        self._run.check()
        integer("keep", self._keep, 1)

    def _begin(self) -> int:
        """Compare the ranks' arguments, own the folder; return the next checkpoint's number."""
        with self._agree() as same:
            self._check_arguments()
            for name, value in self._entries(0).items():
                same(name, value)
        return self._own(enter)

    def _own(self, call: Callable[[Folder, Owner, Communicator, float], int]) -> int:
        try:
            return call(self._folder, self._owner, self._communicator, self._limit)
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

    def after_step(self, step: int) -> None:
        """Save, and end this process, if a signal has announced the end of the job on any rank.

        Call it after each step, on all ranks, unless the steps are those of the ``sampler``, which
        call it. All ranks then raise `Preempted`, with the exit status 75. In an elastic job ranks
        that have a signal leave, and the others continue; if all have one, they save.
        """
        script_step.number = step
        if self._closed or not self._warned:
            return
        preemption = self._preemption = self._preemption or Preemption(SIGNALS)
        if not preemption.is_due(self._communicator):
            return
        gather = partial(all_gather_object, self._communicator)
        numbers = self._surviving(partial(preemption.ask, gather))
        if not numbers:
            return
        if self._elastic is not None and not all(numbers):
            if preemption.received is None:
                return
            raise Preempted
        if self._saved != step:
            self.save(step, None if self._extra is None else self._extra())
        if self._saved == step:  # In an elastic job it may be that the step is not made yet.
            self.wait()
            raise Preempted

    def _save(self, step: int, extra: Any) -> None:
        with self._agree(wait=True) as same:
            same("step", integer("step", step, 0))
        everyone = all_gather_object(self._communicator, [self._number, secrets.token_hex(8)])
        self._number, save = max(number for number, _ in everyone), everyone[0][1]
        self._collect(self._snapshot.take, extra)
        checkpoint = self._folder.checkpoint(self._number, step)
        self._number += 1
        rank = self._communicator.rank
        sampler = self._run.sampler
        sizes = [] if sampler is None else sampler.batch_sizes
        run = {**self._entries(step), "save": save, "batch_sizes": sizes}
        path = self._folder.saving(checkpoint, run).file_of(rank)
        write = partial(self._write, checkpoint, rank, run)
        self._writing = Call(write, self._limit, f"{path} has not been written")
        self._saved = script_step.number = step

    def check(self) -> None:
        """Check early that `save` can save all parts as they are now; nothing is written.

        Raise CheckpointError, on all ranks, that names what cannot be saved.
        """
        self._surviving(partial(self._collect, check, None))

    def _collect(self, use: Callable[[Any], None], extra: Any) -> None:
        """Call a function with all that this rank saves."""
        with or_abort([self._communicator]):
            parts = states_of(self._run.parts)
        with self._agree():
            use({"parts": parts, "generators": states(self._run.generators), "extra": extra})

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
        with self._agree(wait=True):
            pass
        with self._agree():
            if self._communicator.rank == 0:
                failure = f"{self._folder.path} has not been cleared of earlier checkpoints"
                on_disk(self._publish_and_prune, self._limit, failure)

    def close(self) -> None:
        """Wait for this rank's file and release the folder; may be called again.

        Raise CheckpointError if the file could not be written.
        """
        self._closed = True
        sampler = self._run.sampler
        if sampler is not None and sampler.after_step == self.after_step:
            sampler.after_step = None
        try:
            self._finish()
        except Exception as error:
            raise self._error_of(error) from error
        finally:
            self._made.close()
            if self._writing is None:
                self._owner.release()
            if self._preemption is not None:
                self._preemption.close()

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
        def damaged(error: Exception) -> bool:
            comm = self._communicator
            return isinstance(error, CheckpointError) and any(
                all_gather_object(comm, is_damage(error))
            )

        found = load_last(
            partial(self._choose, step, fallback),
            self._checked,
            None if fallback else "resume(fallback=True)",
            damaged,
            warns=self._communicator.rank == 0,
        )
        script_step.number = 0 if found is None else found[0].step
        return script_step.number

    def go_on(self, found: Checkpoint | None) -> None:
        """Load a checkpoint as `resume` does, from any folder; all ranks must have found it."""
        with self._agree(wait=True) as same:
            same("checkpoint", "none" if found is None else found.path.name)
        if found is not None:
            self._checked(found)()

    def _checked(self, found: Checkpoint) -> Callable[[], None]:
        """Check a checkpoint; return a function that loads it."""
        loading = Loading(found, self._run, self._communicator, self._agree, self._limit)
        loading.check()

        def load() -> None:
            with or_abort([self._communicator]):
                self.extra = loading.load()

        return load

    def _choose(
        self, step: int | None, fallback: bool, tried: set[Path], log: list[str]
    ) -> Checkpoint | None:
        """Return, on all ranks, the checkpoint that rank 0 finds."""

        def last() -> Checkpoint | None:
            self._folder.publish()
            return self._folder.last(step, tried, log)

        self._folder.set_aside |= tried
        chosen: Checkpoint | None = None
        with self._agree(wait=True):
            pass  # All ranks' files exist when rank 0 looks.
        with self._agree() as same:
            same("step", step)
            same("fallback", fallback)
            if self._communicator.rank == 0:
                chosen = on_disk(last, self._limit, f"{self._folder.path} has not been read")
        numbers = None if chosen is None else (chosen.number, chosen.step)
        found = all_gather_object(self._communicator, numbers)[0]
        return None if found is None else self._folder.checkpoint(*found)

    def _entries(self, step: int) -> dict[str, Any]:
        """Return the entries of run.json that describe the run."""
        ranks = self._communicator.size
        return {"format": FORMAT, "step": step, "ranks": ranks, **self._run.settings()}

    # --- together -----------------------------------------------------------------------------

    @property
    def _communicator(self) -> Communicator:
        return self._explicit or communicator_of(self._run.parts)

    def _surviving(self, call: Callable[[], T], changes: bool = False) -> T | None:
        """Make a collective call, in an elastic job by `DDPSequential.survive`."""
        return call() if self._elastic is None else self._elastic.survive(call, changes)

    @contextmanager
    def _agree(self, wait: bool = False) -> Iterator[Same]:
        """Run a block on all ranks, as `all_or_none` does; ``wait`` for this rank's file before."""
        remedy = "Do the same on all ranks."
        with all_or_none(self._communicator, "checkpoints", remedy, CheckpointError) as same:
            try:
                if self._closed:
                    raise RuntimeError("these checkpoints are closed; make new ones to go on")
                if wait:
                    self._finish()
                yield same
            except Exception as error:
                raise self._error_of(error) from error

    def _error_of(self, error: Exception) -> CheckpointError:
        return CheckpointError(f"{error}. The folder is {str(self._folder.path)!r}")

    @property
    def _limit(self) -> float:
        """The seconds for which a rank waits for the disk; the others wait longer for that rank.

        In an elastic job they do not: they go on without a late rank, and admit it again.
        """
        timeout = self._communicator.timeout
        return _SHARE * (timeout if self._elastic is None else max(timeout, DEFAULT_TIMEOUT))

    def _give_up(self, error: BaseException) -> None:
        abort([self._communicator], error)
