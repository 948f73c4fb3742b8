"""Starts the ranks of one host, forwards what they print, and ends all when one fails."""

from __future__ import annotations

from tagi_ddp.launcher.failure import LaunchError
from tagi_ddp.launcher.launch import launch

__all__ = ["LaunchError", "launch"]
