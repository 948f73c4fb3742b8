"""Output of rank 0 for all ranks: one progress bar, one line."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from tagi_ddp.environment import rank_and_size, shows_bars

if TYPE_CHECKING:
    from tqdm import tqdm

T = TypeVar("T")

_SECONDS = 5.0  # The time between two lines if no bar is drawn.
_LINE = "{desc}{n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"


def progress(iterable: Iterable[T], *, rank: int | None = None, **tqdm_kwargs: Any) -> tqdm[T]:
    """Iterate with tqdm's progress bar on rank 0 and with a silent one on the others.

    On a terminal, and in a notebook, it is a bar; elsewhere, as in a file, a line every 5 seconds.
    The environment variable TAGI_DDP_TERMINAL, 1 or 0, forces a bar or lines. ``rank`` is by
    default that of torch's default group, or the launcher's; ``tqdm_kwargs`` go to tqdm. The result
    has tqdm's methods (``set_postfix``, ``write``, ...) on all ranks.
    """
    from tqdm import tqdm

    own = rank_and_size()[0] if rank is None else rank
    shown = own == 0 and not tqdm_kwargs.pop("disable", False)
    shown = shown and (sys.stderr is not None or tqdm_kwargs.get("file") is not None)
    if shown and "file" not in tqdm_kwargs and not shows_bars(sys.stderr):
        seconds = tqdm_kwargs.setdefault("mininterval", _SECONDS)
        if desc := tqdm_kwargs.get("desc"):
            tqdm_kwargs["desc"] = f"{desc.removesuffix(': ')}: "  # `set_description` writes both.
        lines = {"file": _Lines(sys.stderr, seconds), "position": 0, "bar_format": _LINE}
        tqdm_kwargs = {**lines, **tqdm_kwargs}
    return tqdm(iterable, disable=not shown, **tqdm_kwargs)


def log(*values: object, sep: str = " ", rank: int | None = None) -> None:
    """Print a line on rank 0 only, above its progress bar if there is one.

    ``rank`` is this process's number; None: that of torch's default group, or the launcher's.
    """
    if (rank_and_size()[0] if rank is None else rank) != 0 or sys.stdout is None:
        return
    from tqdm import tqdm

    tqdm.write(sep.join(map(str, values)), file=sys.stdout)
    sys.stdout.flush()


class _Lines:
    """A file of lines: the first and the last state of a bar, and one every ``seconds``."""

    def __init__(self, file: TextIO, seconds: float) -> None:
        self._file = file
        self._seconds = seconds
        self._next = 0.0  # The earliest time of the next line.
        self._state = ""  # The last state, unless it has been written.

    def write(self, text: str) -> int:
        """Record a state, which begins with a carriage return, or the end of the last one."""
        self._state = text.strip() or self._state
        if text.endswith("\n") or time.monotonic() >= self._next:
            if self._state:
                self._file.write(f"{self._state}\n")
                self._next = time.monotonic() + self._seconds
            self._state = ""
        return len(text)

    def flush(self) -> None:
        """Flush the file."""
        self._file.flush()
