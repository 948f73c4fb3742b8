"""The parameters of a DDPSequential in files and dicts, as pytagi has them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from tagi_ddp.communicators import Communicator
from tagi_ddp.communicators.equality import Entry, require_equal
from tagi_ddp.engine.threads import one_at_a_time
from tagi_ddp.replica.parameter_file import (
    ParameterFileError,
    check_state_dict,
    load_statistics,
    read_parameters,
    write_parameters,
)
from tagi_ddp.sequential.interface import MergeInterface


class FileInterface(MergeInterface):
    """`save`, `load` and `load_state_dict`, for a replica on each rank."""

    model: Any
    communicator: Communicator
    _or_abort: Callable[[], AbstractContextManager[None]]

    @one_at_a_time
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the parameters that rank 0 passes, and copy them to all ranks; a collective call.

        Running statistics are loaded, too, if ``state_dict`` is the result of `state_dict`; else
        they stay, and a warning names their layers. Raises ValueError, on all ranks and before a
        parameter changes, if rank 0's do not fit.
        """

        def check() -> list[Entry]:
            if self.communicator.rank == 0:
                check_state_dict(self.model.state_dict(), state_dict)
            return []

        with self._or_abort():
            self._replica.pull()
            self._replica.export()
        require_equal(self.communicator, check, "parameters", "Nothing was loaded.")
        missing: list[str] = []
        with self._or_abort():
            if self.communicator.rank == 0:
                self.model.load_state_dict(dict(state_dict))
                missing = load_statistics(state_dict, self._replica.state())
            self._replica.share(self.communicator)
            self._exchange.restart()
        if missing:
            warnings.warn(
                f"state_dict has no running statistics, so these layers keep theirs: "
                f"{', '.join(missing)}. Give what state_dict() of a DDPSequential returns, or use "
                "save() and load()",
                RuntimeWarning,
                stacklevel=2,
            )

    @one_at_a_time
    def save(self, filename: str) -> None:
        """Write the parameters and running statistics to a file, on rank 0; others do nothing.

        The file has the engine's format, and is replaced as a whole or not at all; OSError if not.
        If posteriors are merged, call `merge` on all ranks before; this warns of unmerged steps.
        """
        if self.communicator.rank == 0 and self.unmerged_steps:
            warnings.warn(
                f"{filename!r} gets what rank 0 alone has learned in {self.unmerged_steps} steps "
                "since the last merge: call merge() on all ranks before save()",
                RuntimeWarning,
                stacklevel=3,
            )
        if self.communicator.rank == 0:
            self._replica.pull()
            self._replica.export()
            write_parameters(filename, self.model, self._replica.state())

    @one_at_a_time
    def load(self, filename: str) -> None:
        """Load a file of `save`, or of the engine; a collective call: rank 0 reads, others receive.

        Raises ParameterFileError on all ranks, before a parameter changes; rank 0 may raise an
        OSError of its own instead.
        """
        self._read(lambda: read_parameters(filename, self.model, self._replica.state()))

    @one_at_a_time
    def load_csv(self, filename: str) -> None:
        """Load a file of pytagi's ``save_csv``; a collective call, like `load`."""
        self._read(lambda: self.model.load_csv(filename))

    def params_from(self, other: Any) -> None:
        """Copy the parameters and running statistics of another network; a collective call.

        ``other`` is a DDPSequential or a pytagi Sequential. Raises as `load_state_dict` does.
        """
        self.load_state_dict(other.state_dict())

    def _read(self, read: Callable[[], object]) -> None:
        """Call ``read`` on rank 0, which fills its engine's memory, and broadcast the result."""
        with self._or_abort():
            self._replica.pull()
            self._replica.export()

        def read_on_first() -> list[Entry]:
            if self.communicator.rank == 0:
                read()
            return []

        remedy = "Nothing was loaded."
        require_equal(self.communicator, read_on_first, "parameters", remedy, ParameterFileError)
        with self._or_abort():
            self._replica.push()
            self._replica.share(self.communicator)
            self._exchange.restart()
