"""Programs written for heat run here: its example on MNIST, and its public tests of DataParallel.

They are read from a checkout of github.com/helmholtz-analytics/heat, of the installed heat's
version, that TAGI_DDP_HEAT_SOURCE names. All that changes is what ``ht.nn.DataParallel``,
``ht.nn.DataParallelMultiGPU`` and ``ht.optim.DataParallelOptimizer`` name.
"""

import os
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
from support.clients import IMAGES, run_under_mpirun, write_mnist_files

SOURCE = os.environ.get("TAGI_DDP_HEAT_SOURCE")
pytestmark = pytest.mark.skipif(not SOURCE, reason="TAGI_DDP_HEAT_SOURCE names no checkout of heat")


def find_installed(name):
    if not any((Path(folder) / name).is_dir() for folder in sys.path):
        pytest.skip(f"there is no {name}: pip install --no-deps heat torchvision, of one torch")


def test_the_example_on_mnist_trains_on_two_ranks(tmp_path):
    find_installed("heat")
    write_mnist_files(tmp_path / "heat" / "datasets" / "MNISTDataset" / "raw")
    folder = tmp_path / "examples" / "nn"
    folder.mkdir(parents=True)
    shutil.copy(Path(SOURCE, "examples", "nn", "mnist.py"), folder)
    done = run_under_mpirun(__file__, "mnist.py", "--epochs", "2", "--no-cuda", cwd=folder)
    found = re.findall(r"Average loss: [\d.]+, Accuracy: (\d+)/(\d+)", done.stdout)
    assert len(found) == 4, "two epochs on two ranks, each with all images of the test"
    for right, images in found[-2:]:
        assert int(images) == IMAGES["t10k"]
        assert int(right) > 0.6 * int(images), "ten classes"
    assert found[0] == found[1] or found[0] == found[2], "the ranks' networks are equal"


def test_the_public_tests_of_data_parallel_pass(tmp_path):
    find_installed("heat")
    path = str(Path(SOURCE, "tests", "nn", "test_data_parallel.py"))
    done = run_under_mpirun(__file__, path, cwd=tmp_path)
    assert done.stderr.count("Ran 7 tests") == 2
    assert done.stderr.count("\nOK") == 2


def main():
    """Run a program of heat's as one of mpirun's processes, or the tests in it."""
    import unittest

    import heat as ht

    from tagi_ddp import optim

    ht.nn.DataParallel = optim.DataParallel
    ht.nn.DataParallelMultiGPU = optim.DataParallelMultiGPU
    ht.optim.DataParallelOptimizer = optim.DataParallelOptimizer
    program = sys.argv.pop(1)
    sys.path[0] = ""
    names = runpy.run_path(program, run_name="__main__")
    if "unittest" in names:
        case = names["TestDataParallel"]
        tests = unittest.defaultTestLoader.loadTestsFromTestCase(case)
        sys.exit(not unittest.TextTestRunner().run(tests).wasSuccessful())


if __name__ == "__main__":
    main()
