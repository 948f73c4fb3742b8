"""Shares of data for ranks, metrics over all ranks, and output of rank 0."""

from __future__ import annotations

from tagi_ddp.data.loader import PreparedLoader, prepare
from tagi_ddp.data.logs import log, progress
from tagi_ddp.data.metrics import gather, reduce_metrics
from tagi_ddp.data.sampler import DistributedSampler, share_of

__all__ = [
    "DistributedSampler",
    "PreparedLoader",
    "gather",
    "log",
    "prepare",
    "progress",
    "reduce_metrics",
    "share_of",
]
