"""A folder of checkpoints: finds those that are whole and the last one, removes old ones."""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tagi_ddp.checkpoint.array_file import UNSEALED, ArrayFile, DamagedFile, is_sealed, seal
from tagi_ddp.checkpoint.errors import CheckpointError
from tagi_ddp.checkpoint.tree import read_tree
from tagi_ddp.engine.whole_file import whole_file

LATEST = "latest"
SEEN = ".seen."  # prefix of a file by which ranks check that all of them see the folder
FORMAT = 4
FORMATS = (2, 3, 4)  # readable; before 4 without checksums, in 2 an OrderedDict is a dict
_RUN = "run.json"
_NAME = re.compile(r"(\d{6,})-step-(\d+)")
_SAVING = re.compile(rf"\.saving-{_NAME.pattern}-\w*")
_REMOVED = ".removed-"


@dataclass(frozen=True, order=True)
class Checkpoint:
    """A folder with one checkpoint.

    Attributes:
        number: its number, in the order in which checkpoints were begun.
        step: the number of steps made before it.
        path: the folder.
    """

    number: int
    step: int
    path: Path

    @property
    def ranks(self) -> int:
        """The number of ranks that have saved it."""
        ranks: int = self.run["ranks"]
        return ranks

    @property
    def run(self) -> dict[str, Any]:
        """The content of run.json; DamagedFile if that is damaged."""
        path = self.path / _RUN
        text = path.read_bytes()
        try:
            run: dict[str, Any] = json.loads(text)
            if type(run["ranks"]) is not int or run["ranks"] < 1:
                raise ValueError(f"ranks is {run['ranks']!r}")
            if is_sealed(text):
                if run["step"] != self.step:
                    raise ValueError(f"it is of step {run['step']}")
            elif run.get("format") == FORMAT or "save" in run:
                raise ValueError("it has no checksum")
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise DamagedFile(f"{path} is damaged: {type(error).__name__}: {error}") from error
        return run

    @property
    def whole(self) -> bool:
        """True if all ranks' files exist and are of one save; their arrays are not read."""
        try:
            if self.lacks() is not None:
                return False
            for rank in range(self.ranks):
                with self._open(rank):
                    pass
        except (DamagedFile, FileNotFoundError):
            return False
        return True

    def lacks(self) -> Path | None:
        """Return the first file that is missing, or None; DamagedFile if run.json is damaged."""
        try:
            ranks = self.ranks
        except FileNotFoundError:
            return self.path / _RUN
        files = map(self.file_of, range(ranks))
        return next((path for path in files if not path.is_file()), None)

    def verify(self, rank: int) -> None:
        """Read all of a rank's file; raise DamagedFile if it is damaged."""
        with self._open(rank) as file:
            file.verify()
            sealed = file.sealed
        if not sealed:
            read_tree(self.file_of(rank))

    def _open(self, rank: int) -> ArrayFile:
        run, path = self.run, self.file_of(rank)
        file = ArrayFile(path)
        if file.save != label(run, rank):
            file.__exit__()
            raise DamagedFile(f"{path} is of another save, or of another rank, than {_RUN} says")
        return file

    def file_of(self, rank: int) -> Path:
        """Return the file of a rank."""
        return self.path / f"rank-{rank}.safetensors"


def label(run: dict[str, Any], rank: int) -> str:
    """Return the label of a rank's file in the save of ``run``; "" if the save has no id."""
    return f"{run['save']}/{rank}" if "save" in run else ""


