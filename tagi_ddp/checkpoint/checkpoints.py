"""Save all that a run is, in the background, and go on from there on any number of ranks."""

from __future__ import annotations

import os
import secrets
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from tagi_ddp.checkpoint.folder import SEEN, Checkpoint, Folder
from tagi_ddp.checkpoint.generators import global_generators, set_state, state_of
from tagi_ddp.checkpoint.parts import (
    check_part,
    communicator_of,
    entry_of,
    generators_of,
    has_run_state,
    is_elastic,
    run_state_of,
)
from tagi_ddp.checkpoint.tree import Snapshot, read_tree
from tagi_ddp.checks import integer
from tagi_ddp.communicators import Communicator, all_gather_object
from tagi_ddp.communicators.equality import Entry, RanksDiffer, require_equal
from tagi_ddp.communicators.guard import Closing, abort
from tagi_ddp.communicators.init import as_communicator, is_made_for
from tagi_ddp.data import DistributedSampler

T = TypeVar("T")
_FORMAT = 3
_FORMATS = (2, 3)  # that are read; in 2 an OrderedDict is a dict
_SEEN = 10.0  # seconds after which a file that rank 0 has written must be there for all


class CheckpointError(RanksDiffer):
    """A rank could not save or load its part; all ranks raise it."""


