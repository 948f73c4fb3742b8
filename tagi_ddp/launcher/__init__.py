"""Launcher of a host's ranks: forwards their output and ends all of them if one fails."""

from __future__ import annotations

from tagi_ddp.launcher.failure import LaunchError
from tagi_ddp.launcher.launch import launch

__all__ = ["LaunchError", "launch"]
