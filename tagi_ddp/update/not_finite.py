"""The error of a step that is refused because of its deltas, and its text."""

from __future__ import annotations

from tagi_ddp.communicators.guard import AllRanksRaise


class NotFiniteError(AllRanksRaise, FloatingPointError):
    """A step was refused: deltas of some rank are NaN or infinite; raised on all ranks.

    It has changed no parameter. ``ranks`` are the ranks at fault.
    """

    def __init__(self, message: str, ranks: list[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)

    def __reduce__(self) -> tuple[type, tuple[str, list[int]]]:
        """Keep ``ranks`` when pickled."""
        return type(self), (str(self), list(self.ranks))


def refusal(what: str, ranks: list[int], layer: str = "") -> str:
    """Return the text for ``what``, like "an earlier step was"; ``layer`` is at fault here."""
    where = f" (here: layer {layer})" if layer else ""
    return (
        f"{what} refused on all ranks: deltas of ranks {ranks} were NaN or infinite{where}. No "
        "parameter has changed by it. Look at the inputs, the targets and the observation variance "
        "of those ranks."
    )
