"""The parameters of a network on all ranks in files and dicts, as pytagi has them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from tagi_ddp.communicators.equality import all_or_none
from tagi_ddp.replica import Replica
from tagi_ddp.replica.parameter_file import (
    ParameterFileError,
    check_state_dict,
    load_statistics,
    read_parameters,
    write_parameters,
)
from tagi_ddp.update.ranks import Ranks

_CALLER = 4  # the stack level of the script in warnings


class ParameterFiles:
    """`save`, `load` and `load_state_dict` of `DDPSequential`."""

    def __init__(self, model: Any, replica: Replica, ranks: Ranks) -> None:
        self._model = model
        self._replica = replica
        self._ranks = ranks

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the parameters that rank 0 passes, and copy them to all ranks."""
        ranks, replica = self._ranks, self._replica
        with ranks.or_abort():
            replica.pull()
            replica.export()
        with all_or_none(ranks.communicator, "parameters", "Nothing was loaded."):
            if ranks.communicator.rank == 0:
                check_state_dict(self._model.state_dict(), state_dict)
        missing: list[str] = []
        with ranks.or_abort():
            if ranks.communicator.rank == 0:
                self._model.load_state_dict(dict(state_dict))
                missing = load_statistics(state_dict, replica.state())
            replica.share(ranks.communicator)
            ranks.exchange.restart()
        if missing:
            warnings.warn(
                f"state_dict has no running statistics, so these layers keep theirs: "
                f"{', '.join(missing)}. Give what state_dict() of a DDPSequential returns, or use "
                "save() and load()",
                RuntimeWarning,
                stacklevel=_CALLER,
            )

    def save(self, filename: str) -> None:
        """Write the state to a file, on rank 0."""
        if self._ranks.communicator.rank:
            return
        if unmerged := self._ranks.exchange.steps:
            warnings.warn(
                f"{filename!r} gets what rank 0 alone has learned in {unmerged} steps since the "
                "last merge: call merge() on all ranks before save()",
                RuntimeWarning,
                stacklevel=_CALLER,
            )
        self._replica.pull()
        self._replica.export()
        write_parameters(filename, self._model, self._replica.state())

    def load(self, filename: str) -> None:
        """Load a file of `save`, or of the engine."""
        self._read(lambda: read_parameters(filename, self._model, self._replica.state()))

    def load_csv(self, filename: str) -> None:
        """Load a file of pytagi's ``save_csv``."""
        self._read(lambda: self._model.load_csv(filename))

    def _read(self, read: Callable[[], object]) -> None:
        """Call ``read`` on rank 0, which fills its engine's memory, and broadcast the result."""
        ranks, replica = self._ranks, self._replica
        with ranks.or_abort():
            replica.pull()
            replica.export()
        remedy = "Nothing was loaded."
        with all_or_none(ranks.communicator, "parameters", remedy, ParameterFileError):
            if ranks.communicator.rank == 0:
                read()
        with ranks.or_abort():
            replica.push()
            replica.share(ranks.communicator)
            ranks.exchange.restart()
