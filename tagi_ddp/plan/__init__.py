"""Predict the time of a step on more ranks than there are: ``tagi-ddp plan``.

`predict` is the model; `measure_link` measures the latency and bandwidth that it needs.
"""

from tagi_ddp.plan.measure import measure_link
from tagi_ddp.plan.model import SCHEMES, Cluster, Link, Training, memory, predict
from tagi_ddp.plan.report import default_ranks, plot, table
from tagi_ddp.plan.search import Choice, search

__all__ = [
    "SCHEMES",
    "Choice",
    "Cluster",
    "Link",
    "Training",
    "default_ranks",
    "measure_link",
    "memory",
    "plot",
    "predict",
    "search",
    "table",
]
