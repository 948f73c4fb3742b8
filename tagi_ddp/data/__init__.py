"""Shares of data for ranks, seeds, classes, metrics over all ranks, and output of rank 0."""

from __future__ import annotations

from tagi_ddp.data.classes import (
    ClassScores,
    ClassTree,
    Reliability,
    class_scores,
    reliability,
)
from tagi_ddp.data.idx import read_idx
from tagi_ddp.data.loader import PreparedLoader, prepare
from tagi_ddp.data.logs import log, progress
from tagi_ddp.data.metrics import gather, reduce_metrics
from tagi_ddp.data.sampler import DistributedSampler, share_of
from tagi_ddp.data.seeds import seed_ranks
from tagi_ddp.data.stream import PreparedStream
from tagi_ddp.data.trackers import Tracker

__all__ = [
    "ClassScores",
    "ClassTree",
    "DistributedSampler",
    "PreparedLoader",
    "PreparedStream",
    "Reliability",
    "Tracker",
    "class_scores",
    "gather",
    "log",
    "prepare",
    "progress",
    "read_idx",
    "reduce_metrics",
    "reliability",
    "seed_ranks",
    "share_of",
]
