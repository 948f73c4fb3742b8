"""Checkpoints of whole runs; docs/reliability.md."""

from tagi_ddp.checkpoint.checkpoints import CheckpointError, Checkpoints

__all__ = ["CheckpointError", "Checkpoints"]