class Checkpoints(Closing):
    """A folder of checkpoints of one run, on a file system that all ranks see.

    ``with Checkpoints("run/checkpoints", model, sampler=sampler) as checkpoints:``
    ``for step, share in sampler.steps(256, 10, checkpoints.resume()):`` train on the share, then
    ``checkpoints.save(step + 1)``, every so many steps.

    `save` copies the state in memory, and a thread writes the copy, each rank's to a file of its
    own: safetensors, with all that are no arrays as JSON in its header, readable without this
    package. Making it, and all methods, are collective calls.

    Args:
        folder: where ``<number>-step-<step>`` folders go, and ``latest``, a link to the last one.
        parts: a DDPSequential; or a dict of such, and of what has ``state_dict`` and
            ``load_state_dict``, as torch's modules and optimizers, `SyncSchedule` and `DASO`.
        communicator: of all ranks, or a ProcessGroup; None: that of the first part that has one.
        keep: how many whole checkpoints stay; the others go when a newer one is whole.
        sampler: its length, seed, shuffling and sizes of global batches are saved and must be the
            same when resuming: with another size of the first batch it raises ValueError.
        generators: of random numbers, by name, that the script draws from: numpy's, Python's,
            torch's. The global ones of all three are always saved.

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it takes.
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
        """Agree on the folder, and clear it of what was left half."""
        self._parts = dict(parts) if isinstance(parts, Mapping) else {"model": parts}
        self._given = None if communicator is None else as_communicator(communicator)
        self._made = self._given is not None and is_made_for(self._given, communicator)
        self._keep = keep
        self._sampler = sampler
        self._generators = dict(generators or {})
        self._folder = Folder(folder)
        self._snapshot = Snapshot()
        self._writing: Future[None] | None = None
        self._closed = False
        self.extra: Any = None
        self._elastic = next((part for part in self._parts.values() if is_elastic(part)), None)
        self._joined = self._elastic is not None and self._elastic.joined
        self._number = 0  # of the next checkpoint
        if self._joined:  # the others have done so before
            self._arguments()
        else:
            self._number = self._surviving(self._start) or 0
        self._thread = ThreadPoolExecutor(1, "checkpoint")

    def _arguments(self) -> list[Entry]:
        for name, part in self._parts.items():
            check_part(name, part)
        integer("keep", self._keep, 1)
        for generator in self._generators.values():
            state_of(generator)
        return [(name, str(value)) for name, value in self._run(0).items()]

    def _start(self) -> int:
        self._agree(self._arguments)
        return self._begin()

    def _begin(self) -> int:
        """Clear the folder, which all ranks must see; return the number of the next checkpoint."""
        comm, folder = self._communicator, self._folder
        token = folder.path / f"{SEEN}{secrets.token_hex(8)}"
        number = 0
        problem = ""
        if comm.rank == 0:
            try:
                folder.path.mkdir(parents=True, exist_ok=True)
                number = max((each.number for each in folder.all()), default=0) + 1
                folder.clear()
                token.touch()
            except (OSError, ValueError) as error:
                problem = f"{type(error).__name__}: {error}"
        try:
            name, number, problem = all_gather_object(comm, (token.name, number, problem))[0]
            deadline = time.monotonic() + _SEEN
            while not (seen := (folder.path / name).exists()) and not problem:
                if comm.size == 1 or time.monotonic() > deadline:
                    break
                time.sleep(0.05)
            unseen = [rank for rank, there in enumerate(all_gather_object(comm, seen)) if not there]
        finally:
            token.unlink(missing_ok=True)
        if problem:
            raise CheckpointError(f"folder {str(folder.path)!r} cannot be used: {problem}")
        if unseen:
            raise CheckpointError(
                f"folder must be where all ranks see it, but {str(folder.path)!r} of rank 0 is not "
                f"seen by ranks {unseen}: give one on a shared file system"
            )
        return int(number)

    # --- saving -------------------------------------------------------------------------------

    def save(self, step: int, extra: Any = None) -> None:
        """Save the run after ``step`` steps; returns when the state has been copied.

        Waits for the checkpoint before, if that is still being written. In an elastic job only the
        steps that were made are saved: this does nothing if a rank was lost and the last step comes
        again, or if ranks stand at different steps since.

        Args:
            step: how many steps have been made, the same on all ranks. Another number is a
                ValueError in an elastic job, which counts them itself.
            extra: what else this rank is to find again in `extra`: numbers, text, arrays and
                tensors, in dicts, lists and tuples.

        Raises:
            CheckpointError: on all ranks, where one could not write the checkpoint before, or has
                something that cannot be saved.
            RuntimeError: on all ranks, between `backward` and `step`: `DDPSequential.run_state`.
        """
        if self._elastic is None or self._elastic.saves(step):
            self._surviving(partial(self._save, step, extra))

    def _save(self, step: int, extra: Any) -> None:
        self._agree(lambda: [("step", str(integer("step", step, 0)))], wait=True)
        self._number = max(all_gather_object(self._communicator, self._number))
        try:
            parts = self._states()
        except BaseException as error:
            self._give_up(error)
            raise

        def copy() -> list[Entry]:
            own = {**global_generators(), **self._generators}
            generators = {name: state_of(each) for name, each in own.items()}
            self._snapshot.take({"parts": parts, "generators": generators, "extra": extra})
            return []

        self._agree(copy)
        checkpoint = self._folder.checkpoint(self._number, step)
        self._number += 1
        rank = self._communicator.rank
        sizes = [] if self._sampler is None else self._sampler.batch_sizes
        run = {**self._run(step), "batch_sizes": sizes}
        self._writing = self._thread.submit(self._write, checkpoint, rank, run)

    def _write(self, checkpoint: Checkpoint, rank: int, run: dict[str, Any]) -> None:
        self._folder.write(checkpoint, rank, self._snapshot.write, run)
        if rank == 0:
            self._folder.prune(self._keep)

    def wait(self) -> None:
        """Return when the last checkpoint is whole, and older ones are gone."""
        self._surviving(self._wait)

    def _wait(self) -> None:
        self._agree(list, wait=True)
        self._agree(self._prune)

    def _prune(self) -> list[Entry]:
        if self._communicator.rank == 0:
            self._folder.prune(self._keep)
        return []

    def close(self) -> None:
        """Finish what is being written; may be called again. Raises OSError if that failed."""
        self._closed = True
        self._thread.shutdown()
        writing, self._writing = self._writing, None
        if self._given is not None and self._made:
            self._given.close()
        if writing is not None:
            writing.result()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Wait for all ranks' files if the block has ended well, and close."""
        try:
            if error is None:
                self.wait()
        finally:
            super().__exit__(kind, error, trace)

    # --- resuming -----------------------------------------------------------------------------

    def resume(self, step: int | None = None) -> int:
        """Go on from the last whole checkpoint; return how many steps had been made, 0 if none.

        On as many ranks as have saved it each has its own state again, to the bit. For another
        number see `DDPSequential.load_run_state`; what other parts, generators and `extra` hold is
        then given to all if it was the same on all. If not, parts are refused, generators stay as
        they are, with a warning, and `extra` is rank 0's. A rank that joins an elastic job has its
        state from the others, and is told their step.

        Args:
            step: go on from that checkpoint, rather than from the last one.

        Raises:
            CheckpointError: on all ranks, and before anything is changed: there is no checkpoint of
                this step, the network or the sampler is another one, or a file is damaged.
        """
        made = None
        if not self._joined:
            made = self._surviving(partial(self._resume, step), changes=True)
        if made is None:
            assert self._elastic is not None
            made = self._elastic.steps_made
        return int(made)

    def _resume(self, step: int | None) -> int:
        found = self._choose(step)
        if found is None:
            return 0
        self._load(found)
        return found.step

    def go_on(self, found: Checkpoint | None) -> None:
        """Do what `resume` does, from a checkpoint of any folder that all ranks have found."""

        def check() -> list[Entry]:
            if found is not None:
                self._check_run(found)
            return [("checkpoint", "none" if found is None else found.path.name)]

        self._agree(check, wait=True)
        if found is not None:
            self._load(found)

    def _load(self, found: Checkpoint) -> None:
        ranks = found.ranks
        own = self._communicator.rank if ranks == self._communicator.size else None
        others = {n: part for n, part in self._parts.items() if not has_run_state(part)}
        states: dict[str, Any] = {}
        generators: dict[str, Any] = {}

        def read() -> list[Entry]:
            for name in others:
                states[name] = entry_of(found, own, "parts", name)
                if states[name] is None:
                    raise ValueError(
                        f"{name} was another one on each of the {ranks} ranks that saved it: "
                        "resume on as many"
                    )
            generators.update(generators_of(found, own))
            if self._sampler is not None:
                self._sampler.go_on(found.run.get("batch_sizes", ()))
            self.extra = read_tree(found.file_of(own or 0), "extra")
            return []

        self._agree(read)
        try:
            loads = [
                part.check_run_state(partial(run_state_of, found, name), ranks)
                for name, part in self._parts.items()
                if has_run_state(part)
            ]
        except RanksDiffer as error:
            raise CheckpointError(f"{error}. The folder is {str(self._folder.path)!r}") from error
        try:
            for name, part in others.items():
                part.load_state_dict(states[name])
            for load in loads:
                load()
            here = {**global_generators(generators), **self._generators}
            for name in here.keys() & generators.keys():
                self._set_generator(name, here[name], generators[name])
        except BaseException as error:
            self._give_up(error)
            raise

    def _choose(self, step: int | None) -> Checkpoint | None:
        """Return the checkpoint that rank 0 finds."""
        found: list[Checkpoint] = []

        def look() -> list[Entry]:
            if self._communicator.rank == 0:
                whole = self._folder.whole()
                steps = [each.step for each in whole]
                if step is not None:
                    whole = [each for each in whole if each.step == step]
                    if not whole:
                        raise ValueError(f"step is {step}, but there are those of {steps}")
                found.extend(whole[-1:])
                for checkpoint in found:
                    self._check_run(checkpoint)
            return [("step", str(step))]

        self._agree(look, wait=True)
        told = [(each.number, each.step) for each in found]
        for number, steps in all_gather_object(self._communicator, told)[0]:
            return self._folder.checkpoint(number, steps)
        return None

    def _check_run(self, checkpoint: Checkpoint) -> None:
        saved, now = checkpoint.run, self._run(checkpoint.step)
        for name in ("format", "parts", "sampler", "generators"):
            known = _FORMATS if name == "format" else (now[name],)
            if saved.get(name) not in known:
                raise ValueError(
                    f"{name} is {now[name]} now, and was {saved.get(name)} in {checkpoint.path}"
                )

    # --- what is saved beside the parts -------------------------------------------------------

    def _states(self) -> dict[str, Any]:
        return {
            name: part.run_state() if has_run_state(part) else part.state_dict()
            for name, part in self._parts.items()
        }

    def _set_generator(self, name: str, generator: Any, state: Any) -> None:
        if state is not None:
            set_state(generator, state)
        elif name in self._generators:
            warnings.warn(
                f"the generator {name!r} was another one on each of the ranks, and there are other "
                "ranks now: it stays as it is. Seed it by rank and step",
                RuntimeWarning,
                stacklevel=3,
            )

    def _run(self, step: int) -> dict[str, Any]:
        """Return what people, and `resume`, want to know of a checkpoint first."""
        return {
            "format": _FORMAT,
            "step": step,
            "ranks": self._communicator.size,
            "parts": sorted(self._parts),
            "sampler": None if self._sampler is None else self._sampler.settings,
            "generators": sorted(self._generators),
        }

    # --- together -----------------------------------------------------------------------------

    @property
    def _communicator(self) -> Communicator:
        return self._given or communicator_of(self._parts)

    def _surviving(self, call: Callable[[], T], changes: bool = False) -> T | None:
        """Make a collective call, which an elastic job survives: `DDPSequential.survive`."""
        return call() if self._elastic is None else self._elastic.survive(call, changes)

    def _agree(self, describe: Callable[[], list[Entry]], wait: bool = False) -> None:
        """Let all ranks raise what one of them does, or that they differ."""

        def checked() -> list[Entry]:
            try:
                if self._closed:
                    raise RuntimeError("these checkpoints are closed; make new ones to go on")
                if wait and self._writing is not None:
                    writing, self._writing = self._writing, None
                    writing.result()
                return describe()
            except Exception as error:
                raise CheckpointError(
                    f"{error}. The folder is {str(self._folder.path)!r}"
                ) from error

        remedy = "Do the same on all ranks."
        require_equal(self._communicator, checked, "checkpoints", remedy, CheckpointError)

    def _give_up(self, error: BaseException) -> None:
        abort([self._communicator], error)
