"""Checkpoints on disk: which are whole, which is the last one, which may go."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tagi_ddp.engine.whole_file import whole_file

LATEST = "latest"
SEEN = ".seen."  # begins the name of a file by which ranks find out whether all see the folder
_RUN = "run.json"
_NAME = re.compile(r"(\d{6,})-step-(\d+)")


@dataclass(frozen=True, order=True)
class Checkpoint:
    """A folder with one checkpoint.

    Attributes:
        number: its number, in the order in which checkpoints were begun.
        step: the number of steps that had been made.
        path: the folder.
    """

    number: int
    step: int
    path: Path

    @property
    def ranks(self) -> int:
        """How many ranks have saved it; 0 where rank 0 has not told yet."""
        try:
            return int(self.run["ranks"])
        except FileNotFoundError:
            return 0

    @property
    def run(self) -> dict[str, Any]:
        """What rank 0 has told of the run; ValueError where that is not to be read."""
        path = self.path / _RUN
        text = path.read_bytes()
        try:
            told: dict[str, Any] = json.loads(text)
            int(told["ranks"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is damaged ({type(error).__name__}: {error}); move its folder away to go "
                "on from the checkpoint before"
            ) from error
        return told

    @property
    def whole(self) -> bool:
        """Whether all ranks have written their files, each of which is whole or not there."""
        ranks = self.ranks
        return ranks > 0 and all(self.file_of(rank).is_file() for rank in range(ranks))

    def file_of(self, rank: int) -> Path:
        """Return the file of a rank."""
        return self.path / f"rank-{rank}.safetensors"


class Folder:
    """A folder of checkpoints ``<number>-step-<steps>`` and a link ``latest``; of one run."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def all(self) -> list[Checkpoint]:
        """Return all, whole or not, the oldest first."""
        found = []
        for entry in self.path.iterdir() if self.path.is_dir() else ():
            if (match := _NAME.fullmatch(entry.name)) and entry.is_dir():
                found.append(Checkpoint(int(match[1]), int(match[2]), entry))
        return sorted(found)

    def whole(self) -> list[Checkpoint]:
        """Return those that are whole, the oldest first."""
        return [checkpoint for checkpoint in self.all() if checkpoint.whole]

    def at(self, path: Path) -> Checkpoint:
        """Return the one of a path, or of a link to one; FileNotFoundError if it is not whole."""
        real = Path(os.path.realpath(path))
        match = _NAME.fullmatch(real.name)
        found = Checkpoint(int(match[1]), int(match[2]), real) if match else None
        if found is None or not found.whole:
            raise FileNotFoundError(f"there is no checkpoint {path}")
        return found

    def checkpoint(self, number: int, step: int) -> Checkpoint:
        """Return one that is to be written."""
        return Checkpoint(number, step, self.path / f"{number:06}-step-{step}")

    def write(
        self,
        checkpoint: Checkpoint,
        rank: int,
        write: Callable[[BinaryIO], None],
        run: dict[str, Any],
    ) -> None:
        """Write the file of a rank, and rank 0's words on the run, which must tell "ranks"."""
        checkpoint.path.mkdir(parents=True, exist_ok=True)
        with whole_file(checkpoint.file_of(rank)) as file:
            write(file)
        if rank == 0:
            with whole_file(checkpoint.path / _RUN) as file:
                file.write(json.dumps(run, indent=2).encode())
        if checkpoint.whole:
            self._point_to(checkpoint)

    def _point_to(self, checkpoint: Checkpoint) -> None:
        """Let ``latest`` be a link to it; every rank that finds it whole may do so."""
        link = self.path / f".{LATEST}.{secrets.token_hex(8)}"
        link.symlink_to(checkpoint.path.name)
        os.replace(link, self.path / LATEST)

    def clear(self) -> None:
        """Remove what a run has left that did not end well."""
        for checkpoint in self.all():
            if not checkpoint.whole:
                shutil.rmtree(checkpoint.path, ignore_errors=True)
        for pattern in (f".{LATEST}.*", f"{SEEN}*"):
            for left in self.path.glob(pattern):
                left.unlink(missing_ok=True)

    def prune(self, keep: int) -> None:
        """Remove all that are whole but the last ``keep``; let ``latest`` be the last of all."""
        whole = self.whole()
        for checkpoint in whole[-1:]:
            self._point_to(checkpoint)
        for checkpoint in whole[:-keep]:
            # Not whole any more before anything else of it is gone.
            (checkpoint.path / _RUN).unlink(missing_ok=True)
            shutil.rmtree(checkpoint.path, ignore_errors=True)
