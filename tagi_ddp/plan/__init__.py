"""What a step will take on more ranks than there are: ``tagi-ddp plan``.

`predict` has the model, `measure_link` the numbers that it needs of a network.
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