class Folder:
    """A folder of checkpoints ``<number>-step-<steps>`` and a link ``latest``; of one run.

    Ranks write a checkpoint into a hidden folder, which is renamed once it has all files.

    Attributes:
        path: the folder.
        set_aside: paths of damaged checkpoints, which `prune` neither removes nor counts.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.set_aside: set[Path] = set()

    def all(self) -> list[Checkpoint]:
        """Return all checkpoints that were whole once, the oldest first."""
        return sorted(self._matching(_NAME))

    def whole(self) -> list[Checkpoint]:
        """Return the checkpoints that are whole, by `Checkpoint.whole`, the oldest first."""
        return [checkpoint for checkpoint in self.all() if checkpoint.whole]

    def last(
        self,
        step: int | None,
        tried: Collection[Path],
        log: list[str],
        until: int | None = None,
    ) -> Checkpoint | None:
        """Return the last checkpoint that lacks no file; None if there is none.

        Args:
            step: the checkpoint's number of steps; None: any.
            tried: paths of damaged checkpoints, which are skipped.
            log: a list, to which a text is added for each checkpoint that lacks a file.
            until: the number of the last checkpoint that counts; None: all count.

        Raises CheckpointError if there is none of this step, or all are damaged.
        """
        found = [each for each in self.all() if until is None or each.number <= until]
        for checkpoint in reversed(found):
            if step not in (None, checkpoint.step) or checkpoint.path in tried:
                continue
            missing = None
            with suppress(DamagedFile):  # Its verification reports the damage.
                missing = checkpoint.lacks()
            if missing is None:
                return checkpoint
            text = f"{checkpoint.path} lacks {missing.name}: it is not used"
            if text not in log:
                log.append(text)
        if step is not None and not tried:
            steps = [each.step for each in found]
            raise CheckpointError(f"step is {step}, but there are those of {steps}")
        if tried:
            raise CheckpointError(
                f"no whole checkpoint is left in {self.path}: {'; '.join(log)}. All stay where "
                "they are: give another folder to begin anew"
            )
        return None

    def at(self, path: Path) -> Checkpoint:
        """Return the checkpoint at a path or a link; FileNotFoundError if it lacks a file."""
        real = Path(os.path.realpath(path))
        match = _NAME.fullmatch(real.name)
        found = Checkpoint(int(match[1]), int(match[2]), real) if match else None
        missing = None if found is None else found.lacks()
        if found is None or missing is not None:
            lacks = f": it lacks {missing.name}" if missing else ""
            raise FileNotFoundError(f"there is no checkpoint {path}{lacks}")
        return found

    def checkpoint(self, number: int, step: int) -> Checkpoint:
        """Return a checkpoint that is still to be written."""
        return Checkpoint(number, step, self.path / f"{number:06}-step-{step}")

    def next_number(self) -> int:
        """Return a number after those of all checkpoints."""
        found = [*self._matching(_NAME), *self._matching(_SAVING)]
        return max((each.number for each in found), default=0) + 1

    def saving(self, checkpoint: Checkpoint, run: dict[str, Any]) -> Checkpoint:
        """Return the hidden folder in which ranks write a checkpoint."""
        name = f".saving-{checkpoint.path.name}-{run.get('save', '')}"
        return Checkpoint(checkpoint.number, checkpoint.step, self.path / name)

    def write(
        self,
        checkpoint: Checkpoint,
        rank: int,
        write: Callable[[BinaryIO], None],
        run: dict[str, Any],
    ) -> None:
        """Write the file of a rank and, for rank 0, ``run``, which holds "step" and "ranks".

        If ``run`` has "save", the id of the save, the rank's file has its `label`.
        """
        saving = self.saving(checkpoint, run)
        saving.path.mkdir(parents=True, exist_ok=True)
        with whole_file(saving.file_of(rank)) as file:
            write(file)
        if rank == 0:
            with whole_file(saving.path / _RUN) as file:
                file.write(seal(json.dumps({**UNSEALED, **run}, indent=2).encode()))
        self._publish(saving)

    def publish(self) -> None:
        """Rename all hidden checkpoints that lack no file."""
        for saving in list(self._matching(_SAVING)):
            self._publish(saving)

    def _publish(self, saving: Checkpoint) -> bool:
        """Rename a hidden checkpoint if it lacks no file; return whether. All ranks may call it."""
        try:
            if saving.lacks() is not None:
                return False
        except DamagedFile:
            pass  # Rename it, for `resume` to report the damage.
        number = saving.number
        while True:
            target = self.checkpoint(number, saving.step)
            number += 1
            if any(other.number == target.number for other in self.all()):
                continue  # Another job has used the number.
            try:
                os.rename(saving.path, target.path)
            except FileNotFoundError:  # Another rank has renamed it.
                return True
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    continue
                raise
            _flush(self.path)
            self._point_to(target)
            return True

    def _point_to(self, checkpoint: Checkpoint) -> None:
        """Set the link ``latest``; every rank that finds the checkpoint whole may do so."""
        link = self.path / f".{LATEST}.{secrets.token_hex(8)}"
        link.symlink_to(checkpoint.path.name)
        os.replace(link, self.path / LATEST)

    def clear(self) -> None:
        """Remove the remains of an interrupted run, except checkpoints that are or were whole."""
        for saving in list(self._matching(_SAVING)):
            if not self._publish(saving):
                shutil.rmtree(saving.path, ignore_errors=True)
        for removed in self.path.glob(f"{_REMOVED}*"):
            shutil.rmtree(removed, ignore_errors=True)
        for pattern in (f".{LATEST}.*", f"{SEEN}*"):
            for left in self.path.glob(pattern):
                left.unlink(missing_ok=True)

    def prune(self, keep: int) -> None:
        """Remove all whole checkpoints but the last ``keep``; link ``latest`` to the last one."""
        found = [each for each in self.all() if each.path not in self.set_aside]
        if last := next((each for each in reversed(found) if each.whole), None):
            self._point_to(last)
        if len(found) > keep:
            for checkpoint in [each for each in found if each.whole][:-keep]:
                # Rename it first: no reader then finds it half removed.
                removed = self.path / f"{_REMOVED}{secrets.token_hex(8)}"
                with suppress(FileNotFoundError):
                    os.rename(checkpoint.path, removed)
                shutil.rmtree(removed, ignore_errors=True)

    def _matching(self, name: re.Pattern[str]) -> Iterator[Checkpoint]:
        for entry in self.path.iterdir() if self.path.is_dir() else ():
            if (match := name.fullmatch(entry.name)) and entry.is_dir():
                yield Checkpoint(int(match[1]), int(match[2]), entry)


def _flush(folder: Path) -> None:
    """Wait until names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
