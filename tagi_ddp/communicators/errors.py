"""The errors of every communicator, and the one form of their texts, which C++ follows too.

Each text reads ``<operation> on rank <r> of <size> (<backend>): <what happened>. <what to do>``:

- The operation is ``all_reduce #17``: the 17th collective of this communicator, counted from 1
  (all collectives count, `barrier` and `split` too, so all ranks count alike); or ``send #3 to
  rank 1`` and ``recv #3 from rank 0``: the third message from rank 0 to rank 1.
- `Timeout`: ``rank 2 did not come within 5 s; its process lives, and its last call was
  all_reduce #16. Look at its output; if it is only slow, raise timeout= of DDPConfig.from_env or
  init.`` (``ranks 2 and 3 did not come ...``; while ranks connect, nobody knows if they live.)
- `PeerLost`: ``rank 2 died. Look at its output for the first error.``, or ``rank 2 has closed its
  communicator. Make the same calls on all ranks before close().``, or ``rank 2 gave up: <reason>``
  after `abort` or after an error of that rank's own.
- `Mismatch`: ``rank 1 called broadcast(float32[8], root=0), this rank all_reduce(float32[8],
  op=sum). Make the same calls in the same order with fitting arguments on all ranks.``
- Once broken, an operation raises the same type and ranks again: ``not started, this communicator
  failed before (<text of the first error>). Make a new one.``
- Closed: a plain `CommunicatorError`: ``this communicator is closed. Make a new one.``
- In a process that the rank has forked: a plain `CommunicatorError`: ``this communicator is that of
  process 42, of which this is a fork. Make a new one.``

A rank that fails sends its error to the others, and each raises the same type with the same ranks.
One exception: a rank for which others waited in vain raises `PeerLost` that names them.
A rank that forwards an error adds nothing: all texts name the rank at which it began.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_OWN_CALL = re.compile(r"rank \d+ called .*, this rank (\w+\(.*\))\. Make the same calls")
_MISSED = re.compile(r"gave up: ranks? [\d, and]+ did not come within")
_WHERE = re.compile(r"^\w+(?: #\d+)?(?: (?:to|from) rank \d+)? on rank \d+ of \d+ \(\w+\): ")


class CommunicatorError(RuntimeError):
    """An operation could not be completed.

    ``ranks`` holds the ranks at fault (missing, lost or different); it is empty if none is.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        """Make an error with the text ``message`` that blames ``ranks``."""
        super().__init__(message)
        self.ranks: tuple[int, ...] = tuple(ranks)

    def __reduce__(self) -> tuple[type, tuple[str, tuple[int, ...]]]:
        """Keep ``ranks`` when pickled."""
        return type(self), (str(self), self.ranks)


class Timeout(CommunicatorError, TimeoutError):
    """The ranks in ``ranks`` are not known to be dead, but did not take part in time."""


class PeerLost(CommunicatorError, ConnectionError):
    """The ranks in ``ranks`` died, closed their communicator, or gave up with an error."""


class Mismatch(CommunicatorError, ValueError):
    """Ranks called different operations, or the same one with arguments that do not fit."""


class BackendUnavailable(CommunicatorError):
    """The backend cannot work here; the text says what is missing and what to do."""


REENTERED = (
    "called by a signal handler, while its thread is in another operation of this communicator. "
    "Call it after that one."
)


def what_happened(error: CommunicatorError) -> str:
    """Return the text of ``error`` without the operation and the rank at its beginning."""
    return _WHERE.sub("", str(error), count=1)


def forwarded(
    kind: type[CommunicatorError], ranks: Sequence[int], rank: int, text: str, to: int
) -> str:
    """Return the text that rank ``to`` raises for an error of ``rank``: ``text``, by ``ranks``.

    It names ``rank`` if that one or ``to`` is at fault, or if ``text`` may contain "this rank".
    """
    passed_on = issubclass(kind, (PeerLost, Timeout)) and not {rank, to} & set(ranks)
    own = f"rank {rank} gave up: "
    return text if passed_on or text.startswith(own) else own + text


def not_started(where: str, first: CommunicatorError) -> CommunicatorError:
    """Return the error of an operation on a communicator that ``first`` has broken."""
    text = f"{where}: not started, this communicator failed before ({first}). Make a new one."
    return type(first)(text, first.ranks)


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 2", "ranks 2 and 3", "ranks 1, 2 and 3"."""
    *first, last = [str(rank) for rank in sorted(ranks)]
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"


def timeout_text(ranks: Sequence[int], seconds: float, last: str | None = None) -> str:
    """Return the text of a Timeout: ``ranks`` did not take part within ``seconds``.

    ``last`` is the last call of those ranks, whose processes live; "" if it is not known. None: it
    is not known if they live.
    """
    one = len(ranks) == 1
    its, it_is = ("its", "it is") if one else ("their", "they are")
    lives = "" if last is None else f"; {its} process{' lives' if one else 'es live'}"
    if last:
        lives += f", and {its} last call was {last}"
    return (
        f"{name_ranks(ranks)} did not come within {seconds:g} s{lives}. Look at {its} output; if "
        f"{it_is} only slow, raise timeout= of DDPConfig.from_env or init."
    )


def was_missed(error: CommunicatorError) -> bool:
    """Return whether others raised ``error`` because they waited for this rank in vain."""
    return _MISSED.search(str(error)) is not None


def died_text(ranks: Sequence[int]) -> str:
    """Return the text of a PeerLost: ``ranks`` died."""
    its = "its" if len(ranks) == 1 else "their"
    return f"{name_ranks(ranks)} died. Look at {its} output for the first error."


def closed_text(rank: int) -> str:
    """Return the text of a PeerLost: ``rank`` closed its communicator."""
    return (
        f"rank {rank} has closed its communicator. Make the same calls on all ranks before close()."
    )


def mismatch_text(others: dict[int, str], own: str) -> str:
    """Return the text of a Mismatch: the calls ``others``, by rank, differ from ``own``."""
    calls = ", ".join(f"rank {rank} called {call}" for rank, call in sorted(others.items()))
    return (
        f"{calls}, this rank {own}. "
        "Make the same calls in the same order with fitting arguments on all ranks."
    )


def own_call(text: str) -> str | None:
    """Return the own call of the rank that made ``text`` by `mismatch_text`; else None."""
    found = _OWN_CALL.match(text)
    return found and found[1]
