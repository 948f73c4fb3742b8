"""The engine, pytagi: loading it anywhere, and reaching the memory of its layers."""

from __future__ import annotations

from tagi_ddp.engine.loader import cuda_available

__all__ = ["cuda_available"]
