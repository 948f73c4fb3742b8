"""Checkpoints of whole runs.

docs/checkpoints.md has an example.
"""

from tagi_ddp.checkpoint.checkpoints import Checkpoints
from tagi_ddp.checkpoint.errors import CheckpointError
from tagi_ddp.checkpoint.preemption import Preempted
from tagi_ddp.checkpoint.tree import DamagedFile, read_tree

__all__ = ["CheckpointError", "Checkpoints", "DamagedFile", "Preempted", "read_tree"]
