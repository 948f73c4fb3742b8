"""Processors of anemoi-models, of the extra ``bench``, split over two ranks by our functions."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("anemoi_processors.py")
PROCESSORS = ("GNNProcessor", "GraphTransformerProcessor", "TransformerProcessor")


@pytest.mark.skipif(
    not importlib.util.find_spec("anemoi"),
    reason="no anemoi-models; with Python 3.11 or later: pip install '.[bench]'",
)
def test_two_ranks_compute_what_one_process_computes():
    command = [sys.executable, "-m", "tagi_ddp", "run", "-n", "2", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = re.findall(r"(\w+Processor) (\S+)$", done.stdout, re.MULTILINE)
    assert sorted(name for name, _ in found) == sorted(PROCESSORS * 2)
    assert max(float(difference) for _, difference in found) < 1e-12
