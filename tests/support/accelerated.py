"""A plugin of pytest: networks of pytagi that a client's tests make are accelerated.

CLIENT_COMPUTE says by what; empty: they stay as they are.
"""

import os
from typing import Any

import pytagi.nn

from tagi_ddp import accelerate

COMPUTE: Any = os.environ["CLIENT_COMPUTE"]
Plain = pytagi.nn.Sequential


class Sequential(Plain):  # type: ignore[misc]
    """In place of pytagi's: what it makes is one that `accelerate` has wrapped."""

    def __new__(cls, *layers: Any) -> Any:
        return accelerate(Plain(*layers), COMPUTE)


if COMPUTE:
    pytagi.nn.Sequential = Sequential
