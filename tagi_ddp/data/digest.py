"""A hash of samples, by which ranks notice that they have different data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

from tagi_ddp.data.empty_batch import parts_of

_NUMBERS = 1024  # of each array; more would take time, and show no more


def digest_of(samples: Iterable[Any]) -> str:
    """Return a hash of the arrays, numbers and texts in samples; other objects do not count."""
    digest = hashlib.blake2b(digest_size=8)
    for sample in samples:
        for leaf in _leaves(sample):
            if getattr(leaf, "shape", None) and hasattr(leaf, "tolist"):
                leaf = leaf.reshape(-1)[:_NUMBERS].tolist()
            elif hasattr(leaf, "item"):
                leaf = leaf.item()
            if isinstance(leaf, str | bytes | int | float | complex | list):
                digest.update(repr(leaf).encode())
    return digest.hexdigest()


def _leaves(value: Any) -> Iterator[Any]:
    parts = parts_of(value)
    if parts is None:
        yield value
    else:
        for _, part in parts:
            yield from _leaves(part)
