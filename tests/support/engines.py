"""Abilities of the engine that is there; tests of others are skipped."""

from __future__ import annotations

import pytest


def require_activation(kind: str) -> None:
    """Skip the test if the engine's ``kind`` of activation writes to memory of others."""
    from tagi_ddp.engine.dialect import dialect, softmax_works

    if kind == "Softmax" and dialect().sequences and not softmax_works():
        pytest.skip("this engine's Softmax writes to memory of others")


def require_single_rows() -> None:
    """Skip the test in engines with sequences."""
    from tagi_ddp.engine.dialect import dialect

    if dialect().sequences:
        pytest.skip("in this engine layers see the steps of a sample one at a time")


def require_wheel() -> None:
    """Skip the test if the engine has been built from source, for the CPU alone."""
    from tagi_ddp.commands.checks import is_built_from_source

    if is_built_from_source():
        pytest.skip("the engine is not the wheel's")
